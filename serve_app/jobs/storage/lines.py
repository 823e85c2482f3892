"""Rows of `lines`: creation, leases, results and deletion.

A running line has an owner and an attempt number, and only a worker that names both can end it. A worker that was
declared dead, or whose line was cancelled, therefore writes nothing: every line ends once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Connection, Row, bindparam, delete, insert, select, text, update

from serve_app.jobs.api.new_lines import NewLine
from serve_app.jobs.api.records import BatchKind, BatchStatus, LineStatus
from serve_app.jobs.api.responses import EndedResponse
from serve_app.jobs.storage.batch_states import end_batch
from serve_app.jobs.storage.ownership import is_alive
from serve_app.jobs.storage.rows.batches import BatchRow, lock_batches
from serve_app.jobs.storage.schema.tables import batches, lines

LineRow = dict[str, Any]

MANY_LINES = 1000
"""New lines after which the statistics are refreshed: this takes about as long as to lease a hundred lines."""

# Built once: building a statement takes as long as executing it.
_INSERT = insert(lines)
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
_LEASE_ALL = (
    update(lines)
    .where(lines.c.batch_id.in_(bindparam("batch_ids", expanding=True)), lines.c.status == LineStatus.QUEUED.value)
    .values(status=LineStatus.RUNNING.value, attempt=lines.c.attempt + 1)
    .returning(lines)
)
_LEASABLE = (
    batches.c.id.in_(bindparam("batch_ids", expanding=True)),
    batches.c.status == BatchStatus.IN_PROGRESS.value,
    batches.c.num_queued > 0,
)
_IS_JOB = batches.c.kind == BatchKind.JOB.value
_LOCK_JOBS = select(batches).where(*_LEASABLE, _IS_JOB).with_for_update(skip_locked=True)
_LOCK_BATCHES = select(batches).where(*_LEASABLE, ~_IS_JOB).order_by(batches.c.id).with_for_update()
_HELD = select(lines.c.batch_id, lines.c.position, lines.c.attempt).where(lines.c.owner == bindparam("held_by"))
_LINE = update(lines).where(_OF_BATCH, lines.c.position == bindparam("at_position"))
_RELEASE = _LINE.values(status=LineStatus.QUEUED.value, owner=None)
_END = _LINE.values(owner=None, body=None)
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
)
"""Takes sums over the results of one batch as parameters."""


_ANALYZE = text("ANALYZE lines (batch_id, position, status, length_rank, prefix_key, owner)")
"""Not the columns with texts, whose sampling takes longest; no plan depends on them."""


@dataclass(frozen=True, slots=True)
class LineSize:
    """Estimate of a line's size, made before it is tokenized."""

    expected_tokens: int
    """Prompt and output tokens of all prompts and choices."""
    length_rank: int
    """Minus the bit length of `expected_tokens`: longer lines have lower ranks. Within a rank, lengths differ by less
    than a factor of two."""
    prefix_key: str
    """Hash of the first prompt's beginning."""


@dataclass(frozen=True, slots=True)
class LeasedLine:
    """Line that its owner may run; `attempt` distinguishes the leases of one line."""

    tenant: str
    batch_id: str
    position: int
    attempt: int
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
    stored: EndedResponse | None = None
    """Response to be stored with the result."""


StoreResponse = Callable[[Connection, LineResult], LineResult]
"""Function that stores the response of a result; it returns the result, or a failure if there is no room."""


@dataclass(slots=True)
class EndedLines:
    """Outcome of writing some results."""

    counted: list[LineResult]
    """Results that were written; the others were dropped because the owner had lost the line."""
    final_batch_ids: list[str]
    """Batches that became final."""
    closing_batch_ids: list[str]
    """Batches that are now waiting to be finalized."""


def new_rows(batch_id: str, new_lines: Iterable[tuple[NewLine, LineSize]], start: int = 0) -> list[LineRow]:
    """Return the rows of new queued lines, the first of them at position `start`."""
    return [
        {
            "batch_id": batch_id,
            "position": position,
            "custom_id": line.custom_id,
            "body": to_json(line.body).decode(),
            **asdict(size),
            "status": LineStatus.QUEUED.value,
            "attempt": 0,
        }
        for position, (line, size) in enumerate(new_lines, start)
    ]


