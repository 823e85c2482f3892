"""Threads for work that would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


class WorkerThreads:
    """A bounded number of threads; work that finds none free waits its turn.

    What holds the GIL all through one call into C still stops the event loop.
    """

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, "tokenizer")

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """The result of `work`.

        Who is cancelled leaves at once: work that waits is dropped, while a thread finishes what it has
        begun and is not free until then.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
