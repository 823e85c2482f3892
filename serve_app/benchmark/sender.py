"""Senders of requests: at scheduled times, or a fixed number of them together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from serve_app.benchmark.rows import Row


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request, ready to be sent at the time in its row."""

    row: Row
    body: bytes


class Sending(Protocol):
    """Client that sends one request and reads its response into the row."""

    async def run(self, body: bytes, row: Row) -> Mapping[str, str] | None:
        """Return when the response has ended; fill in `row`, also when cancelled."""


async def send_on_time(
    client: Sending, clock: Callable[[], float], requests: Iterable[ScheduledRequest], end_s: float | None = None
) -> None:
    """Send each request at its time, also when earlier ones are still open; wait for all, at most until `end_s`."""
    tasks: dict[asyncio.Task[object], Row] = {}
    try:
        for request in requests:
            # Sleep even when the next request is due: answers of earlier requests must be read in time.
            await asyncio.sleep(max(0.0, request.row.scheduled_s - clock()))
            tasks[asyncio.create_task(_run(client, request))] = request.row
        if tasks:
            await asyncio.wait(tasks, timeout=None if end_s is None else end_s - clock())
    finally:
        await _cut_off(tasks)


async def send_together(
    client: Sending,
    clock: Callable[[], float],
    requests: Iterable[ScheduledRequest],
    concurrency: int,
    end_s: float | None = None,
) -> None:
    """Keep `concurrency` requests open until all are sent; start none after `end_s`.

    A request counts as scheduled when one before it has ended, so its row's time is written here.
    """
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            request.row.scheduled_s = clock()
            if end_s is not None and request.row.scheduled_s >= end_s:
                return
            request.row.is_cut_off = True  # until it has ended
            await client.run(request.body, request.row)
            request.row.is_cut_off = False

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _run(client: Sending, request: ScheduledRequest) -> None:
    await client.run(request.body, request.row)


async def _cut_off(tasks: Mapping[asyncio.Task[object], Row]) -> None:
    """Cancel the requests that are still open, and mark them; raise the first bug that a task met."""
    for task, row in tasks.items():
        row.is_cut_off = not task.done()
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
