"""The jobs deployment's parts, put together; knows no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from replicas.protocol import Band
from router.flow_queue import FlowQueue
from router.types import ReplicaView
from serve_app.jobs.backlog import BacklogView
from serve_app.jobs.database import Database
from serve_app.jobs.endings import Endings
from serve_app.jobs.file_store import FileStore
from serve_app.jobs.finalizing import Finalizer
from serve_app.jobs.jobs_metrics import LineCounts
from serve_app.jobs.lease_rows import EndedLines
from serve_app.jobs.lifecycle import Lifecycle
from serve_app.jobs.line_runner import LineRunner
from serve_app.jobs.outbox import SqlOutbox
from serve_app.jobs.ownership import Ownership
from serve_app.jobs.records import NewBatch
from serve_app.jobs.room import Room
from serve_app.jobs.service import SqlJobsService
from serve_app.jobs.settings import JobsSettings
from serve_app.jobs.sweeper import Sweeper
from serve_app.jobs.validating import Validator
from serve_app.jobs.worker import Worker
from serve_app.openai.service import CompletionService

logger = logging.getLogger(__name__)


class JobsRuntime:
    """Everything that is asynchronous, over one database; several processes may share that.

    Its loops run from `start` to `stop`. One that fails, as when the database is gone, ends them all: who looks after
    the process starts another, and that goes on where this one stopped.
    """

    def __init__(
        self,
        settings: JobsSettings,
        database: Database,
        files: FileStore,
        completions: CompletionService,
        load: Callable[[], Sequence[ReplicaView]],
        queue: FlowQueue,
        backlog: BacklogView,
        rng: random.Random,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """`load` and `queue` are those of the router that `completions` gives its requests to; so is `backlog`."""
        self._database = database
        self.line_counts = LineCounts()
        self._endings = Endings()
        self._ownership = Ownership(database, settings, unix_clock)
        self._worker = Worker(
            database,
            self._ownership,
            settings,
            LineRunner(completions, rng, unix_clock),
            Room(load, queue),
            backlog,
            self._lines_ended,
            unix_clock=unix_clock,
        )
        self._lifecycle = Lifecycle(
            database,
            self._ownership,
            settings,
            Validator(database, files, settings, unix_clock),
            Finalizer(database, files, self.line_counts.add, unix_clock),
            self._endings,
            self._worker.has_news,
        )
        self._sweeper = Sweeper(database, files, settings, self._closes, unix_clock)
        self.service = SqlJobsService(
            database,
            settings,
            self._endings,
            backlog.pace,
            self._submitted,
            self._closes,
            self._sweeper.delete_doomed_files,
            unix_clock,
        )
        self.outbox = SqlOutbox(database, unix_clock)
        self._loops: asyncio.Task[None] | None = None

    async def start(self, *others: Coroutine[Any, Any, None]) -> None:
        """Take up what there is; `others` are loops that live and fall with ours."""
        await self._ownership.start()
        await self._ownership.bury_dead()
        self._loops = asyncio.create_task(self._run(others))

    async def _run(self, others: Sequence[Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._ownership.run(on_lost=self._worker.abandon, on_freed=self._freed))
                tasks.create_task(self._lifecycle.run())
                tasks.create_task(self._sweeper.run())
                tasks.create_task(self._worker.run())
                for other in others:
                    tasks.create_task(other)
        except Exception:
            logger.exception("the jobs deployment cannot go on")
            raise

    def check_health(self) -> None:
        """Raise where the loops have ended.

        Raises:
            RuntimeError: the process must be replaced.
        """
        if self._loops is None or self._loops.done():
            raise RuntimeError("the loops of the jobs deployment have ended")

    async def stop(self) -> None:
        """Give back what is not done and disconnect; others, or the next process, go on at once."""
        if self._loops is not None:
            self._loops.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._loops
            with contextlib.suppress(Exception):  # a database that is gone has had no more from us either
                await self._worker.stop()
                await self._ownership.stop()
        await asyncio.to_thread(self._database.close)

    def _submitted(self, batch: NewBatch) -> None:
        if batch.input_file_id is not None:
            self._lifecycle.validating.news.set()
        else:
            # What has a deadline may run in a more urgent band than its own.
            self._worker.has_news(Band if batch.window_s is not None else (batch.band,))

    def _closes(self, batch_id: str) -> None:
        self._worker.abandon([batch_id])
        self._lifecycle.closing.news.set()

    def _lines_ended(self, ended: EndedLines) -> None:
        for result in ended.counted:
            self.line_counts.add(result.status)
        for batch_id in ended.final_batch_ids:
            self._endings.ended(batch_id)
        if ended.closing_batch_ids:
            self._lifecycle.closing.news.set()

    def _freed(self) -> None:
        self._worker.has_news()
        self._lifecycle.validating.news.set()
        self._lifecycle.closing.news.set()
