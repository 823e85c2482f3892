"""Service of the jobs deployment for ingresses, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from sqlalchemy.exc import IntegrityError

from replicas.errors import InvalidRequest, ServingError
from serve_app.jobs.api.records import (
    BatchKind,
    BatchRecord,
    BatchStats,
    BatchStatus,
    FileRecord,
    JsonObject,
    LineRecord,
    NewBatch,
    Page,
    PageRequest,
    Submission,
    new_batch_id,
)
from serve_app.jobs.api.usage import UsagePage, UsageQuery, UsageReport
from serve_app.jobs.execution.throughput import ThroughputEstimator
from serve_app.jobs.lifecycle.line_size import sized
from serve_app.jobs.lifecycle.state_loops import BatchEvents
from serve_app.jobs.storage.batch_states import cancel_batch, delete_batch
from serve_app.jobs.storage.lines import LineRow, new_rows
from serve_app.jobs.storage.rows import batches, files
from serve_app.jobs.storage.rows.batches import batch_record, get_batch
from serve_app.jobs.storage.rows.usage import add_report, find_usage
from serve_app.jobs.storage.schema.database import JobsContext
from serve_app.jobs.storage.submission import accepted_before, submit_batch

_FEW_LINES = 8
"""Rows of at most this many lines are built on the event loop; rows of more in a thread."""
_FIRST_RECHECK_S = 0.1
_MAX_RECHECK_S = 2.0
_RECHECK_SHARE = 0.25
"""Time to the next read of a batch that a client waits for, as a share of the time waited: between 0.1 and 2 s. A batch
that another worker ends causes no event here."""


class SqlJobsService:
    """Files, batches and jobs in a database: `JobsService` without `metrics`, which the deployment implements."""

    def __init__(
        self,
        context: JobsContext,
        events: BatchEvents,
        throughput: ThroughputEstimator,
        delete_pending_files: Callable[[], Awaitable[None]],
        find_line: Callable[[str | None, str], JsonObject | None],
    ) -> None:
        """`find_line` is `LineRegistry.find`."""
        self._find_line = find_line
        self._context = context
        self._now = context.clock.unix
        self._events = events
        self._throughput = throughput
        self._delete_pending_files = delete_pending_files

    async def add_file(self, file: FileRecord) -> None:
        """Record a file whose bytes are complete in the store."""
        await self._context.database.write(lambda c: files.add_file(c, file))

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file that has not expired."""
        return await self._context.database.read(lambda c: files.get_file(c, tenant, file_id, self._now()))

    async def files(self, tenant: str, purpose: str | None, page: PageRequest) -> Page[FileRecord]:
        """Return a page of the tenant's files."""
        return await self._context.database.read(lambda c: files.list_files(c, tenant, purpose, page, self._now()))

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file's record and its bytes. If the store fails to delete the bytes, the sweeper tries again."""
        await self._context.database.write(lambda c: files.forget_file(c, tenant, file_id, self._now()))
        await self._delete_pending_files()

    async def submit(self, batch: NewBatch, batch_id: str | None = None) -> Submission:
        """Accept a batch. One submitted several times with the same `batch_id` is accepted once.

        Raises:
            IdempotencyKeyInUse, UnknownFile, InvalidRequest, Overloaded: as `submission.submit_batch`.
        """
        batch_id = batch_id or new_batch_id(batch.kind)
        is_small = len(batch.lines) <= _FEW_LINES
        rows = _rows(batch_id, batch) if is_small else await asyncio.to_thread(_rows, batch_id, batch)
        settings, now = self._context.settings, self._now()
        try:
            submission = await self._context.database.write(
                lambda c: submit_batch(c, batch, batch_id, rows, settings, now)
            )
        except (IntegrityError, ServingError):  # look for an earlier submission only now: there rarely is one
            known = await self._context.database.read(lambda c: accepted_before(c, batch, batch_id))
            if known is None:
                raise
            submission = known
        if submission.is_new:
            self._events.submitted(batch)
        return submission

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch in its current state, with an estimate of its end while it is in progress."""
        row = await self._context.database.read(lambda c: get_batch(c, tenant, batch_id))
        record = batch_record(row)
        if record.status is not BatchStatus.IN_PROGRESS:
            return record
        return replace(record, eta_s=self._throughput.eta_s(batch_id, row.waiting_tokens))

    async def wait(self, tenant: str, batch_id: str, timeout_s: float) -> BatchRecord:
        """Wait until the batch is final, at most `timeout_s`, and return it."""
        monotonic = self._context.clock.monotonic
        start_s = monotonic()
        with self._events.watch(batch_id) as ended:
            while True:
                record = await self.batch(tenant, batch_id)
                waited_s = monotonic() - start_s
                if record.status.is_final or waited_s >= timeout_s:
                    return record
                recheck_s = min(_MAX_RECHECK_S, max(_FIRST_RECHECK_S, _RECHECK_SHARE * waited_s))
                await ended.wait(min(timeout_s - waited_s, recheck_s))

    async def batches(self, tenant: str, kind: BatchKind, page: PageRequest) -> Page[BatchRecord]:
        """Return a page of the tenant's batches of one kind."""
        return await self._context.database.read(lambda c: batches.list_batches(c, tenant, kind, page))

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch and return it. A batch that is already closing continues."""
        await self._context.database.write(lambda c: cancel_batch(c, tenant, batch_id, self._now()))
        self._events.closing(batch_id)
        return await self.batch(tenant, batch_id)

    async def delete_batch(self, tenant: str, batch_id: str) -> None:
        """Delete a final batch. The sweeper deletes its lines, some at a time, and then its record."""
        await self._context.database.write(lambda c: delete_batch(c, tenant, batch_id))

    async def lines(self, tenant: str, batch_id: str, after_index: int, limit: int) -> list[LineRecord]:
        """Return lines with an index above `after_index`, in order, of any status."""
        return await self._context.database.read(lambda c: batches.list_lines(c, tenant, batch_id, after_index, limit))

    async def stats(self, tenant: str) -> BatchStats:
        """Return counts of the tenant's batches, and their output tokens per second."""
        counts = await self._context.database.read(lambda c: batches.count_by_status(c, tenant))
        sums = dict.fromkeys((status.summary for status in BatchStatus), 0)
        for status, number in counts.items():
            sums[status.summary] += number
        return BatchStats(total=sum(counts.values()), **sums, tokens_per_s=self._throughput.output_tokens_per_s(tenant))

    async def line_request(self, tenant: str | None, request_id: str) -> JsonObject | None:
        """Return the object `request` of a line that runs here or ended recently; None: there is no such line."""
        return self._find_line(tenant, request_id)

    async def report_usage(self, report: UsageReport) -> None:
        """Add a process's usage durably, unless the report has come before."""
        try:
            await self._context.database.write(lambda c: add_report(c, report, self._now()))
        except IntegrityError as error:
            raise ServingError("another process reports the same usage; the report is to be repeated") from error

    async def usage(self, query: UsageQuery) -> UsagePage:
        """Return usage of the past, in order of day, tenant, model and band."""
        return await self._context.database.read(lambda c: find_usage(c, query))

    async def storage_fault(self) -> str | None:
        """Return the code of the storage's present failure; None: it works."""
        return self._context.database.fault


def _rows(batch_id: str, batch: NewBatch) -> list[LineRow]:
    """Return the rows of a batch's lines.

    Raises:
        InvalidRequest: two lines have the same id.
    """
    if len({line.custom_id for line in batch.lines}) < len(batch.lines):
        raise InvalidRequest("two requests of the batch have the same id", "custom_id")
    return new_rows(batch_id, sized(batch.endpoint, batch.lines))