def add_lines(connection: Connection, rows: Sequence[LineRow]) -> None:
    """Insert lines whose custom ids are new in their batch."""
    if rows:
        connection.execute(_INSERT, rows)


def refresh_statistics(connection: Connection, num_new: int) -> None:
    """Tell PostgreSQL's planner how many lines there are after `num_new` were added, if these are many.

    Autovacuum would do so within a minute. Until then the planner may take the table for empty, as it was when the
    lines of earlier batches were deleted, and read a whole batch for each lease. SQLite's planner does not ask.
    """
    if num_new >= MANY_LINES and connection.dialect.name == "postgresql":
        connection.execute(_ANALYZE)


def taken_custom_ids(connection: Connection, batch_id: str, custom_ids: Iterable[str]) -> set[str]:
    """Return those of these custom ids that the batch already has."""
    query = select(lines.c.custom_id).where(lines.c.batch_id == batch_id, lines.c.custom_id.in_(list(custom_ids)))
    return set(connection.execute(query).scalars())


def request_id_of(batch_id: str, position: int) -> str:
    """Return the request id of a line."""
    return f"{batch_id.rpartition('_')[2]}-{position}"


def lease_lines(connection: Connection, owner: str, num_lines: Mapping[str, int]) -> list[LeasedLine]:
    """Lease up to `num_lines[batch_id]` queued lines of each batch and return them, the longest of a batch first.

    None are leased of a batch that is not in progress, of a job that another transaction has locked, or if the owner is
    dead.
    """
    if not num_lines or not is_alive(connection, owner):
        return []
    of_batches = {"batch_ids": list(num_lines)}
    # A job that is locked is being leased or cancelled by another worker; a larger batch has lines for several.
    rows = [*connection.execute(_LOCK_BATCHES, of_batches), *connection.execute(_LOCK_JOBS, of_batches)]
    tenants = {row.id: row.tenant for row in rows}
    leased: list[Row[Any]] = []
    if whole := [row.id for row in rows if row.num_queued <= num_lines[row.id]]:
        leased += connection.execute(_LEASE_ALL, {"batch_ids": whole, "owner": owner})
    for batch_id in tenants.keys() - set(whole):
        parameters = {"of_batch": batch_id, "max_lines": num_lines[batch_id], "owner": owner}
        leased += connection.execute(_LEASE, parameters)
    _add_queued(connection, {batch_id: -number for batch_id, number in Counter(row.batch_id for row in leased).items()})
    leased.sort(key=lambda row: (row.batch_id, row.length_rank, row.prefix_key, row.position))
    return [
        LeasedLine(tenants[row.batch_id], row.batch_id, row.position, row.attempt, row.body, row.expected_tokens)
        for row in leased
    ]


def release_lines(connection: Connection, owner: str, leased: Sequence[LeasedLine]) -> None:
    """Put leased lines that have not ended back into the queue."""
    lock_batches(connection, (line.batch_id for line in leased))
    freed = _held(connection, owner).intersection(map(_key, leased))
    if freed:
        values = [{"of_batch": batch_id, "at_position": position} for batch_id, position, _ in freed]
        connection.execute(_RELEASE, values)
    _add_queued(connection, Counter(batch_id for batch_id, _, _ in freed))


def end_lines(
    connection: Connection, owner: str, results: Sequence[LineResult], now: float, store: StoreResponse | None = None
) -> EndedLines:
    """Write the results of lines that the owner still holds, and store the responses of those that have some.

    A batch whose last line has ended moves to its next state in the same transaction.
    """
    rows = {row.id: row for row in lock_batches(connection, (result.line.batch_id for result in results))}
    held, ended = _held(connection, owner), EndedLines([], [], [])
    for result in results:
        if _key(result.line) in held:
            held.remove(_key(result.line))
            if store is not None and result.stored is not None:
                result = store(connection, result)
            ended.counted.append(result)
    if not ended.counted:
        return ended
    connection.execute(_END, [_end_values(result) for result in ended.counted])
    sums = _sums_by_batch(ended.counted)
    connection.execute(_COUNT, [{"of_batch": batch_id, **its_sums} for batch_id, its_sums in sums.items()])
    for batch_id, its_sums in sums.items():
        batch, num_failed = rows[batch_id], rows[batch_id].num_failed + its_sums["failed"]
        is_done = batch.num_completed + its_sums["completed"] + num_failed == batch.num_lines
        if is_done and batch.status == BatchStatus.IN_PROGRESS.value:
            is_final = end_batch(connection, batch, num_failed > 0, now)
            (ended.final_batch_ids if is_final else ended.closing_batch_ids).append(batch_id)
    return ended


