"""Sender of a schedule: each request leaves at its time, also when earlier ones are still open."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import aiohttp
import psutil

from bench.load.client import Client
from bench.load.rows import Row
from bench.load.schedule import ScheduledRequest
from bench.load.spec import LoadSpec

_HEAD_START_S = 0.5
"""Time in seconds between being ready and the start of the run."""
_READ_BUFFER_BYTES = 2**18
_NICEST = -10


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Rows and process figures of one run."""

    rows: list[Row]
    started_unix_s: float
    """The start of the run; the seconds in the rows count from it."""
    duration_s: float
    """Time from the start to the end of the last request."""
    cpu_s: float
    """CPU time of this process."""
    machine_busy_share: float
    """Mean use of all cores during the run, 0 to 1. Near 1, the cores were the bottleneck."""
    scheduling: str = "normal"
    """Scheduling class that the kernel granted: `real-time`, `nice -10` or `normal`."""


def run_schedule(url: str, spec: LoadSpec, schedule: list[ScheduledRequest]) -> LoadRun:
    """Send everything; return when all requests have ended."""
    gc.freeze()
    with _before_all_others() as scheduling:
        return replace(asyncio.run(_run(url, spec, schedule)), scheduling=scheduling)


@contextlib.contextmanager
def _before_all_others() -> Iterator[str]:
    """Ask the kernel to prefer this process: a server on the same cores must not delay the sends.

    Yields the scheduling that was granted.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, _NICEST)
        except PermissionError:
            yield "normal"
            return
        yield f"nice {_NICEST}"
        return
    try:
        yield "real-time"
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


async def _run(url: str, spec: LoadSpec, schedule: list[ScheduledRequest]) -> LoadRun:
    rows = [_row(request) for request in schedule]
    timeout = aiohttp.ClientTimeout(total=spec.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=_READ_BUFFER_BYTES, auto_decompress=False
    ) as session:
        psutil.cpu_percent()  # the next call gives the use since this one
        started_s = time.monotonic() + _HEAD_START_S
        started_unix_s = time.time() + _HEAD_START_S

        def clock() -> float:
            return time.monotonic() - started_s

        client = Client(session, url, clock, spec.has_retries, random.Random(spec.seed))
        tasks = []
        for request, row in zip(schedule, rows, strict=True):
            # Sleep even when the next request is due: answers of earlier requests must be read in time.
            await asyncio.sleep(max(0.0, request.at_s - clock()))
            tasks.append(asyncio.create_task(client.run(request.body, row)))
        await _finish(tasks, rows, None if spec.end_s is None else spec.end_s - clock())
        return LoadRun(rows, started_unix_s, clock(), time.process_time(), psutil.cpu_percent() / 100)


async def _finish(tasks: list[asyncio.Task[None]], rows: list[Row], within_s: float | None) -> None:
    """Wait for every request; cancel those still open after `within_s`."""
    if not tasks:
        return
    _, open_tasks = await asyncio.wait(tasks, timeout=within_s)
    for task, row in zip(tasks, rows, strict=True):
        row.is_cut_off = task in open_tasks
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


def _row(request: ScheduledRequest) -> Row:
    return Row(
        index=request.index,
        stream=request.stream,
        priority=request.priority,
        user=request.user,
        group=request.group,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        scheduled_s=request.at_s,
    )
