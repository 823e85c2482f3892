"""Access log: one line of JSON for each finished exchange, for the terminal of `headway serve`."""

from __future__ import annotations

import logging
import socket

from pydantic_core import to_json

from serve_app.openai.reply.format import JsonObject

_log = logging.getLogger(__name__)


class AccessLog:
    """Writer of access lines to a Unix socket. It never waits.

    A line for which the socket's buffer has no room is dropped. The next line that is sent has the number of dropped
    lines in `num_dropped`. Without a reader every line is dropped.

    Invariant: at most one line waits in this object, the rest of a line whose beginning was sent.
    """

    def __init__(self, path: str) -> None:
        """Connect to the socket at `path`."""
        self._unsent = b""
        self._num_dropped = 0
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
            self._socket.setblocking(False)
        except OSError as error:
            _log.warning("access lines cannot be sent", extra={"path": path, "error": str(error)})
            self.close()

    def write(self, fields: JsonObject) -> None:
        """Send a line with these fields, or drop it."""
        if self._unsent:
            self._send(self._unsent)
        if self._unsent or self._socket is None:
            self._num_dropped += 1
            return
        self._send(to_json(fields | {"num_dropped": self._num_dropped}) + b"\n")

    def close(self) -> None:
        """Close the connection; later lines are dropped."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._unsent = None, b""

    def _send(self, data: bytes) -> None:
        assert self._socket is not None
        try:
            num_sent = self._socket.send(data)
        except BlockingIOError:
            num_sent = 0
        except OSError:  # the reader has gone
            self.close()
            return
        is_new = data is not self._unsent
        if num_sent == 0 and is_new:
            self._num_dropped += 1
            return
        if is_new:
            self._num_dropped = 0
        self._unsent = data[num_sent:]
