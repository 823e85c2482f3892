"""In-memory jobs service, which tests control."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from replicas.errors import InvalidRequest, ServingError
from serve_app.jobs.access import JobsAccess
from serve_app.jobs.api.errors import (
    BatchInProgress,
    BatchNotCancellable,
    FileInUse,
    IdempotencyKeyInUse,
    UnknownBatch,
    UnknownFile,
)
from serve_app.jobs.api.records import (
    BatchKind,
    BatchRecord,
    BatchStats,
    BatchStatus,
    FileRecord,
    JobsCounts,
    JobsSettings,
    LineRecord,
    LineStatus,
    NewBatch,
    Page,
    PageRequest,
    RequestCounts,
    Submission,
)
from serve_app.jobs.api.responses import NewResponse, ResponseEnd
from serve_app.jobs.api.usage import UsagePage, UsageQuery, UsageReport
from serve_app.jobs.webhooks.addresses import AllowedHosts
from serve_app.jobs.webhooks.guard import SystemResolver, WebhookGuard
from testkit.jobs.memory_files import MemoryFiles

RecordT = TypeVar("RecordT", BatchRecord, FileRecord)
ResultT = TypeVar("ResultT")


@dataclass
class MemoryJobs:
    """`JobsService` without a worker: the test changes batches and lines itself."""

    store: MemoryFiles = field(default_factory=lambda: MemoryFiles(part_bytes=2**20))
    unix_clock: Callable[[], float] = time.time
    records: dict[str, FileRecord] = field(default_factory=dict)
    all_batches: dict[str, BatchRecord] = field(default_factory=dict)
    new: dict[str, NewBatch] = field(default_factory=dict)
    """Submitted batches by id."""
    all_lines: dict[str, list[LineRecord]] = field(default_factory=dict)
    keys: dict[tuple[str, str], str] = field(default_factory=dict)
    error: ServingError | None = None
    """Error that `submit`, `add_file`, `storage_fault`, `metrics` and the calls about responses raise."""
    fault: str | None = None
    """Answer of `storage_fault`."""
    loses_answers: bool = False
    """True: `add_file` raises `error` after its work."""
    counted: JobsCounts = field(default_factory=JobsCounts)
    line_requests: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """Tenant and object `request` of lines."""
    usage_reports: list[UsageReport] = field(default_factory=list)
    usage_queries: list[UsageQuery] = field(default_factory=list)
    usage_page: UsagePage = field(default_factory=lambda: UsagePage((), has_more=False))
    num_waiting: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def content_key(self) -> bytes:
        return bytes(64)

    async def add_file(self, file: FileRecord) -> None:
        if not self.loses_answers:
            self._raise()
        assert len(self.store.files[file.id]) == file.num_bytes
        self.records[file.id] = file
        self._raise()

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        file = self.records.get(file_id)
        if file is None or file.tenant != tenant:
            raise UnknownFile(f"there is no file `{file_id}`")
        return file

    async def files(self, tenant: str, purpose: str | None, page: PageRequest) -> Page[FileRecord]:
        found = [file for file in self.records.values() if file.tenant == tenant and purpose in (None, file.purpose)]
        return _page(found, page)

    async def delete_file(self, tenant: str, file_id: str) -> None:
        await self.file(tenant, file_id)
        readers = (batch for batch in self.all_batches.values() if batch.input_file_id == file_id)
        if any(not batch.status.is_final for batch in readers):
            raise FileInUse(f"file `{file_id}` is read by a batch that has not ended")
        del self.records[file_id]
        await self.store.delete(file_id)

    async def submit(self, batch: NewBatch, batch_id: str = "") -> Submission:
        self._raise()
        known = self.keys.get((batch.tenant, batch.idempotency_key or ""))
        if known is not None:
            if self.new[known].body_digest != batch.body_digest:
                raise IdempotencyKeyInUse("the idempotency key came before with another body")
            return Submission(self.all_batches[known], is_new=False)
        if batch.input_file_id is not None and (await self.file(batch.tenant, batch.input_file_id)).purpose != "batch":
            raise InvalidRequest("the file has another purpose", "input_file_id")
        record = self._record(batch)
        self.new[record.id], self.all_batches[record.id] = batch, record
        self.all_lines[record.id] = [
            LineRecord(index, line.custom_id, LineStatus.QUEUED, None, None, None)
            for index, line in enumerate(pickle.loads(pickle.dumps(batch.lines)))  # As the jobs process gets them.
        ]
        if batch.idempotency_key is not None:
            self.keys[batch.tenant, batch.idempotency_key] = record.id
        return Submission(record, is_new=True)

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        batch = self.all_batches.get(batch_id)
        if batch is None or batch.tenant != tenant:
            raise UnknownBatch(f"there is no batch `{batch_id}`")
        return batch

    async def wait(self, tenant: str, batch_id: str, timeout_s: float) -> BatchRecord:
        self.num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                while not (await self.batch(tenant, batch_id)).status.is_final:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self.num_waiting -= 1
        return await self.batch(tenant, batch_id)

    async def batches(self, tenant: str, kind: BatchKind, page: PageRequest) -> Page[BatchRecord]:
        found = [batch for batch in self.all_batches.values() if batch.tenant == tenant and batch.kind is kind]
        return _page(found, page)

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        batch = await self.batch(tenant, batch_id)
        if batch.status.is_final:
            raise BatchNotCancellable(f"batch `{batch_id}` has ended: it is {batch.status.value}")
        return self.change(batch_id, status=BatchStatus.CANCELLING, cancelling_unix_s=self.unix_clock())

    async def delete_batch(self, tenant: str, batch_id: str) -> None:
        batch = await self.batch(tenant, batch_id)
        if not batch.status.is_final:
            raise BatchInProgress(f"`{batch_id}` is {batch.status.value}")
        del self.all_batches[batch_id]

    async def lines(self, tenant: str, batch_id: str, after_index: int, limit: int) -> list[LineRecord]:
        await self.batch(tenant, batch_id)
        return self.all_lines[batch_id][after_index + 1 :][:limit]

    async def stats(self, tenant: str) -> BatchStats:
        mine = [batch for batch in self.all_batches.values() if batch.tenant == tenant]
        num_done = sum(batch.status is BatchStatus.COMPLETED for batch in mine)
        return BatchStats(len(mine), len(mine) - num_done, 0, num_done, 0, 0, 12.5)

    async def line_request(self, tenant: str | None, request_id: str) -> dict[str, Any] | None:
        self._raise()
        owner, description = self.line_requests.get(request_id, ("", None))
        return description if tenant in (None, owner) else None

    async def report_usage(self, report: UsageReport) -> None:
        self._raise()
        self.usage_reports.append(report)

    async def usage(self, query: UsageQuery) -> UsagePage:
        self._raise()
        self.usage_queries.append(query)
        return self.usage_page

    async def storage_fault(self) -> str | None:
        self._raise()
        return self.fault

    async def begin_response(self, new: NewResponse, owner: str | None) -> None:
        self._raise()

    async def end_response(self, end: ResponseEnd, owner: str) -> None:
        self._raise()

    async def metrics(self) -> JobsCounts:
        self._raise()
        return self.counted

    def change(self, batch_id: str, **fields: Any) -> BatchRecord:
        """Change fields of a batch and wake the calls of `wait`."""
        self.all_batches[batch_id] = replace(self.all_batches[batch_id], **fields)
        self._changed.set()
        return self.all_batches[batch_id]

    def set_line(self, batch_id: str, index: int, status: LineStatus, **fields: Any) -> None:
        """Change a line and update its batch's counts."""
        lines = self.all_lines[batch_id]
        lines[index] = replace(lines[index], status=status, **fields)
        completed = sum(line.status is LineStatus.SUCCEEDED for line in lines)
        open_lines = sum(line.status in (LineStatus.QUEUED, LineStatus.RUNNING) for line in lines)
        self.change(batch_id, counts=RequestCounts(len(lines), completed, len(lines) - completed - open_lines))

    def _record(self, batch: NewBatch) -> BatchRecord:
        now, is_file = self.unix_clock(), batch.kind is BatchKind.FILE
        return BatchRecord(
            id=f"{'job' if batch.kind is BatchKind.JOB else 'batch'}_{len(self.all_batches)}",
            kind=batch.kind,
            tenant=batch.tenant,
            endpoint=batch.endpoint,
            band=batch.band,
            status=BatchStatus.VALIDATING if is_file else BatchStatus.IN_PROGRESS,
            counts=RequestCounts(total=len(batch.lines)),
            created_unix_s=now,
            expires_unix_s=None if batch.window_s is None else now + batch.window_s,
            input_file_id=batch.input_file_id,
            output_file_id=None,
            error_file_id=None,
            errors=(),
            metadata=batch.metadata,
            callback_url=batch.callback_url,
            request_id=batch.request_id,
        )

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class LocalJobsClient:
    """`JobsClient` of a service in this process."""

    service: object

    async def call(self, method: Callable[..., Awaitable[ResultT]], *args: object, **arguments: object) -> ResultT:
        answer: ResultT = await getattr(self.service, method.__name__)(*args, **arguments)
        return answer


def memory_access(jobs: MemoryJobs, **limits: Any) -> JobsAccess:
    """Return the access to `jobs` that an ingress takes."""
    guard = WebhookGuard(AllowedHosts.parse("hooks.internal"), SystemResolver())
    return JobsAccess(LocalJobsClient(jobs), jobs.store, guard, JobsSettings("m", **limits))


def _page(records: Sequence[RecordT], page: PageRequest) -> Page[RecordT]:
    """Return one page; `records` are in order of creation."""
    ordered = list(records) if page.is_ascending else list(reversed(records))
    if page.after is not None:
        ordered = ordered[next((i for i, record in enumerate(ordered) if record.id == page.after), len(ordered)) + 1 :]
    return Page(tuple(ordered[: page.limit]), has_more=len(ordered) > page.limit)
