"""Worker that runs lines of batches on the slots that urgent work leaves free, and writes their results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from sqlalchemy.exc import IntegrityError

from replicas.protocol import Band
from serve_app.jobs.api.records import BatchKind
from serve_app.jobs.execution.line_queue import LineQueue
from serve_app.jobs.execution.line_runner import LineRunner, backlog_of, store_response
from serve_app.jobs.execution.line_task import LineTask
from serve_app.jobs.execution.planning import LineCapacity, plan, raised_band
from serve_app.jobs.storage.lines import EndedLines, LineResult, end_lines
from serve_app.jobs.storage.ownership import Ownership
from serve_app.jobs.storage.schema.database import JobsContext
from serve_app.wakeup import Wakeup

_POLL_PERIOD_S = 0.25
"""Most seconds between two checks of the replicas' load when no lease is possible."""
_GATHER_S = 0.01
"""Seconds in which events are gathered for one poll; clients that submit are answered in this time."""
_MANY_RESULTS = 100
"""Results that are written without waiting for more."""
_MAX_RESULTS = 256
"""Most results of one write transaction."""
_WRITE_PERIOD_S = 0.25
"""Most seconds that fewer results of larger batches wait for others to be written with."""


class ResultWriter:
    """Buffer of results, written soon and in groups. A line whose result is lost before the commit runs again.

    The result of a job is written at once: a client may wait for it. Those of larger batches wait up to 0.25 s for
    more, which saves most transactions where lines end one by one.
    """

    def __init__(
        self,
        context: JobsContext,
        ownership: Ownership,
        on_written: Callable[[EndedLines], None],
    ) -> None:
        """`on_written`: called after each commit with its outcome."""
        self._context = context
        self._ownership = ownership
        self._on_written = on_written
        self._pending: list[LineResult] = []
        self._wakeup = Wakeup()

    def add(self, result: LineResult, is_urgent: bool) -> None:
        """Buffer a result, to be written soon; `is_urgent`: at once."""
        self._pending.append(result)
        if is_urgent or len(self._pending) >= _MANY_RESULTS:
            self._wakeup.set()

    def write_now(self) -> None:
        """Have the buffered results written at once."""
        self._wakeup.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wakeup.wait(_WRITE_PERIOD_S)
            await self.flush()

    async def flush(self) -> None:
        """Write all buffered results."""
        while self._pending:
            results = self._pending[:_MAX_RESULTS]
            written = await self._write(results)
            # Only now: if the write fails, the results stay for the next one.
            del self._pending[: len(results)]
            self._on_written(written)

    async def _write(self, results: list[LineResult]) -> EndedLines:
        owner, now, settings = self._ownership.id, self._context.clock.unix(), self._context.settings
        store = partial(store_response, settings=settings, now=now)
        write = partial(end_lines, owner=owner, results=results, now=now, store=store)
        try:
            return await self._context.database.write(write)
        except IntegrityError:  # Another process has added the first row of a tenant at the same time.
            return await self._context.database.write(write)


class Worker:
    """Set of tasks that run leased lines, as many as there is capacity for.

    Invariant: a line leased by this process either runs in exactly one task, or its result waits to be written, or
    it is being released.
    """

    def __init__(
        self, queue: LineQueue, ownership: Ownership, runner: LineRunner, capacity: LineCapacity, results: ResultWriter
    ) -> None:
        self._queue = queue
        self._ownership = ownership
        self._runner = runner
        self._capacity = capacity
        self._results = results
        self._wakeup = Wakeup()
        self._line_tasks: dict[asyncio.Task[None], LineTask] = {}

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._results.run())
            tasks.create_task(self._fill_slots())

    def notify(self, bands: Iterable[Band] = Band) -> None:
        """Wake the worker, because these bands may have new lines."""
        self._queue.changed_bands.update(bands)
        self._wakeup.set()

    def abandon(self, batch_ids: Iterable[str] | None = None) -> None:
        """Stop the tasks of these batches' lines (None: of all lines), without ending or releasing the lines."""
        gone = None if batch_ids is None else set(batch_ids)
        for task, line_task in self._line_tasks.items():
            if gone is None or line_task.batch.id in gone:
                task.cancel()

    async def flush(self) -> None:
        """Write the results of finished lines."""
        await self._results.flush()

    async def stop(self) -> None:
        """Stop all running lines, write finished results, and release the other lines."""
        line_tasks = dict(self._line_tasks)
        self.abandon()
        await asyncio.gather(*line_tasks, return_exceptions=True)
        await self._results.flush()
        await self._queue.release([line_task.line for line_task in line_tasks.values()])

    async def _fill_slots(self) -> None:
        while True:
            if self._queue.is_poll_due(self._can_take_more()):
                self.abandon(await self._queue.poll({line_task.batch.id for line_task in self._line_tasks.values()}))
            await self._fill()
            await self._wakeup.wait(self._queue.min_period_s if self._can_take_more() else _POLL_PERIOD_S)
            if self._can_take_more():
                await asyncio.sleep(_GATHER_S)

    def _can_take_more(self) -> bool:
        """Return True if there is capacity for lines that the queue's last poll may have missed."""
        return any(self._capacity_for(band) > 0 for band in self._queue.changed_bands)

    async def _fill(self) -> None:
        line_tasks = self._line_tasks.values()
        self._queue.backlog.not_sent = backlog_of(line_task for line_task in line_tasks if not line_task.is_sent)
        late_deadline = self._queue.late_deadline(backlog_of(line_tasks))
        self._raise_late_lines(late_deadline)
        requests = plan(
            self._queue.open_batches, late_deadline, self._capacity_for, self._running_tokens(), self._queue.turns
        )
        if not requests:
            return
        for request, lines in await self._queue.lease(requests):
            for line in lines:
                self._start(LineTask(line, request.batch, request.band))

    def _raise_late_lines(self, late_deadline: float) -> None:
        """Restart the running lines of late batches in the raised band; in the old band they might never end."""
        for task, line_task in list(self._line_tasks.items()):
            band = raised_band(line_task.batch, late_deadline)
            if band < line_task.band and not task.cancelling():
                task.cancel()
                self._start(LineTask(line_task.line, line_task.batch, band))

    def _capacity_for(self, band: Band) -> int:
        num_not_sent = sum(not line_task.is_sent and line_task.band <= band for line_task in self._line_tasks.values())
        num_workers = self._queue.backlog.num_workers
        capacity = self._capacity.available(band, num_not_sent, num_workers)
        return capacity if capacity >= self._capacity.minimum(band, num_workers) else 0

    def _running_tokens(self) -> Counter[tuple[str, Band]]:
        """Return the expected tokens of the lines that all workers hold, by tenant and band."""
        tokens = Counter(self._queue.running_elsewhere)
        for line_task in self._line_tasks.values():
            tokens[line_task.batch.tenant, line_task.band] += line_task.line.expected_tokens
        return tokens

    def _start(self, line_task: LineTask) -> None:
        task = asyncio.create_task(self._run_line(line_task, self._ownership.id))
        self._line_tasks[task] = line_task
        task.add_done_callback(self._ended)

    async def _run_line(self, line_task: LineTask, owner: str) -> None:
        result = await self._runner.run(line_task)
        if owner == self._ownership.id:
            self._results.add(result, line_task.batch.kind is BatchKind.JOB)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._line_tasks[task]
        if not self._line_tasks:
            self._results.write_now()
        self._wakeup.set()
