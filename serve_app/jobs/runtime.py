"""Assembly of the jobs deployment's parts, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

from replicas.protocol import Metric
from serve_app.jobs.api.errors import StorageUnavailable
from serve_app.jobs.api.records import BatchProgress, BatchStatus, LineStatus
from serve_app.jobs.api.responses import StoredSums
from serve_app.jobs.execution.line_queue import LineQueue
from serve_app.jobs.execution.line_runner import LineRunner
from serve_app.jobs.execution.planning import LineCapacity
from serve_app.jobs.execution.response_worker import ResponseWorker
from serve_app.jobs.execution.throughput import BacklogView
from serve_app.jobs.execution.worker import ResultWriter, Worker
from serve_app.jobs.lifecycle.finalizer import Finalizer
from serve_app.jobs.lifecycle.state_loops import BatchEvents, Lifecycle
from serve_app.jobs.lifecycle.sweeper import Sweeper
from serve_app.jobs.lifecycle.validator import Validator
from serve_app.jobs.metrics import NUM_STORED_TENANTS, jobs_metrics, storage_metric, stored_metrics
from serve_app.jobs.responses import SqlResponses
from serve_app.jobs.service import SqlJobsService
from serve_app.jobs.storage.deliveries import SqlOutbox
from serve_app.jobs.storage.lines import EndedLines
from serve_app.jobs.storage.ownership import Ownership
from serve_app.jobs.storage.rows.batches import count_by_status, running_batches
from serve_app.jobs.storage.rows.conversations import stored_sums
from serve_app.jobs.storage.schema.database import JobsContext
from serve_app.jobs.webhooks.sender import AttemptOutcome

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 5.0
"""Longest pause between two attempts to use the storage again, seconds."""
_NUM_SHOWN = 3
"""Batches that the dashboard shows."""


class JobsRuntime:
    """Service and background loops of one jobs worker. Several workers may share the database, and meet only there.

    The loops run from `start` to `stop`. If the storage fails, they end and begin anew as soon as it works again, at
    most `_MAX_PAUSE_S` later. Until then calls of the service raise `StorageUnavailable`, and lines that run go on. If
    a loop fails otherwise, all end and `check_health` fails. Serve then replaces the process, and the new one
    continues from the database.
    """

    def __init__(
        self,
        context: JobsContext,
        line_runner: LineRunner,
        capacity: LineCapacity,
        backlog: BacklogView,
    ) -> None:
        """`capacity` and `backlog` belong to the router that serves the requests of `line_runner`."""
        self._context = context
        self._backlog = backlog
        self._ended_lines: Counter[LineStatus] = Counter()
        """Number of lines that this process has ended, by status."""
        self._ownership = Ownership(context, backlog.throughput.own_speed)
        self._worker = Worker(
            LineQueue(context, self._ownership, backlog),
            self._ownership,
            line_runner,
            capacity,
            ResultWriter(context, self._ownership, self._results_written),
        )
        self._events = BatchEvents(self._worker.notify, self._worker.abandon)
        self._responses = ResponseWorker(context, self._ownership, line_runner.service, self._events.ended)
        self._lifecycle = Lifecycle(
            context, self._ownership, Validator(context), Finalizer(context, self._ended_lines), self._events
        )
        self._sweeper = Sweeper(context, self._events.closing)
        self.service = SqlJobsService(
            context, self._events, backlog.throughput, self._sweeper.delete_pending_files, line_runner.lines.find
        )
        self.responses = SqlResponses(context, self._events, self._responses.notify)
        self.outbox = SqlOutbox(context, self._ownership)
        self._loops: asyncio.Task[None] | None = None

    async def start(self, *others: Coroutine[Any, Any, None]) -> None:
        """Open the database, register this process, free the work of dead ones, and start the loops.

        Storage that cannot be used does not stop the process: the loops wait for it.
        `others`: loops to run and stop together with those of the runtime; a failure of one ends all.

        Raises:
            DatabaseTooNew: a newer version of Headway has migrated the database.
        """
        is_begun = await self._try_to_begin()
        self._loops = asyncio.create_task(self._run(others, is_begun))

    async def _run(self, others: Sequence[Coroutine[Any, Any, None]], is_begun: bool) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._run_while_stored(is_begun))
                for other in others:
                    tasks.create_task(other)
        except Exception:
            logger.exception("a loop of the jobs deployment failed")
            raise

    async def _run_while_stored(self, is_begun: bool) -> None:
        """Run the loops over the database, each time until the storage fails."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if is_begun:
                pause_s = _FIRST_PAUSE_S
                try:
                    async with asyncio.TaskGroup() as tasks:
                        for loop in self._stored_loops():
                            tasks.create_task(loop)
                except* StorageUnavailable as errors:
                    self._tell_fault(errors)
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
            is_begun = await self._try_to_begin()

    def _stored_loops(self) -> Iterator[Coroutine[Any, Any, None]]:
        yield self._ownership.run(on_lost=self._abandon, on_freed=self._released)
        yield self._lifecycle.run()
        yield self._sweeper.run()
        yield self._worker.run()
        yield self._responses.run()

    def _abandon(self) -> None:
        """Stop all that this worker has lost."""
        self._worker.abandon()
        self._responses.abandon()

    def _released(self) -> None:
        """Take over the work of a dead worker."""
        self._events.released()
        self._responses.notify()

    async def _try_to_begin(self) -> bool:
        """Open the database and register this process anew; return False if the storage cannot be used.

        A transaction that failed may have been committed all the same. A new id releases whatever it took.
        """
        try:
            await asyncio.to_thread(self._context.database.open)
            await self._worker.flush()
            await self._ownership.renew()
            self._abandon()
            await self._ownership.reap_dead()
        except StorageUnavailable as error:
            self._tell_fault(error)
            return False
        self._events.released()
        return True

    def _tell_fault(self, error: BaseException) -> None:
        logger.error("the storage of jobs cannot be used; it is tried again", exc_info=error)

    async def metrics(self, attempts: Mapping[AttemptOutcome, int]) -> tuple[Metric, ...]:
        """Return the current metrics; `attempts`: webhook deliveries by outcome."""
        batches: Mapping[BatchStatus, int] = {}
        with contextlib.suppress(StorageUnavailable):
            batches = await self._context.database.read(count_by_status)
        counts = jobs_metrics(batches, self._ended_lines, self._backlog.eta_s(), attempts)
        sums = await self.stored()
        of_stored = () if sums is None else stored_metrics(sums, self._context.clock.unix())
        return (*counts, *of_stored, storage_metric(self._context.database.fault is None))

    async def stored(self) -> StoredSums | None:
        """Return the sizes of what tenants have stored; None while the storage fails."""
        with contextlib.suppress(StorageUnavailable):
            return await self._context.database.read(lambda connection: stored_sums(connection, NUM_STORED_TENANTS))
        return None

    async def running(self) -> tuple[BatchProgress, ...]:
        """Return the newest batches that run; none while the storage fails."""
        with contextlib.suppress(StorageUnavailable):
            return await self._context.database.read(lambda connection: running_batches(connection, _NUM_SHOWN))
        return ()

    def check_health(self) -> None:
        """Check that the loops still run.

        Raises:
            RuntimeError: they have ended; the process must be replaced.
        """
        if self._loops is None or self._loops.done():
            raise RuntimeError("the loops of the jobs deployment have ended")

    async def stop(self) -> None:
        """Write finished results, release all unfinished work and disconnect.

        Other processes, or the next one, can take the released work at once.
        """
        if self._loops is not None:
            self._loops.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._loops
            # If the database is gone, the work cannot be released here: its lease expires.
            with contextlib.suppress(Exception):
                await self._worker.stop()
                await self._ownership.stop()
        await asyncio.to_thread(self._context.database.close)

    def _results_written(self, ended: EndedLines) -> None:
        self._backlog.throughput.ended(ended.counted)
        self._ended_lines.update(result.status for result in ended.counted)
        for batch_id in ended.final_batch_ids:
            self._events.ended(batch_id)
        if ended.closing_batch_ids:
            self._events.to_close.set()
