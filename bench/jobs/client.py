"""Client of files and batches, and the input files that it uploads."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from bench.routing.streams import Burst, LoadSpec, Stream, make_schedule
from serve_app.benchmark.trace import TracedRequest
from testkit.serving.served import wait_for

ENDPOINT = "/v1/completions"
_POLL_PERIOD_S = 0.2
_FINAL = ("completed", "failed", "expired", "cancelled")


class BatchClient:
    """Client of one served application."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=600.0, trust_env=False)

    def upload(self, path: Path) -> str:
        """Upload an input file as a stream; return its id."""
        with path.open("rb") as file:
            return str(self._json("POST", "/v1/files", data={"purpose": "batch"}, files={"file": file})["id"])

    def create(self, file_id: str, callback_url: str | None = None, window: str = "24h") -> str:
        """Create a batch and return its id; a webhook at its end goes to `callback_url`."""
        body = {
            "input_file_id": file_id,
            "endpoint": ENDPOINT,
            "completion_window": window,
            "callback_url": callback_url,
        }
        return str(self._json("POST", "/v1/batches", json=body)["id"])

    def submit(
        self, stream: Stream, num_lines: int, seed: int, model: str = "headway-demo", window: str = "24h"
    ) -> str:
        """Create a batch of lines made by `write_lines`; return its id."""
        with tempfile.TemporaryDirectory(prefix="hw-lines-") as folder:
            path = Path(folder) / "lines.jsonl"
            write_lines(path, stream, num_lines, seed, model)
            return self.create(self.upload(path), window=window)

    def get(self, batch_id: str) -> dict[str, Any]:
        """Return the batch in its present state."""
        return self._json("GET", f"/v1/batches/{batch_id}")

    def wait(self, batch_id: str, is_so: Callable[[dict[str, Any]], bool], limit_s: float) -> dict[str, Any]:
        """Wait until `is_so` of the batch, or until it is final; return it.

        Raises:
            TimeoutError: neither came within `limit_s`.
        """

        def found() -> dict[str, Any] | None:
            batch = self.get(batch_id)
            return batch if is_so(batch) or is_final(batch) else None

        return wait_for(found, f"batch {batch_id} is what it is to be", limit_s, _POLL_PERIOD_S)

    def cancel(self, batch_id: str) -> None:
        """Begin to cancel a batch."""
        self._json("POST", f"/v1/batches/{batch_id}/cancel")

    def results(self, file_id: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of an output or error file, downloaded as a stream."""
        with self._http.stream("GET", f"/v1/files/{file_id}/content") as response:
            response.raise_for_status()
            for line in response.iter_lines():
                yield json.loads(line)

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        response = self._http.request(method, path, **options)
        if not response.is_success:
            raise RuntimeError(f"{method} {path}: {response.status_code} {response.text[:500]}")
        answer: dict[str, Any] = response.json()
        return answer


def is_final(batch: dict[str, Any]) -> bool:
    """Return True if a batch has ended."""
    return batch["status"] in _FINAL


def num_done(batch: dict[str, Any]) -> int:
    """Return the number of a batch's lines that have ended."""
    counts = batch["request_counts"]
    return int(counts["completed"] + counts["failed"])


def write_lines(path: Path, stream: Stream, num_lines: int, seed: int, model: str = "headway-demo") -> None:
    """Write a file of `num_lines` lines sized like `stream`, in an order independent of their sizes.

    Lines are written a thousand at a time: the requests are never all in memory.
    """
    with path.open("w") as file:
        for start in range(0, num_lines, 1000):
            count = min(1000, num_lines - start)
            part = replace(stream, name=f"{stream.name}-{start}", user=None, bursts=(Burst(count),), phases=())
            schedule = make_schedule(LoadSpec((part,), seed))
            file.writelines(_lines(start, model, (each.request for each in schedule)))


def _lines(start: int, model: str, requests: Iterable[TracedRequest]) -> Iterable[str]:
    for number, request in enumerate(requests, start):
        body: dict[str, object] = {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
        }
        body |= request.extra_body
        line = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
        yield json.dumps(line, separators=(",", ":")) + "\n"
