"""Client of a server's file and batch endpoints, for the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

JsonObject = dict[str, Any]

_TIMEOUT = httpx.Timeout(60.0, connect=10.0)


class ServerError(Exception):
    """Error of a server that is unreachable or refuses a request; `may_pass`: a retry may help."""

    def __init__(self, message: str, may_pass: bool) -> None:
        super().__init__(message, may_pass)
        self.message = message
        self.may_pass = may_pass


class BatchClient:
    """Client of one server, with or without an API key; every failure of the server is a ServerError."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._url = url.rstrip("/")
        self._http = httpx.Client(base_url=self._url, headers=headers, timeout=_TIMEOUT, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def upload(self, path: Path) -> JsonObject:
        """Upload a file, read while it is sent, and return its file object."""
        with path.open("rb") as content:
            return self._json("POST", "/v1/files", data={"purpose": "batch"}, files={"file": (path.name, content)})

    def submit(self, file_id: str, endpoint: str, window: str, metadata: Mapping[str, str]) -> JsonObject:
        """Create a batch and return it."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return self._json("POST", "/v1/batches", json=body | ({"metadata": dict(metadata)} if metadata else {}))

    def batch(self, batch_id: str) -> JsonObject:
        """Return a batch in its present state."""
        return self._json("GET", f"/v1/batches/{batch_id}")

    def cancel(self, batch_id: str) -> JsonObject:
        """Start the cancellation of a batch and return it."""
        return self._json("POST", f"/v1/batches/{batch_id}/cancel")

    def download(self, file_id: str, path: Path) -> None:
        """Write a file's content to `path`, atomically."""
        partial = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with partial.open("wb") as target, self._http.stream("GET", f"/v1/files/{file_id}/content") as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                for part in response.iter_bytes():
                    target.write(part)
            partial.replace(path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        finally:
            partial.unlink(missing_ok=True)

    def _json(self, method: str, path: str, **options: Any) -> JsonObject:
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise _refusal(response)
        try:
            value = response.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ServerError(f"{self._url} does not answer like a Headway server", may_pass=False)
        return value

    def _unreachable(self, error: httpx.HTTPError) -> ServerError:
        return ServerError(f"cannot reach {self._url}: {error or type(error).__name__}", may_pass=True)


def _refusal(response: httpx.Response) -> ServerError:
    may_pass = response.status_code in (408, 429) or response.status_code >= 500
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.reason_phrase
    return ServerError(f"{message} (HTTP {response.status_code})", may_pass)
