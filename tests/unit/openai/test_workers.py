"""Work in threads: how much of it runs at once, and what becomes of it when nobody waits any more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from serve_app.openai.tokenize.workers import WorkerThreads
from testkit.http.api import until


class Work:
    """Counts its runs, each of which lasts until the test lets it end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.num_started = 0
        self.num_running = 0
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.num_started += 1
            self.num_running += 1
        self.may_end.wait(20)
        with self._lock:
            self.num_running -= 1


async def test_cancelled_work_keeps_its_thread_until_it_ends() -> None:
    workers, work = WorkerThreads(2), Work()
    begun = [asyncio.create_task(workers.run(work)) for _ in range(2)]
    await until(lambda: work.num_running == 2)
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
    later = asyncio.create_task(workers.run(work))
    await asyncio.sleep(0.1)
    assert work.num_started == 2
    work.may_end.set()
    await later
    assert work.num_started == 3


async def test_cancelled_work_that_has_not_begun_is_dropped() -> None:
    workers, work = WorkerThreads(1), Work()
    begun = asyncio.create_task(workers.run(work))
    await until(lambda: work.num_running == 1)
    waiting = [asyncio.create_task(workers.run(work)) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    work.may_end.set()
    await begun
    assert await workers.run(lambda: work.num_started) == 1


async def test_failure_of_the_work_is_its_callers() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await WorkerThreads(1).run(fail)
