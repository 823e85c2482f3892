"""A jobs database with a manual clock and checked invariants, and helpers that make batches and line results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, select

from replicas.protocol import Band
from replicas.timing.clock import Clock
from serve_app.jobs.api.new_lines import NewLine
from serve_app.jobs.api.records import (
    BatchKind,
    BatchStatus,
    JobsSettings,
    LineStatus,
    NewBatch,
    Submission,
)
from serve_app.jobs.lifecycle.line_size import sized
from serve_app.jobs.storage.batch_states import UnclaimedBatches
from serve_app.jobs.storage.lines import LeasedLine, LineResult, lease_lines, new_rows
from serve_app.jobs.storage.ownership import add_owner
from serve_app.jobs.storage.rows.batches import BatchRow
from serve_app.jobs.storage.schema.database import Database, JobsContext
from serve_app.jobs.storage.schema.tables import batches, lines, owners
from serve_app.jobs.storage.submission import submit_batch
from testkit.jobs.memory_files import MemoryFiles

MODEL = "tiny"
ENDPOINT = "/v1/completions"

T = TypeVar("T")
_ENDED = {LineStatus.SUCCEEDED.value, LineStatus.FAILED.value, LineStatus.EXPIRED.value, LineStatus.CANCELLED.value}


class SetTime:
    """Manual clock with the same monotonic and unix time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = Clock(monotonic=lambda: self.now, unix=lambda: self.now)


class World:
    """One database with a file store in memory and a manual unix clock."""

    def __init__(self, database: Database, settings: JobsSettings | None = None) -> None:
        self.database = database
        self.settings = settings or JobsSettings(MODEL)
        self.now = 1_000_000.0
        self.clock = Clock(unix=lambda: self.now)
        self.files = MemoryFiles()
        self.num_batches = 0

    @property
    def context(self) -> JobsContext:
        return JobsContext(self.database, self.files, self.settings, bytes(64), self.clock)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run a transaction, check every invariant inside it, and return its result."""

        def checked(connection: Connection) -> T:
            result = work(connection)
            check_invariants(connection)
            return result

        return await self.database.write(checked)

    async def add_owner(self, owner: str) -> None:
        await self.write(lambda c: add_owner(c, owner, self.now))

    async def claim(self, owner: str, *statuses: BatchStatus) -> BatchRow | None:
        return await self.write(lambda c: UnclaimedBatches(statuses, MODEL).claim(c, owner))

    async def submit(self, new: NewBatch, batch_id: str | None = None) -> Submission:
        self.num_batches += 1
        chosen = batch_id or f"batch_{self.num_batches}"
        rows = new_rows(chosen, sized(new.endpoint, new.lines))
        return await self.write(lambda c: submit_batch(c, new, chosen, rows, self.settings, self.now))

    async def lease(self, owner: str, batch_id: str, limit: int = 100) -> list[LeasedLine]:
        return await self.write(lambda c: lease_lines(c, owner, {batch_id: limit}))


def new_batch(num_lines: int = 3, kind: BatchKind = BatchKind.PROMPTS, **fields: Any) -> NewBatch:
    lines = tuple(NewLine(f"line-{index}", body(index)) for index in range(num_lines))
    given: dict[str, Any] = {"tenant": "acme", "endpoint": ENDPOINT, "band": Band.BATCH, "window_s": None}
    if kind is not BatchKind.FILE:
        given["lines"] = lines
    return NewBatch(kind=kind, **{**given, **fields})


def body(index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": f"prompt {index}", "max_tokens": 4, **fields}


def success(line: LeasedLine) -> LineResult:
    return LineResult(line, LineStatus.SUCCEEDED, 200, '{"text":"yes"}', None, 3, 5)


def failure(line: LeasedLine) -> LineResult:
    error = '{"message":"no","type":"invalid_request_error","param":null,"code":"invalid_value"}'
    return LineResult(line, LineStatus.FAILED, 400, f'{{"error":{error}}}', error)


def check_invariants(connection: Connection) -> None:
    """Fail if an invariant does not hold.

    - A line has an owner if and only if it is running, and the owner has a row.
    - A line has a body until it ends, and from then on a response or an error.
    - A batch's counts match its lines, except before validation has ended and after its lines may be deleted.
    - In a final batch every line has ended; a batch in progress has lines that have not.
    - A batch with an owner is not final, and the owner has a row.
    """
    known = set(connection.execute(select(owners.c.id)).scalars())
    for batch in connection.execute(select(batches)):
        _check_batch(connection, batch, known)


def _check_batch(connection: Connection, batch: BatchRow, known: set[str]) -> None:
    counts: Counter[str] = Counter()
    waiting_tokens = 0
    for line in connection.execute(select(lines).where(lines.c.batch_id == batch.id)):
        has_ended = line.status in _ENDED
        counts[line.status] += 1
        waiting_tokens += 0 if has_ended else line.expected_tokens
        assert (line.owner is not None) == (line.status == LineStatus.RUNNING.value), line
        assert line.owner is None or line.owner in known, line
        assert has_ended == (line.body is None) == (line.response is not None or line.error is not None), line
    status = BatchStatus(batch.status)
    assert batch.owner is None or (batch.owner in known and not status.is_final), batch
    if batch.in_progress_unix_s is None:
        assert (batch.num_lines, batch.num_completed, batch.num_failed) == (0, 0, 0), batch
        return
    if status.is_final:
        assert batch.num_completed + batch.num_failed == batch.num_lines, batch
        assert batch.num_queued == batch.waiting_tokens == 0, batch
    if status.is_final and batch.kind in (BatchKind.FILE.value, BatchKind.DELETED.value):
        return  # the sweeper deletes its lines, some at a time
    num_ended, num_queued = sum(counts[ended] for ended in _ENDED), counts[LineStatus.QUEUED.value]
    assert (counts.total(), num_ended) == (batch.num_lines, batch.num_completed + batch.num_failed), batch
    assert counts[LineStatus.SUCCEEDED.value] == batch.num_completed, batch
    assert counts[LineStatus.EXPIRED.value] + counts[LineStatus.CANCELLED.value] == batch.num_undone, batch
    assert (num_queued, waiting_tokens) == (batch.num_queued, batch.waiting_tokens), batch
    if status is BatchStatus.IN_PROGRESS:
        assert batch.num_completed + batch.num_failed < batch.num_lines, batch
