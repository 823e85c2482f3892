"""Leases of lines: taking, releasing and ending rows of `lines`.

A running line has an owner and an attempt number, and only a process that names both can end it. A process that was
declared dead, or whose line was cancelled, therefore writes nothing: every line ends once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, bindparam, select, update

from serve_app.jobs.api.records import BatchStatus, LineStatus
from serve_app.jobs.storage.batch_states import end_batch
from serve_app.jobs.storage.batches import BatchRow, lock_batches, select_batch
from serve_app.jobs.storage.ownership import is_alive
from serve_app.jobs.storage.tables import batches, lines

# Built once: building a statement takes as long as executing it.
_OF_BATCH = lines.c.batch_id == bindparam("of_batch")
_NEXT_LINES = (
    select(lines.c.position)
    .where(_OF_BATCH, lines.c.status == LineStatus.QUEUED.value)
    .order_by(lines.c.length_rank, lines.c.prefix_key, lines.c.position)
    .limit(bindparam("max_lines"))
)
_LEASE = (
    update(lines)
    .where(_OF_BATCH, lines.c.position.in_(_NEXT_LINES))
    .values(status=LineStatus.RUNNING.value, attempt=lines.c.attempt + 1)
    .returning(lines)
)
"""Sets the parameter `owner` on the leased lines."""
_HELD = update(lines).where(
    _OF_BATCH,
    lines.c.position == bindparam("at_position"),
    lines.c.status == LineStatus.RUNNING.value,
    lines.c.owner == bindparam("held_by"),
    lines.c.attempt == bindparam("at_attempt"),
)
_RELEASE = _HELD.values(status=LineStatus.QUEUED.value, owner=None)
_END = _HELD.values(owner=None, body=None)
"""Sets the result columns from parameters of the same names."""
_BATCH = update(batches).where(batches.c.id == bindparam("of_batch"))
_ADD_QUEUED = _BATCH.values(num_queued=batches.c.num_queued + bindparam("number"))
_COUNT = _BATCH.values(
    num_completed=batches.c.num_completed + bindparam("completed"),
    num_failed=batches.c.num_failed + bindparam("failed"),
    waiting_tokens=batches.c.waiting_tokens - bindparam("expected_tokens"),
    num_prompt_tokens=batches.c.num_prompt_tokens + bindparam("prompt_tokens"),
    num_output_tokens=batches.c.num_output_tokens + bindparam("output_tokens"),
    num_cached_tokens=batches.c.num_cached_tokens + bindparam("cached_tokens"),
).returning(batches)
"""Takes the fields of `_Sums` as parameters."""


@dataclass(frozen=True, slots=True)
class LeasedLine:
    """Line that its owner may run; `attempt` distinguishes the leases of one line."""

    tenant: str
    batch_id: str
    position: int
    attempt: int
    custom_id: str
    body: str
    """JSON."""
    expected_tokens: int

    @property
    def request_id(self) -> str:
        """Request id of the line, the same at every attempt; only one attempt's result counts."""
        return request_id_of(self.batch_id, self.position)


@dataclass(frozen=True, slots=True)
class LineResult:
    """Result of a line. `response` and `error` are JSON text."""

    line: LeasedLine
    status: LineStatus
    status_code: int | None
    response: str | None
    error: str | None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were found in a KV cache."""


def request_id_of(batch_id: str, position: int) -> str:
    """Return the request id of a line."""
    return f"{batch_id.rpartition('_')[2]}-{position}"


def lease_lines(connection: Connection, owner: str, batch_id: str, limit: int) -> list[LeasedLine]:
    """Lease up to `limit` queued lines of a batch and return them, the longest first.

    None are leased if the batch is not in progress or the owner is dead.
    """
    lock_batches(connection, [batch_id])
    batch = select_batch(connection, batch_id)
    if batch.status != BatchStatus.IN_PROGRESS.value or not is_alive(connection, owner):
        return []
    leased = connection.execute(_LEASE, {"of_batch": batch_id, "max_lines": limit, "owner": owner})
    rows = sorted(leased, key=lambda row: (row.length_rank, row.prefix_key, row.position))
    _add_queued(connection, batch_id, -len(rows))
    return [
        LeasedLine(batch.tenant, row.batch_id, row.position, row.attempt, row.custom_id, row.body, row.expected_tokens)
        for row in rows
    ]


def release_lines(connection: Connection, owner: str, leased: Sequence[LeasedLine]) -> None:
    """Put leased lines that have not ended back into the queue."""
    lock_batches(connection, (line.batch_id for line in leased))
    num_freed: Counter[str] = Counter()
    for line in leased:
        num_freed[line.batch_id] += connection.execute(_RELEASE, _holding(line, owner)).rowcount
    for batch_id, number in num_freed.items():
        _add_queued(connection, batch_id, number)


@dataclass(slots=True)
class _Sums:
    """Sums over one transaction's results for one batch."""

    completed: int = 0
    failed: int = 0
    expected_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    def add(self, result: LineResult) -> None:
        is_success = result.status is LineStatus.SUCCEEDED
        self.completed += is_success
        self.failed += not is_success
        self.expected_tokens += result.line.expected_tokens
        self.prompt_tokens += result.num_prompt_tokens
        self.output_tokens += result.num_output_tokens
        self.cached_tokens += result.num_cached_tokens


