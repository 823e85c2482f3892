"""What ingresses ask of the jobs deployment; knows no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from sqlalchemy.exc import IntegrityError

from replicas.errors import InvalidRequest, ServingError
from serve_app.jobs import batch_rows, file_rows
from serve_app.jobs.batch_rows import batch_record, get_batch
from serve_app.jobs.batch_states import cancel_batch
from serve_app.jobs.context import JobsContext
from serve_app.jobs.endings import BatchEvents
from serve_app.jobs.ids import new_batch_id
from serve_app.jobs.line_rows import LineRow, new_row
from serve_app.jobs.pace import Pace
from serve_app.jobs.records import (
    BatchKind,
    BatchRecord,
    BatchStats,
    BatchStatus,
    FileRecord,
    LineRecord,
    NewBatch,
    Page,
    PageRequest,
    Submission,
)
from serve_app.jobs.submission import accepted_before, submit_batch

_FEW_LINES = 8
"""Rows of so many lines are made at once; of more, in a thread."""
_RECHECK_S = 2.0
"""Another process on the same database may end a batch without an event here."""


class SqlJobsService:
    """Files, batches and jobs in a database; see `JobsService`, whose `metrics` are the deployment's."""

    def __init__(
        self,
        context: JobsContext,
        events: BatchEvents,
        pace: Pace,
        delete_doomed_files: Callable[[], Awaitable[None]],
    ) -> None:
        self._database = context.database
        self._settings = context.settings
        self._clock = context.clock
        self._events = events
        self._pace = pace
        self._delete_doomed_files = delete_doomed_files

    async def add_file(self, file: FileRecord) -> None:
        """Note a file whose bytes are complete in the store."""
        await self._database.write(lambda c: file_rows.add_file(c, file))

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """A file that has not expired."""
        now = self._clock.unix()
        return await self._database.read(lambda c: file_rows.get_file(c, tenant, file_id, now))

    async def files(self, tenant: str, purpose: str | None, page: PageRequest) -> Page[FileRecord]:
        """Some of the tenant's files."""
        now = self._clock.unix()
        return await self._database.read(lambda c: file_rows.list_files(c, tenant, purpose, page, now))

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Forget a file and delete its bytes; those that the store does not delete now are tried again."""
        now = self._clock.unix()
        await self._database.write(lambda c: file_rows.forget_file(c, tenant, file_id, now))
        await self._delete_doomed_files()

    async def submit(self, batch: NewBatch, batch_id: str | None = None) -> Submission:
        """Accept a batch; under an id that the caller has drawn it is accepted once, however often it is submitted.

        Raises:
            IdempotencyKeyInUse, UnknownFile, InvalidRequest, Overloaded: as `submission.submit_batch`.
        """
        if len({line.custom_id for line in batch.lines}) < len(batch.lines):
            raise InvalidRequest("two requests of the batch have the same id", "custom_id")
        batch_id = batch_id or new_batch_id(batch.kind)
        rows = await self._rows(batch, batch_id)
        settings, now = self._settings, self._clock.unix()
        try:
            submission = await self._database.write(lambda c: submit_batch(c, batch, batch_id, rows, settings, now))
        except (IntegrityError, ServingError):  # asked only then: nearly all come once, and then it is in vain
            known = await self._database.read(lambda c: accepted_before(c, batch, batch_id))
            if known is None:
                raise
            submission = known
        if submission.is_new:
            self._events.submitted(batch)
        return submission

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """A batch as it is now."""
        row = await self._database.read(lambda c: get_batch(c, tenant, batch_id))
        record = batch_record(row)
        if record.status is not BatchStatus.IN_PROGRESS:
            return record
        return replace(record, eta_s=self._pace.eta_s(batch_id, row.waiting_tokens))

    async def wait(self, tenant: str, batch_id: str, timeout_s: float) -> BatchRecord:
        """The batch once it is final, or as it is after `timeout_s`."""
        deadline_s = self._clock.monotonic() + timeout_s
        with self._events.watch(batch_id) as ended:
            while True:
                record = await self.batch(tenant, batch_id)
                left_s = deadline_s - self._clock.monotonic()
                if record.status.is_final or left_s <= 0:
                    return record
                await ended.wait(min(left_s, _RECHECK_S))

    async def batches(self, tenant: str, kind: BatchKind, page: PageRequest) -> Page[BatchRecord]:
        """Some of the tenant's batches of one kind."""
        return await self._database.read(lambda c: batch_rows.list_batches(c, tenant, kind, page))

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch; one that is being cancelled stays so."""
        now = self._clock.unix()
        await self._database.write(lambda c: cancel_batch(c, tenant, batch_id, now))
        self._events.closing(batch_id)
        return await self.batch(tenant, batch_id)

    async def lines(self, tenant: str, batch_id: str, after_index: int, limit: int) -> list[LineRecord]:
        """Lines behind `after_index`, in order, whatever their status."""
        return await self._database.read(lambda c: batch_rows.list_lines(c, tenant, batch_id, after_index, limit))

    async def stats(self, tenant: str) -> BatchStats:
        """The tenant's batches in numbers."""
        counts = await self._database.read(lambda c: batch_rows.count_by_status(c, tenant))
        sums = dict.fromkeys((status.summary for status in BatchStatus), 0)
        for status, number in counts.items():
            sums[status.summary] += number
        tokens_per_s = self._pace.output_tokens_per_s(tenant)
        return BatchStats(total=sum(counts.values()), **sums, tokens_per_s=tokens_per_s)

    async def _rows(self, batch: NewBatch, batch_id: str) -> list[LineRow]:
        def rows() -> list[LineRow]:
            return [new_row(batch_id, position, line) for position, line in enumerate(batch.lines)]

        return rows() if len(batch.lines) <= _FEW_LINES else await asyncio.to_thread(rows)
