"""Receiver of webhooks that records their ids."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver:
    """Received webhook ids, by the id of the ended batch or job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: dict[str, list[str]] = {}
        self.url = ""

    def received(self, webhook_id: str, subject_id: str) -> None:
        """Record one webhook."""
        with self._lock:
            self._ids.setdefault(subject_id, []).append(webhook_id)

    def ids(self, subject_id: str) -> list[str]:
        """Return the ids of the webhooks about a batch's or job's end, one for each delivery."""
        with self._lock:
            return list(self._ids.get(subject_id, ()))


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver on a free port of this machine."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            event = json.loads(self.rfile.read(int(self.headers["content-length"])))
            receiver.received(self.headers["webhook-id"], event["data"]["id"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
