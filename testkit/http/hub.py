"""A hub of models as huggingface_hub's client sees it: a local HTTP server that lists files, sends them, and cuts."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePath

HUB_ID = "acme/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Hub with one model, `HUB_ID`; safetensors are in git-lfs there, all other files in git."""

    files: Mapping[str, bytes]
    cuts_after: int | None = None
    """Bytes of a safetensors file after which every answer is cut; None: none is."""
    damage: bytes = b""
    """Bytes that take the place of the first ones of a safetensors file."""
    url: str = ""
    sent: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, first byte and number of bytes of each part of a file that was sent."""

    def hash_of(self, name: str) -> str:
        content = self.files[name]
        if name.endswith(".safetensors"):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def listing(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(content), "oid": self.hash_of(name)[:40]}
            | ({"lfs": {"oid": self.hash_of(name), "size": len(content), "pointerSize": 1}} if ".safe" in name else {})
            for name, content in self.files.items()
        ]

    def part_of(self, name: str, start: int) -> bytes:
        """Return the bytes of a file from `start` to its end, or to where the answer is cut."""
        content, damage = self.files[name], self.damage
        end = len(content)
        if name.endswith(".safetensors"):
            content = damage + content[len(damage) :]
            end = end if self.cuts_after is None else min(end, start + self.cuts_after)
        self.sent.append((name, start, end - start))
        return content[start:end]


@contextmanager
def serving_hub(hub: Hub) -> Iterator[None]:
    """Serve the hub at `hub.url` within the context."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            path = PurePath(self.path.partition("?")[0]).as_posix()
            if path.startswith(f"/api/models/{HUB_ID}/tree/"):
                self._send_json(hub.listing())
            elif path.startswith(f"/api/models/{HUB_ID}"):
                self._send_json({"id": HUB_ID, "sha": COMMIT, "siblings": []})
            elif path.startswith(f"/{HUB_ID}/resolve/") and path.rpartition("/")[2] in hub.files:
                self._send_file(path.rpartition("/")[2])
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _send_json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b"")

        def _send_file(self, name: str) -> None:
            size = len(hub.files[name])
            start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            self.send_header("Content-Length", str(size - start))
            self.send_header("ETag", f'"{hub.hash_of(name)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()
            if self.command == "GET":
                with suppress(ConnectionError):  # the client may leave
                    self.wfile.write(hub.part_of(name, start))
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
