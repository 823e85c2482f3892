"""Work in threads: the number that runs at once, cancellation, and errors."""

import asyncio
import threading

import pytest

from serve_app.openai.tokenize.prompt_tokenizer import WorkerThreads
from testkit.limits import until


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
