"""Invariants of the database between any two transactions, checked by tests."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import Connection, select

from serve_app.jobs.api.records import BatchKind, BatchStatus, LineStatus
from serve_app.jobs.storage.batches import BatchRow
from serve_app.jobs.storage.tables import batches, lines, owners

_ENDED = {LineStatus.SUCCEEDED.value, LineStatus.FAILED.value, LineStatus.EXPIRED.value, LineStatus.CANCELLED.value}


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
        assert has_ended == (line.body is None), line
        assert has_ended == (line.response is not None or line.error is not None), line
    status = BatchStatus(batch.status)
    assert batch.owner is None or (batch.owner in known and not status.is_final), batch
    if batch.in_progress_unix_s is None:
        assert (batch.num_lines, batch.num_completed, batch.num_failed) == (0, 0, 0), batch
        return
    if status.is_final:
        assert batch.num_completed + batch.num_failed == batch.num_lines, batch
        assert batch.num_queued == batch.waiting_tokens == 0, batch
    if status.is_final and batch.kind == BatchKind.FILE.value:
        return  # the sweeper deletes its lines, some at a time
    assert counts.total() == batch.num_lines, batch
    assert counts[LineStatus.SUCCEEDED.value] == batch.num_completed, batch
    assert sum(counts[status] for status in _ENDED) == batch.num_completed + batch.num_failed, batch
    assert counts[LineStatus.QUEUED.value] == batch.num_queued, batch
    assert waiting_tokens == batch.waiting_tokens, batch
    if status is BatchStatus.IN_PROGRESS:
        assert batch.num_completed + batch.num_failed < batch.num_lines, batch
