"""Threads for work that would hold up the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

ResultT = TypeVar("ResultT")


class WorkerThreads:
    """A bounded number of threads; work that finds none free waits its turn."""

    def __init__(self, num_threads: int) -> None:
        self._limiter = anyio.CapacityLimiter(num_threads)

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """The result of `work`; who is cancelled leaves at once, while the thread finishes what it has begun."""
        return await anyio.to_thread.run_sync(work, limiter=self._limiter, abandon_on_cancel=True)
