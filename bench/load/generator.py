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

from bench.load.retries import RetryingClient
from bench.load.spec import LoadSpec
from serve_app.benchmark.client import READ_BUFFER_BYTES, Client
from serve_app.benchmark.rows import Row
from serve_app.benchmark.sender import ScheduledRequest, Sending, send_on_time

_HEAD_START_S = 0.5
"""Time in seconds between being ready and the start of the run."""
_NICEST = -10


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Rows and process figures of one run."""

    rows: list[Row]
    started_unix_s: float
    """Start of the run; the seconds in the rows count from it."""
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
    rows = [request.row for request in schedule]
    timeout = aiohttp.ClientTimeout(total=spec.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=READ_BUFFER_BYTES, auto_decompress=False
    ) as session:
        psutil.cpu_percent()  # the next call gives the use since this one
        started_s = time.monotonic() + _HEAD_START_S
        started_unix_s = time.time() + _HEAD_START_S

        def clock() -> float:
            return time.monotonic() - started_s

        client = Client(session, f"{url}/v1/completions", clock)
        sending: Sending = RetryingClient(client, random.Random(spec.seed)) if spec.has_retries else client
        await send_on_time(sending, clock, schedule, spec.end_s)
        return LoadRun(rows, started_unix_s, clock(), time.process_time(), psutil.cpu_percent() / 100)
