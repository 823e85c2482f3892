"""Worker threads of one process, and the order in which they take work."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from replicas.errors import Overloaded
from replicas.protocol import Band
from serve_app.openai.request.caller import WorkOwner
from serve_app.openai.tokenize.work_process import WorkProcesses
from serve_app.openai.tokenize.work_queue import QueuedWork, WorkLimits, WorkQueue

ResultT = TypeVar("ResultT")

SERVER = WorkOwner(Band.INTERACTIVE, "")
"""Owner of the server's own work."""

_NO_LIMITS = WorkLimits()
_PROCESS_BYTES = 2**14
"""Size from which work of bands below `interactive` is done in a process."""


class WorkerThreads:
    """Thread pool of fixed size, used on one event loop. `WorkQueue` has the order and the bounds of waiting work.

    Bands below `interactive` leave one thread free for it, if there is more than one: work cannot be interrupted.
    Work that holds the GIL throughout a call into C still blocks the event loop. `run_by_size` gives large work of
    those bands to processes, at most one for each thread that the bands may use.

    Invariant: a thread is free only if no work may start.
    """

    def __init__(
        self,
        num_threads: int,
        name: str = "tokenizer",
        limits: WorkLimits = _NO_LIMITS,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        """Create the pool; a process for large work calls `prepare` first. None: there is no such process."""
        self._executor = ThreadPoolExecutor(num_threads, name)
        self._num_threads = num_threads
        self._limits = limits
        self._queue = WorkQueue(limits)
        self._waiting: dict[QueuedWork, asyncio.Future[Any]] = {}
        self._num_running = dict.fromkeys(Band, 0)
        self._processes = None if prepare is None else WorkProcesses(prepare, max(1, num_threads - 1))

    async def run_by_size(
        self, work: Callable[[], ResultT], owner: WorkOwner = SERVER, num_bytes: int = 0, thread_bytes: int = 0
    ) -> ResultT:
        """Return the result of `work`, which is done where its size and band put it.

        1. Work of less than `thread_bytes` is done at once on the event loop.
        2. Large work of a band below `interactive` is done in a process while a thread waits; it is pickled, and so is
           its result.
        3. Other work is done in a thread, as by `run`.

        Raises:
            Overloaded: as `run`.
            NoReplicaAvailable: the process has ended.
        """
        if num_bytes < thread_bytes:
            return work()
        if self._processes is not None and num_bytes >= _PROCESS_BYTES and owner.band is not Band.INTERACTIVE:
            work = partial(self._processes.run, work)
        return await self.run(work, owner, num_bytes)

    async def run(self, work: Callable[[], ResultT], owner: WorkOwner = SERVER, num_bytes: int = 0) -> ResultT:
        """Run `work` in a thread and return its result; `num_bytes` is the memory that it needs while it waits.

        A cancelled caller returns at once. Work that still waits is then dropped; work that runs continues to its end
        and occupies its thread until then.

        Raises:
            Overloaded: too much work waits, or this work has waited too long.
        """
        loop = asyncio.get_running_loop()
        queued, result = QueuedWork(work, owner, num_bytes), loop.create_future()
        self._queue.add(queued, time.monotonic())
        self._waiting[queued] = result
        self._start_next()
        expiry = loop.call_later(self._limits.max_wait_s, self._expire, queued, result)
        try:
            outcome: ResultT = await result
            return outcome
        finally:
            expiry.cancel()
            self._waiting.pop(queued, None)
            self._queue.remove(queued)

    def _start_next(self) -> None:
        """Start work while there is a free thread for it."""
        loop = asyncio.get_running_loop()
        while (queued := self._queue.take(self._startable(), time.monotonic())) is not None:
            self._num_running[queued.owner.band] += 1
            result, started_s = self._waiting[queued], time.monotonic()

            def end(
                done: Future[Any], queued: QueuedWork = queued, result: Any = result, started_s: float = started_s
            ) -> None:
                seconds = time.monotonic() - started_s
                with contextlib.suppress(RuntimeError):  # The loop is closed: the process ends.
                    loop.call_soon_threadsafe(self._end, queued.owner, seconds, result, done)

            self._executor.submit(queued.call).add_done_callback(end)

    def _end(self, owner: WorkOwner, seconds: float, result: asyncio.Future[Any], done: Future[Any]) -> None:
        """Free a thread, and hand on the result of its work."""
        self._num_running[owner.band] -= 1
        self._queue.charge(owner, seconds)
        if not result.done():
            error = done.exception()
            if error is None:
                result.set_result(done.result())
            else:
                result.set_exception(error)
        self._start_next()

    def _startable(self) -> tuple[Band, ...]:
        """Return the bands whose work may start now."""
        num_running = sum(self._num_running.values())
        if num_running >= self._num_threads:
            return ()
        num_others = num_running - self._num_running[Band.INTERACTIVE]
        return tuple(Band) if num_others < max(1, self._num_threads - 1) else (Band.INTERACTIVE,)

    def _expire(self, queued: QueuedWork, result: asyncio.Future[Any]) -> None:
        """Refuse work that still waits."""
        if self._queue.remove(queued) and not result.done():
            message = f"the request waited {self._limits.max_wait_s:g} s to be read and tokenized, the most that it may"
            result.set_exception(Overloaded(message, 10.0, "preparation_wait"))