def _sums_by_batch(results: Iterable[LineResult]) -> dict[str, Counter[str]]:
    sums: dict[str, Counter[str]] = {}
    for result in results:
        is_success = result.status is LineStatus.SUCCEEDED
        sums.setdefault(result.line.batch_id, Counter()).update(
            completed=int(is_success),
            failed=int(not is_success),
            expected_tokens=result.line.expected_tokens,
            prompt_tokens=result.num_prompt_tokens,
            output_tokens=result.num_output_tokens,
            cached_tokens=result.num_cached_tokens,
        )
    return sums


def _end_values(result: LineResult) -> dict[str, object]:
    return {
        "of_batch": result.line.batch_id,
        "at_position": result.line.position,
        "status": result.status.value,
        "status_code": result.status_code,
        "response": result.response,
        "error": result.error,
    }


def close_lines(connection: Connection, batch: BatchRow, status: LineStatus, error: str, limit: int) -> int:
    """End up to `limit` queued or running lines of a closing batch with `status`, and return their number."""
    lock_batches(connection, [batch.id])
    undone = (LineStatus.QUEUED.value, LineStatus.RUNNING.value)
    rows = connection.execute(
        select(lines.c.position, lines.c.status, lines.c.expected_tokens)
        .where(lines.c.batch_id == batch.id, lines.c.status.in_(undone))
        .limit(limit)
    ).all()
    if not rows:
        return 0
    these = (lines.c.batch_id == batch.id) & lines.c.position.in_([row.position for row in rows])
    values = {"status": status.value, "owner": None, "body": None, "error": error}
    connection.execute(update(lines).where(these).values(values))
    sums = {
        "num_failed": batches.c.num_failed + len(rows),
        "num_undone": batches.c.num_undone + len(rows),
        "num_queued": batches.c.num_queued - sum(row.status == LineStatus.QUEUED.value for row in rows),
        "waiting_tokens": batches.c.waiting_tokens - sum(row.expected_tokens for row in rows),
    }
    connection.execute(update(batches).where(batches.c.id == batch.id).values(sums))
    return len(rows)


def delete_lines(connection: Connection, batch_id: str, limit: int) -> int:
    """Delete up to `limit` of a batch's lines, and return their number."""
    # In order: the sweepers of two workers may delete the same lines.
    positions = select(lines.c.position).where(lines.c.batch_id == batch_id).order_by(lines.c.position).limit(limit)
    positions = positions.with_for_update()
    return connection.execute(
        delete(lines).where(lines.c.batch_id == batch_id, lines.c.position.in_(positions))
    ).rowcount


def ended_lines(connection: Connection, batch_id: str, after: int, limit: int, is_success: bool) -> list[Row[Any]]:
    """Return lines with a position above `after`, in order: those that succeeded, or all others.

    All lines of the batch must have ended.
    """
    has_succeeded = lines.c.status == LineStatus.SUCCEEDED.value
    query = select(lines).where(
        lines.c.batch_id == batch_id, lines.c.position > after, has_succeeded if is_success else ~has_succeeded
    )
    return list(connection.execute(query.order_by(lines.c.position).limit(limit)))


def _held(connection: Connection, owner: str) -> set[tuple[str, int, int]]:
    """Return batch, position and attempt of the lines that an owner holds.

    Their batches must be locked, so that none of them is taken from it before the transaction ends.
    """
    return {(row.batch_id, row.position, row.attempt) for row in connection.execute(_HELD, {"held_by": owner})}


def _key(line: LeasedLine) -> tuple[str, int, int]:
    return line.batch_id, line.position, line.attempt


def _add_queued(connection: Connection, numbers: Mapping[str, int]) -> None:
    if numbers:
        values = [{"of_batch": batch_id, "number": number} for batch_id, number in numbers.items()]
        connection.execute(_ADD_QUEUED, values)
