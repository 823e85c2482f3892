"""How batches go from state to state; each function is a part of one transaction.

    validating -> in_progress -> finalizing -> completed | expired
    validating -> failed
    validating | in_progress -> cancelling -> cancelled

A job, whose only line has failed, ends as failed. Batches without a file are final as soon as their last line is.
What takes longer than a moment, validating and closing, is done by an owner; another that claims the batch after
the owner was found dead does it again from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, select, update

from serve_app.jobs.api.errors import BatchNotCancellable
from serve_app.jobs.api.ids import new_id
from serve_app.jobs.api.records import BatchError, BatchKind, BatchStatus, FileRecord
from serve_app.jobs.storage.batches import FINAL, BatchRow, errors_text, get_batch, lock_batches
from serve_app.jobs.storage.deliveries import enqueue_delivery
from serve_app.jobs.storage.files import add_file
from serve_app.jobs.storage.ownership import is_alive
from serve_app.jobs.storage.tables import batches

CLOSING = (BatchStatus.FINALIZING, BatchStatus.CANCELLING)
_OPEN = batches.c.status.in_((BatchStatus.VALIDATING.value, BatchStatus.IN_PROGRESS.value))
# Made once: they run again and again, and to put a statement together takes as long as to carry it out.
_LATE = select(batches.c.id).where(
    _OPEN, batches.c.model == bindparam("model"), batches.c.expires_unix_s <= bindparam("now")
)
_UNOWNED = (
    select(batches.c.id)
    .where(batches.c.status.in_(bindparam("statuses", expanding=True)), batches.c.model == bindparam("model"))
    .where(batches.c.owner.is_(None), batches.c.id.not_in(bindparam("but", expanding=True)))
    .order_by(batches.c.created_unix_s)
    .limit(1)
)
_UNOWNED_TO_CLAIM = _UNOWNED.with_for_update(skip_locked=True)


@dataclass(frozen=True, slots=True)
class UnclaimedBatches:
    """Batches in some states that nobody owns."""

    statuses: Sequence[BatchStatus]
    model: str
    excluding: Sequence[str] = ()
    """Ids of those that do not count."""

    def any(self, connection: Connection) -> bool:
        """Whether there are any."""
        return connection.execute(_UNOWNED, self._parameters()).first() is not None

    def claim(self, connection: Connection, owner: str) -> BatchRow | None:
        """The oldest, which is `owner`'s from now on."""
        if not is_alive(connection, owner):
            return None
        batch_id = connection.execute(_UNOWNED_TO_CLAIM, self._parameters()).scalar()
        if batch_id is None:
            return None
        claim = update(batches).where(batches.c.id == batch_id).values(owner=owner).returning(batches)
        return connection.execute(claim).one()

    def _parameters(self) -> dict[str, object]:
        return {"statuses": [status.value for status in self.statuses], "model": self.model, "but": self.excluding}


def still_owns(connection: Connection, batch_id: str, owner: str, status: BatchStatus) -> bool:
    """Whether the batch is still the owner's and as it was; if so it stays so until the transaction ends."""
    owned = (batches.c.id == batch_id) & (batches.c.owner == owner) & (batches.c.status == status.value)
    return connection.execute(update(batches).where(owned).values(owner=owner)).rowcount == 1


def release_batch(connection: Connection, batch_id: str, owner: str) -> None:
    """Let others have a batch that could not be brought to its next state."""
    connection.execute(_change(batches.c.id == batch_id, batches.c.owner == owner).values(owner=None))


def begin_batch(
    connection: Connection, batch_id: str, owner: str, num_lines: int, waiting_tokens: int, now: float
) -> bool:
    """From validating to in progress; False: it is not the owner's any more."""
    values = _state(BatchStatus.IN_PROGRESS, now) | {
        "owner": None,
        "num_lines": num_lines,
        "num_queued": num_lines,
        "waiting_tokens": waiting_tokens,
    }
    owned = (batches.c.id == batch_id, batches.c.owner == owner, _is(BatchStatus.VALIDATING))
    return connection.execute(_change(*owned).values(values)).rowcount == 1


def fail_batch(connection: Connection, batch_id: str, owner: str, errors: tuple[BatchError, ...], now: float) -> bool:
    """From validating to failed, for good; False: it is not the owner's any more."""
    values = _state(BatchStatus.FAILED, now) | {"owner": None, "errors": errors_text(errors)}
    owned = (batches.c.id == batch_id, batches.c.owner == owner, _is(BatchStatus.VALIDATING))
    return _make_final(connection, owned, values, now)