@dataclass(slots=True)
class EndedLines:
    """Outcome of writing some results."""

    counted: list[LineResult]
    """Results that were written; the others were dropped because the owner had lost the line."""
    final_batch_ids: list[str]
    """Batches that became final."""
    closing_batch_ids: list[str]
    """Batches that are now waiting to be finalized."""


def end_lines(connection: Connection, owner: str, results: Sequence[LineResult], now: float) -> EndedLines:
    """Write the results of lines that the owner still holds.

    A batch whose last line has ended moves to its next state in the same transaction.
    """
    lock_batches(connection, (result.line.batch_id for result in results))
    ended = EndedLines([], [], [])
    sums: dict[str, _Sums] = {}
    for result in results:
        if _end_line(connection, owner, result):
            sums.setdefault(result.line.batch_id, _Sums()).add(result)
            ended.counted.append(result)
    for batch_id, its_sums in sums.items():
        batch = _count(connection, batch_id, its_sums)
        if batch.status == BatchStatus.IN_PROGRESS.value and batch.num_completed + batch.num_failed == batch.num_lines:
            (ended.final_batch_ids if end_batch(connection, batch, now) else ended.closing_batch_ids).append(batch_id)
    return ended


def _end_line(connection: Connection, owner: str, result: LineResult) -> bool:
    values = {
        "status": result.status.value,
        "status_code": result.status_code,
        "response": result.response,
        "error": result.error,
    }
    return connection.execute(_END, _holding(result.line, owner) | values).rowcount == 1


def close_lines(connection: Connection, batch: BatchRow, status: LineStatus, error: str, limit: int) -> int:
    """End up to `limit` queued or running lines of a closing batch with `status`, and return their number."""
    lock_batches(connection, [batch.id])
    undone = (LineStatus.QUEUED.value, LineStatus.RUNNING.value)
    some = connection.execute(
        select(lines.c.position, lines.c.status, lines.c.expected_tokens)
        .where(lines.c.batch_id == batch.id, lines.c.status.in_(undone))
        .limit(limit)
    ).all()
    if not some:
        return 0
    these = (lines.c.batch_id == batch.id) & lines.c.position.in_([row.position for row in some])
    values = {"status": status.value, "owner": None, "body": None, "error": error}
    connection.execute(update(lines).where(these).values(values))
    sums = {
        "num_failed": batches.c.num_failed + len(some),
        "num_queued": batches.c.num_queued - sum(row.status == LineStatus.QUEUED.value for row in some),
        "waiting_tokens": batches.c.waiting_tokens - sum(row.expected_tokens for row in some),
    }
    connection.execute(update(batches).where(batches.c.id == batch.id).values(sums))
    return len(some)


def _count(connection: Connection, batch_id: str, sums: _Sums) -> BatchRow:
    return connection.execute(_COUNT, {"of_batch": batch_id, **asdict(sums)}).one()


def _holding(line: LeasedLine, owner: str) -> dict[str, object]:
    return {
        "of_batch": line.batch_id, "at_position": line.position, "held_by": owner, "at_attempt": line.attempt
    }  # fmt: skip


def _add_queued(connection: Connection, batch_id: str, number: int) -> None:
    connection.execute(_ADD_QUEUED, {"of_batch": batch_id, "number": number})
