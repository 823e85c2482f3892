"""Assembly of the jobs deployment's parts, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from replicas.protocol import Metric
from serve_app.jobs.api.records import LineStatus
from serve_app.jobs.execution.line_queue import LineQueue
from serve_app.jobs.execution.line_runner import LineRunner
from serve_app.jobs.execution.planning import LineCapacity
from serve_app.jobs.execution.throughput import BacklogView
from serve_app.jobs.execution.worker import ResultWriter, Worker
from serve_app.jobs.lifecycle.finalizer import Finalizer
from serve_app.jobs.lifecycle.state_loops import BatchEvents, Lifecycle
from serve_app.jobs.lifecycle.sweeper import Sweeper
from serve_app.jobs.lifecycle.validator import Validator
from serve_app.jobs.metrics import jobs_metrics
from serve_app.jobs.service import SqlJobsService
from serve_app.jobs.storage.batches import count_by_status
from serve_app.jobs.storage.database import JobsContext
from serve_app.jobs.storage.deliveries import SqlOutbox
from serve_app.jobs.storage.lines import EndedLines
from serve_app.jobs.storage.ownership import Ownership
from serve_app.jobs.webhooks.sender import AttemptOutcome
from serve_app.openai.service import CompletionService

logger = logging.getLogger(__name__)


class JobsRuntime:
    """Service and background loops of one jobs process. Several processes may share the database.

    The loops run from `start` to `stop`. If one fails, for example because the database is gone, all end and
    `check_health` fails. Serve then replaces the process, and the new one continues from the database.
    """

    def __init__(
        self,
        context: JobsContext,
        completions: CompletionService,
        capacity: LineCapacity,
        backlog: BacklogView,
        rng: random.Random,
    ) -> None:
        """`capacity` and `backlog` belong to the router that serves the requests of `completions`."""
        self._context = context
        self._backlog = backlog
        self._ended_lines: Counter[LineStatus] = Counter()
        """Number of lines that this process has ended, by status."""
        self._ownership = Ownership(context)
        self._worker = Worker(
            LineQueue(context, self._ownership, backlog),
            self._ownership,
            LineRunner(completions, rng, context.clock),
            capacity,
            ResultWriter(context, self._ownership, self._results_written),
        )
        self._events = BatchEvents(self._worker.notify, self._worker.abandon)
        self._lifecycle = Lifecycle(
            context, self._ownership, Validator(context), Finalizer(context, self._ended_lines), self._events
        )
        self._sweeper = Sweeper(context, self._events.closing)
        self.service = SqlJobsService(context, self._events, backlog.throughput, self._sweeper.delete_pending_files)
        self.outbox = SqlOutbox(context.database, context.clock)
        self._loops: asyncio.Task[None] | None = None

    async def start(self, *others: Coroutine[Any, Any, None]) -> None:
        """Register this process, free the work of dead ones, and start the loops.

        `others`: loops to run and stop together with those of the runtime; a failure of one ends all.
        """
        await self._ownership.start()
        await self._ownership.reap_dead()
        self._loops = asyncio.create_task(self._run(others))

    async def _run(self, others: Sequence[Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._ownership.run(on_lost=self._worker.abandon, on_freed=self._events.released))
                tasks.create_task(self._lifecycle.run())
                tasks.create_task(self._sweeper.run())
                tasks.create_task(self._worker.run())
                for other in others:
                    tasks.create_task(other)
        except Exception:
            logger.exception("a loop of the jobs deployment failed")
            raise

    async def metrics(self, attempts: Mapping[AttemptOutcome, int]) -> tuple[Metric, ...]:
        """Return the current metrics; `attempts`: webhook deliveries by outcome."""
        batches = await self._context.database.read(count_by_status)
        return tuple(jobs_metrics(batches, self._ended_lines, self._backlog.eta_s(), attempts))

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
