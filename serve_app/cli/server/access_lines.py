"""Access lines of the ingresses, printed on the terminal of `headway serve`."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

Fields = Mapping[str, Any]

_SHOWN = {
    "http_method": "method",
    "path": "path",
    "status": "status",
    "error_code": "error",
    "model": "model",
    "band": "band",
    "tenant": "tenant",
    "prompt_tokens": "in",
    "completion_tokens": "out",
    "cached_tokens": "cached",
    "queue_s": "queue_s",
    "ttft_s": "ttft_s",
    "duration_s": "total_s",
    "request_id": "request_id",
}
"""Map from the ingress's name of a field to its name in an access line, in the order of the line."""
_WITHOUT_NAMES = ("method", "path", "status")
_MAX_LINE_BYTES = 2**20


class LogFormat(Enum):
    """Format of the access lines."""

    TEXT = "text"
    """Words and `name=value`."""
    JSON = "json"
    """One JSON object a line."""


def json_line(fields: Fields) -> str:
    """Return an access line as a JSON object; a field that does not apply is null."""
    shown = {name: fields.get(source) for source, name in _SHOWN.items()}
    return json.dumps({"time": _time_text(fields["time_unix_s"]), **shown})


def text_line(fields: Fields) -> str:
    """Return an access line as text; a field that does not apply is left out.

    A client's text is quoted if it has more than plain visible characters. So it cannot control the terminal or imitate
    another field.
    """
    shown = {name: fields.get(source) for source, name in _SHOWN.items()}
    words = [_time_text(fields["time_unix_s"]), *(_word(shown.pop(name)) for name in _WITHOUT_NAMES)]
    return " ".join([*words, *(f"{name}={_word(value)}" for name, value in shown.items() if value is not None)])


def _time_text(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    is_plain = text.isascii() and text.isprintable() and text and not set(text) & set(' "\\=')
    return text if is_plain else json.dumps(text)


class AccessLines:
    """Server of the socket to which the ingresses send access lines; it prints each one.

    It runs in threads of its own, one for each ingress.
    """

    def __init__(self, path: Path, line_format: LogFormat, write: Callable[[str], object]) -> None:
        """Listen at `path`, open to the owner alone. `write` gets each line, with its end."""
        line_of = json_line if line_format is LogFormat.JSON else text_line

        class Reader(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while data := self.rfile.readline(_MAX_LINE_BYTES):
                    fields = json.loads(data)
                    if num_dropped := fields.pop("num_dropped", 0):
                        write(_dropped_line(num_dropped, line_format))
                    write(line_of(fields) + "\n")

        self._server = _Server(str(path), Reader)
        path.chmod(0o600)
        threading.Thread(target=self._server.serve_forever, name="access-lines", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False


def _dropped_line(num_dropped: int, line_format: LogFormat) -> str:
    if line_format is LogFormat.JSON:
        return json.dumps({"num_dropped": num_dropped}) + "\n"
    return f"... {num_dropped} access lines were dropped: the terminal was too slow\n"
