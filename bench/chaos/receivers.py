"""Receivers of webhooks that hang, fail, redirect or answer without end, beside one that accepts all."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BAD = ("hang", "fail", "redirect", "flood")
_FLOOD_BYTES = 10**9
_HANG_S = 3600.0


@dataclass
class Receivers:
    """Their address, and what the good one has received."""

    url: str = ""
    ids: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Ids of the webhooks, one for each delivery, by the id of the job."""
    received_s: list[float] = field(default_factory=list)


@contextlib.contextmanager
def receiving() -> Iterator[Receivers]:
    """Run the receivers on a free port of this machine; the path names the kind, `/good` the good one."""
    receivers, is_over = Receivers(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            event = json.loads(self.rfile.read(int(self.headers["content-length"])))
            match self.path:
                case "/hang":
                    is_over.wait(_HANG_S)
                case "/fail":
                    self._answer(500)
                case "/redirect":
                    self._answer(302, ("location", "http://169.254.169.254/"))
                case "/flood":
                    self._answer(200, ("content-length", str(_FLOOD_BYTES)))
                    self._flood()
                case _:
                    receivers.ids[event["data"]["id"]].append(self.headers["webhook-id"])
                    receivers.received_s.append(time.monotonic())
                    self._answer(200)

        def _answer(self, status: int, *headers: tuple[str, str]) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()

        def _flood(self) -> None:
            with contextlib.suppress(OSError):
                for _ in range(_FLOOD_BYTES // 2**20):
                    self.wfile.write(bytes(2**20))

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receivers.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield receivers
    finally:
        is_over.set()
        server.shutdown()
