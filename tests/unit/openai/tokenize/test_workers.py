"""Work in threads: the number that runs at once, its order, cancellation, and errors."""

import asyncio
import os
import threading
from functools import partial

import pytest

from replicas.errors import Overloaded
from replicas.protocol import Band
from serve_app.openai.request.caller import WorkOwner
from serve_app.openai.tokenize.work_queue import WorkLimits
from serve_app.openai.tokenize.worker_threads import WorkerThreads
from testkit.limits import LIMIT_S, until


class Work:
    """Work that notes its starts, and lasts until the test lets it end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.starts: list[int] = []

    def __call__(self) -> None:
        self.starts.append(threading.get_ident())
        self.may_end.wait(20)


async def test_cancelled_work_keeps_its_thread_until_it_ends() -> None:
    workers, work = WorkerThreads(2), Work()
    begun = [asyncio.create_task(workers.run(work)) for _ in range(2)]
    await until(lambda: len(work.starts) == 2)
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
    later = asyncio.create_task(workers.run(work))
    await asyncio.sleep(0.1)
    assert len(work.starts) == 2
    work.may_end.set()
    await later
    assert len(work.starts) == 3


async def test_cancelled_work_that_has_not_begun_is_dropped() -> None:
    workers, work = WorkerThreads(1), Work()
    begun = asyncio.create_task(workers.run(work))
    await until(lambda: len(work.starts) == 1)
    waiting = [asyncio.create_task(workers.run(work)) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    work.may_end.set()
    await begun
    assert await workers.run(lambda: len(work.starts)) == 1


async def test_failure_of_the_work_reaches_its_caller() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await WorkerThreads(1).run(fail)


BATCH = WorkOwner(Band.BATCH, "flood")
INTERACTIVE = WorkOwner(Band.INTERACTIVE, "idle")


async def test_batch_work_leaves_a_thread_to_interactive_work() -> None:
    workers, work = WorkerThreads(2), Work()
    flood = [asyncio.create_task(workers.run(work, BATCH)) for _ in range(5)]
    await until(lambda: len(work.starts) == 1)
    assert await workers.run(lambda: "at once", INTERACTIVE) == "at once"
    assert len(work.starts) == 1
    work.may_end.set()
    await asyncio.gather(*flood)


async def test_work_waits_in_order_of_bands() -> None:
    workers, work, order = WorkerThreads(1), Work(), list[str]()
    running = asyncio.create_task(workers.run(work))
    await until(lambda: len(work.starts) == 1)
    owners = [BATCH, BATCH, WorkOwner(Band.STANDARD, "a"), INTERACTIVE]
    waiting = [asyncio.create_task(workers.run(partial(order.append, owner.tenant), owner)) for owner in owners]
    await asyncio.sleep(0)
    work.may_end.set()
    await asyncio.gather(running, *waiting)
    assert order == ["idle", "a", "flood", "flood"]


async def test_work_beyond_the_limit_is_refused() -> None:
    workers, work = WorkerThreads(1, limits=WorkLimits(max_queued=2)), Work()
    begun = [asyncio.create_task(workers.run(work, BATCH)) for _ in range(3)]
    await until(lambda: len(work.starts) == 1)
    with pytest.raises(Overloaded, match="the limit is 2"):
        await workers.run(work, BATCH)
    work.may_end.set()
    await asyncio.gather(*begun)
    await workers.run(work, BATCH)


async def test_work_that_waits_too_long_is_refused() -> None:
    workers, work = WorkerThreads(1, limits=WorkLimits(max_wait_s=0.01)), Work()
    begun = asyncio.create_task(workers.run(work))
    await until(lambda: len(work.starts) == 1)
    with pytest.raises(Overloaded, match=r"waited 0\.01 s"):
        await workers.run(work)
    work.may_end.set()
    await begun
    assert len(work.starts) == 1


def nothing() -> None:
    pass


async def test_large_work_of_less_urgent_bands_is_done_in_a_process() -> None:
    workers = WorkerThreads(2, prepare=nothing)

    async def pid(owner: WorkOwner, num_bytes: int) -> int:
        return await workers.run_by_size(os.getpid, owner, num_bytes)

    async with asyncio.timeout(LIMIT_S):
        while await pid(BATCH, 2**14) == os.getpid():
            await asyncio.sleep(0.02)
    assert await pid(BATCH, 2**14 - 1) == os.getpid()
    assert await pid(INTERACTIVE, 2**20) == os.getpid()
    assert await WorkerThreads(2).run_by_size(os.getpid, BATCH, 2**20) == os.getpid()
