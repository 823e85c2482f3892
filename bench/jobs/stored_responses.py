"""Effect of many stored responses on TTFT: `python -m bench.jobs.stored_responses [--quick]`.

Two services without Ray, with the demo model: one tenant has nothing stored in the one, and 100,000 responses in the
other. The same streamed requests, each of which is stored, go to both by turns; with SQLite, and with PostgreSQL where
it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Connection, insert

from bench.record import percentiles, write
from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions, StreamOptions
from serve_app.http_app import IngressSettings
from serve_app.jobs.storage.schema.database import Database
from serve_app.jobs.storage.schema.tables import responses, stored
from testkit.http.local_service import local_service
from testkit.jobs.postgresql import find_binaries, postgresql

MODEL = "demo"
DEMO = str(Path(__file__).resolve().parents[2] / "replicas" / "demo")
TENANT = "anonymous"
NUM_BYTES = 900
"""Bytes of each stored response."""
NUM_WARM_UP = 10
_CHUNK = 5000
_PERCENTS = (25, 50, 75, 95)


def main() -> int:
    """Measure, print a table, and write the figures."""
    is_quick = "--quick" in sys.argv[1:]
    num_stored, num_requests = (1000, 20) if is_quick else (100_000, 400)
    figures: dict[str, Any] = {"num_requests": num_requests, "percents": _PERCENTS}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        urls = {"SQLite": [f"sqlite:///{folder}/{number}.sqlite3" for number in (0, num_stored)]}
        binaries = find_binaries()
        if binaries is not None:
            server = stack.enter_context(postgresql(binaries))
            urls["PostgreSQL"] = [stack.enter_context(server.fresh_database()) for _ in range(2)]
        for name, databases in urls.items():
            times = asyncio.run(_measure(Path(folder) / name, databases, num_stored, num_requests))
            figures[name] = _shown(name, {number: percentiles(part, _PERCENTS) for number, part in times.items()})
    if not is_quick:
        write("stored_responses", figures)
    return 0


def _shown(name: str, rows: dict[int, list[float]]) -> dict[str, Any]:
    """Print the percentiles of TTFT by the number of stored responses; return them with the ratio of the medians."""
    print(f"{name}: stored  " + "  ".join(f"TTFT p{percent}" for percent in _PERCENTS))
    for number, values in rows.items():
        print(f"{number:6}  " + "  ".join(f"{1000 * value:5.1f} ms" for value in values))
    (_, few, *_), (_, many, *_) = rows.values()
    print(f"ratio of the medians: {many / few:.3f}")
    return {"ttft_s": rows, "ratio": many / few}


async def _measure(
    folder: Path, databases: Sequence[str], num_stored: int, num_requests: int
) -> dict[int, list[float]]:
    """Return the TTFT of each request with nothing stored, and with `num_stored` responses, seconds."""
    options = ReplicaOptions(
        ModelOptions(DEMO, dtype="float32", num_threads=1),
        RunnerOptions(kv_cache_bytes=2**24),
        EngineLimits(max_num_seqs=4),
        StreamOptions(),
    )
    settings = IngressSettings(model=DEMO, served_model_name=MODEL)
    for number in (0, num_stored):
        (folder / str(number)).mkdir(parents=True)
    await asyncio.to_thread(_fill, databases[1], num_stored)
    times: dict[int, list[float]] = {0: [], num_stored: []}
    async with (
        local_service(options, settings, folder / "0", database_url=databases[0]) as empty,
        local_service(options, settings, folder / str(num_stored), database_url=databases[1]) as full,
        httpx.AsyncClient(timeout=60.0) as http,
    ):
        turns = ((0, empty.url), (num_stored, full.url))
        for index in range(NUM_WARM_UP + num_requests):
            for number, url in turns if index % 2 else turns[::-1]:
                ttft_s = await _ttft_s(http, url, f"Tell me about number {index}")
                if index >= NUM_WARM_UP:
                    times[number].append(ttft_s)
    return times


async def _ttft_s(http: httpx.AsyncClient, url: str, text: str) -> float:
    body = {"model": MODEL, "input": text, "stream": True, "max_output_tokens": 4, "temperature": 0.0}
    start_s, ttft_s = time.perf_counter(), float("inf")
    async with http.stream("POST", f"{url}/v1/responses", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("event: response.output_text.delta"):
                ttft_s = min(ttft_s, time.perf_counter() - start_s)
    assert ttft_s < float("inf"), "the response has no text"
    return ttft_s


def _fill(database_url: str, number: int) -> None:
    database = Database.opened(database_url)

    def add(connection: Connection) -> None:
        for rows in _rows(number):
            connection.execute(insert(responses), rows)
        sums = {"num_responses": number, "num_conversations": 0, "num_bytes": number * NUM_BYTES}
        connection.execute(insert(stored).values(tenant=TENANT, **sums))

    asyncio.run(database.write(add))
    database.close()


def _rows(number: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of responses that ended one second after the other until now, in parts."""
    begin_s = time.time() - number
    response = '{"status":"completed","error":null,"text":"%s"}' % ("x" * (NUM_BYTES - 200))
    common = {
        "tenant": TENANT, "model": MODEL, "status": "completed", "is_background": 0, "num_bytes": NUM_BYTES,
        "input": '{"id":"msg_in","text":"hi"}', "response": response, "output": '{"id":"msg_out","text":"hello"}',
    }  # fmt: skip
    for start in range(0, number, _CHUNK):
        moments = ((index, begin_s + index) for index in range(start, min(number, start + _CHUNK)))
        yield [
            {**common, "id": f"resp_{index:032x}", "created_unix_s": now, "expires_unix_s": now + 30 * 86_400}
            for index, now in moments
        ]


if __name__ == "__main__":
    sys.exit(main())
