"""Thread pool for work that would block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


class WorkerThreads:
    """Thread pool of fixed size; work waits for a free thread in order of arrival.

    Work that holds the GIL throughout a call into C still blocks the event loop.
    """

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, "tokenizer")

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in a thread and return its result.

        A cancelled caller returns at once. Work that still waits is then dropped; work that runs continues to its end
        and occupies its thread until then.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