def cancel_batch(connection: Connection, tenant: str, batch_id: str, now: float) -> None:
    """Begin to cancel; one that is being cancelled, or whose lines have all ended, goes on as it is.

    Raises:
        UnknownBatch: there is none, or it is another tenant's.
        BatchNotCancellable: it is final.
    """
    batch = get_batch(connection, tenant, batch_id, is_to_change=True)
    status = BatchStatus(batch.status)
    if status.is_final:
        raise BatchNotCancellable(f"`{batch_id}` has ended: it is {status.value}")
    if status not in CLOSING:
        values = _state(BatchStatus.CANCELLING, now) | _closing(BatchStatus.CANCELLED)
        connection.execute(_change(batches.c.id == batch_id).values(values))


def late_batches(connection: Connection, model: str, now: float) -> list[str]:
    """Every batch whose time is over."""
    return list(connection.execute(_LATE, {"model": model, "now": now}).scalars())


def expire_batches(connection: Connection, model: str, now: float) -> list[str]:
    """Begin to close every batch whose time is over; gives which."""
    batch_ids = late_batches(connection, model, now)
    lock_batches(connection, batch_ids)
    for batch_id in batch_ids:
        values = _state(BatchStatus.FINALIZING, now) | _closing(BatchStatus.EXPIRED)
        connection.execute(_change(batches.c.id == batch_id, _OPEN).values(values))
    return batch_ids


def end_batch(connection: Connection, batch: BatchRow, now: float) -> bool:
    """What follows once the last line of a batch in progress has ended; whether the batch is final then."""
    if batch.kind == BatchKind.FILE.value:
        values = _state(BatchStatus.FINALIZING, now) | _closing(BatchStatus.COMPLETED)
        connection.execute(_change(batches.c.id == batch.id).values(values))
        return False
    has_failed = batch.kind == BatchKind.JOB.value and batch.num_failed > 0
    status = BatchStatus.FAILED if has_failed else BatchStatus.COMPLETED
    return _make_final(connection, (batches.c.id == batch.id,), _state(status, now), now)


def finish_batch(connection: Connection, batch: BatchRow, owner: str, files: Sequence[FileRecord], now: float) -> bool:
    """From finalizing or cancelling to final, with the files that were written; False: it is not the owner's any more.

    A file of lines keeps its `ending` until those, which are in the files now, are deleted.
    """
    status = BatchStatus(batch.ending)
    file_ids = {file.id for file in files}
    values = _state(status, now) | {
        "owner": None,
        "ending": batch.ending if batch.kind == BatchKind.FILE.value else None,
        "output_file_id": batch.output_file_id if batch.output_file_id in file_ids else None,
        "error_file_id": batch.error_file_id if batch.error_file_id in file_ids else None,
    }
    owned = (batches.c.id == batch.id, batches.c.owner == owner, batches.c.status == batch.status)
    is_final = _make_final(connection, owned, values, now)
    for file in files if is_final else ():
        add_file(connection, file)
    return is_final


def batch_with_old_lines(connection: Connection) -> str | None:
    """A batch that is final and whose lines are not needed any more."""
    query = select(batches.c.id).where(batches.c.ending.isnot(None), batches.c.status.in_(FINAL)).limit(1)
    found: str | None = connection.execute(query).scalar()
    return found


def forget_old_lines(connection: Connection, batch_id: str) -> None:
    """Note that a final batch's lines are deleted."""
    connection.execute(_change(batches.c.id == batch_id).values(ending=None))


def new_batch_values(status: BatchStatus, now: float) -> dict[str, Any]:
    """The columns that tell the state of a new batch."""
    return {"created_unix_s": now} | ({} if status is BatchStatus.VALIDATING else _state(status, now))


def _make_final(
    connection: Connection, conditions: Sequence[ColumnElement[bool]], values: dict[str, Any], now: float
) -> bool:
    """End a batch that meets the conditions, and note in the same transaction that this is to be told."""
    ended = connection.execute(_change(*conditions).values(values).returning(batches)).first()
    if ended is None:
        return False
    enqueue_delivery(connection, ended, now)
    return True


def _closing(ending: BatchStatus) -> dict[str, Any]:
    return {
        "ending": ending.value,
        "owner": None,
        "output_file_id": new_id("file"),
        "error_file_id": new_id("file"),
    }


def _state(status: BatchStatus, now: float) -> dict[str, Any]:
    return {"status": status.value, f"{status.value}_unix_s": now}


def _is(status: BatchStatus) -> ColumnElement[bool]:
    return batches.c.status == status.value


def _change(*conditions: ColumnElement[bool]) -> Any:
    return update(batches).where(*conditions)
