"""Client of a server's file and batch endpoints, for the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from serve_app.cli.client import JsonObject, ServerClient

_PAGE = 100


class BatchClient:
    """Client of the files and batches of one server; every failure of the server is a ServerError."""

    def __init__(self, server: ServerClient) -> None:
        self._server = server

    def upload(self, path: Path) -> JsonObject:
        """Upload a file, read while it is sent, and return its file object."""
        with path.open("rb") as content:
            files = {"file": (path.name, content)}
            return self._server.json("POST", "/v1/files", data={"purpose": "batch"}, files=files)

    def submit(self, file_id: str, endpoint: str, window: str, metadata: Mapping[str, str]) -> JsonObject:
        """Create a batch and return it."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        metadata_field = {"metadata": dict(metadata)} if metadata else {}
        return self._server.json("POST", "/v1/batches", json=body | metadata_field)

    def batch(self, batch_id: str) -> JsonObject:
        """Return a batch in its present state."""
        return self._server.json("GET", f"/v1/batches/{batch_id}")

    def cancel(self, batch_id: str) -> JsonObject:
        """Start the cancellation of a batch and return it."""
        return self._server.json("POST", f"/v1/batches/{batch_id}/cancel")

    def latest(self, limit: int) -> list[JsonObject]:
        """Return the `limit` newest batches, newest first."""
        return list(islice(self._newest_first(min(limit, _PAGE)), limit))

    def download(self, file_id: str, path: Path) -> None:
        """Write a file's content to `path`, atomically."""
        self._server.download(f"/v1/files/{file_id}/content", path)

    def _newest_first(self, page_size: int) -> Iterator[JsonObject]:
        after: dict[str, str] = {}
        while True:
            page = self._server.json("GET", "/v1/batches", params={"limit": page_size, **after})
            yield from page["data"]
            if not page["has_more"]:
                return
            after = {"after": page["last_id"]}
