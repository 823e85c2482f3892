"""State transitions of batches; each function is part of one transaction.

    validating -> in_progress -> finalizing -> completed
    validating -> failed
    validating | in_progress -> finalizing -> expired
    validating | in_progress -> cancelling -> cancelled
    in_progress -> completed | failed, for batches without a file

A batch without a file is final as soon as its last line ends. A job whose only line failed ends as failed.
Validating and closing take long, so a process does them as the batch's owner. If the owner dies, another process
claims the batch and starts over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json
from sqlalchemy import ColumnElement, Connection, bindparam, delete, select, update

from serve_app.jobs.api.errors import BatchInProgress, BatchNotCancellable
from serve_app.jobs.api.records import BatchError, BatchKind, BatchStatus, FileRecord, new_id
from serve_app.jobs.storage.deliveries import enqueue_delivery
from serve_app.jobs.storage.ownership import is_alive
from serve_app.jobs.storage.rows.batches import FINAL, BatchRow, get_batch, lock_batches
from serve_app.jobs.storage.rows.files import add_file
from serve_app.jobs.storage.schema.tables import batches, idempotency_keys

CLOSING = (BatchStatus.FINALIZING, BatchStatus.CANCELLING)
_OPEN = batches.c.status.in_((BatchStatus.VALIDATING.value, BatchStatus.IN_PROGRESS.value))
# Built once: building a statement takes as long as executing it.
_LATE = select(batches.c.id).where(
    _OPEN, batches.c.model == bindparam("model"), batches.c.expires_unix_s <= bindparam("now")
)
_UNOWNED = (
    select(batches.c.id)
    .where(batches.c.status.in_(bindparam("statuses", expanding=True)), batches.c.model == bindparam("model"))
    .where(batches.c.owner.is_(None), batches.c.id.not_in(bindparam("excluded", expanding=True)))
    .order_by(batches.c.created_unix_s)
    .limit(1)
)
_UNOWNED_TO_CLAIM = _UNOWNED.with_for_update(skip_locked=True)


@dataclass(frozen=True, slots=True)
class UnclaimedBatches:
    """Batches in some states that have no owner."""

    statuses: Sequence[BatchStatus]
    model: str
    excluding: Sequence[str] = ()
    """Ids of batches to leave out."""

    def any(self, connection: Connection) -> bool:
        """Return True if there is such a batch."""
        return connection.execute(_UNOWNED, self._parameters()).first() is not None

    def claim(self, connection: Connection, owner: str) -> BatchRow | None:
        """Make `owner` the owner of the oldest such batch and return it; None: there is none, or the owner is dead."""
        if not is_alive(connection, owner):
            return None
        batch_id = connection.execute(_UNOWNED_TO_CLAIM, self._parameters()).scalar()
        if batch_id is None:
            return None
        claim = update(batches).where(batches.c.id == batch_id).values(owner=owner).returning(batches)
        return connection.execute(claim).one()

    def _parameters(self) -> dict[str, object]:
        return {"statuses": [status.value for status in self.statuses], "model": self.model, "excluded": self.excluding}


def still_owns(connection: Connection, batch_id: str, owner: str, status: BatchStatus) -> bool:
    """Return True if the batch still has this owner and status, and lock its row until the transaction ends."""
    owned = (batches.c.id == batch_id) & (batches.c.owner == owner) & (batches.c.status == status.value)
    return connection.execute(update(batches).where(owned).values(owner=owner)).rowcount == 1


def release_batch(connection: Connection, batch_id: str, owner: str) -> None:
    """Give up ownership of a batch, so that any process can claim it."""
    connection.execute(_change(batches.c.id == batch_id, batches.c.owner == owner).values(owner=None))


def begin_batch(
    connection: Connection, batch_id: str, owner: str, num_lines: int, waiting_tokens: int, now: float
) -> bool:
    """Move a batch from validating to in progress; False: it no longer belongs to the owner."""
    values = _state(BatchStatus.IN_PROGRESS, now) | {
        "owner": None,
        "num_lines": num_lines,
        "num_queued": num_lines,
        "waiting_tokens": waiting_tokens,
    }
    owned = (batches.c.id == batch_id, batches.c.owner == owner, _is(BatchStatus.VALIDATING))
    return connection.execute(_change(*owned).values(values)).rowcount == 1


def fail_batch(connection: Connection, batch_id: str, owner: str, errors: tuple[BatchError, ...], now: float) -> bool:
    """Move a batch from validating to failed, a final state; False: it no longer belongs to the owner."""
    values = _state(BatchStatus.FAILED, now) | {"owner": None, "errors": to_json(errors).decode()}
    owned = (batches.c.id == batch_id, batches.c.owner == owner, _is(BatchStatus.VALIDATING))
    return _make_final(connection, owned, values, now)


def cancel_batch(connection: Connection, tenant: str, batch_id: str, now: float) -> None:
    """Begin to cancel a batch. A batch that is already finalizing or cancelling is left as it is.

    Raises:
        UnknownBatch: there is no such batch, or it belongs to another tenant.
        BatchNotCancellable: it is final.
    """
    batch = get_batch(connection, tenant, batch_id, is_to_change=True)
    status = BatchStatus(batch.status)
    if status.is_final:
        raise BatchNotCancellable(f"`{batch_id}` has ended: it is {status.value}")
    if status not in CLOSING:
        _begin_closing(connection, batches.c.id == batch_id, BatchStatus.CANCELLING, BatchStatus.CANCELLED, now)


def delete_batch(connection: Connection, tenant: str, batch_id: str) -> None:
    """Hide a final batch from its tenant; mark its lines as old, so that the sweeper deletes them and then the batch.

    Raises:
        UnknownBatch: there is no such batch, or it belongs to another tenant.
        BatchInProgress: it is not final.
    """
    own = (batches.c.id == batch_id, batches.c.tenant == tenant, batches.c.status.in_(FINAL))
    values = {"kind": BatchKind.DELETED.value, "ending": batches.c.status}
    if connection.execute(_change(*own).values(values)).rowcount == 0:
        status = get_batch(connection, tenant, batch_id).status
        raise BatchInProgress(f"`{batch_id}` is {status}; it can be deleted when it has ended")
    connection.execute(delete(idempotency_keys).where(idempotency_keys.c.batch_id == batch_id))


def late_batches(connection: Connection, model: str, now: float) -> list[str]:
    """Return the ids of all open batches whose deadline has passed."""
    return list(connection.execute(_LATE, {"model": model, "now": now}).scalars())


def expire_batches(connection: Connection, model: str, now: float) -> list[str]:
    """Begin to close all open batches whose deadline has passed, and return their ids."""
    batch_ids = late_batches(connection, model, now)
    lock_batches(connection, batch_ids)
    for batch_id in batch_ids:
        open_ = (batches.c.id == batch_id) & _OPEN
        _begin_closing(connection, open_, BatchStatus.FINALIZING, BatchStatus.EXPIRED, now)
    return batch_ids


def end_batch(connection: Connection, batch: BatchRow, has_failures: bool, now: float) -> bool:
    """Advance a batch in progress whose last line has ended. Return True if the batch is now final.

    A batch of a file is not final: its result files have still to be written.
    """
    if batch.kind == BatchKind.FILE.value:
        _begin_closing(connection, batches.c.id == batch.id, BatchStatus.FINALIZING, BatchStatus.COMPLETED, now)
        return False
    has_failed = batch.kind == BatchKind.JOB.value and has_failures
    status = BatchStatus.FAILED if has_failed else BatchStatus.COMPLETED
    return _make_final(connection, (batches.c.id == batch.id,), _state(status, now), now)


def finish_batch(connection: Connection, batch: BatchRow, owner: str, files: Sequence[FileRecord], now: float) -> bool:
    """Make a closing batch final and record its result files; False: it no longer belongs to the owner.

    A batch of a file keeps its `ending` until its lines, now copied to the files, are deleted.
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
    if is_final:
        for file in files:
            add_file(connection, file)
    return is_final


def batch_with_old_lines(connection: Connection) -> str | None:
    """Return the id of a final batch whose lines are in its result files and can be deleted; None: there is none."""
    query = select(batches.c.id).where(batches.c.ending.isnot(None), batches.c.status.in_(FINAL)).limit(1)
    batch_id: str | None = connection.execute(query).scalar()
    return batch_id


def forget_old_lines(connection: Connection, batch_id: str) -> None:
    """Record that a final batch's lines are deleted; delete the batch if its tenant has deleted it."""
    connection.execute(delete(batches).where(batches.c.id == batch_id, batches.c.kind == BatchKind.DELETED.value))
    connection.execute(_change(batches.c.id == batch_id).values(ending=None))


def new_batch_values(status: BatchStatus, now: float) -> dict[str, Any]:
    """Return the status and time columns of a new batch; `validating` is the default status."""
    return {"created_unix_s": now} | ({} if status is BatchStatus.VALIDATING else _state(status, now))


def _make_final(
    connection: Connection, conditions: Sequence[ColumnElement[bool]], values: dict[str, Any], now: float
) -> bool:
    """Make the batch that meets the conditions final, and enqueue its webhook in the same transaction.

    Return False if no batch meets them.
    """
    ended = connection.execute(_change(*conditions).values(values).returning(batches)).first()
    if ended is None:
        return False
    enqueue_delivery(connection, ended, now)
    return True


def _begin_closing(
    connection: Connection, condition: ColumnElement[bool], status: BatchStatus, ending: BatchStatus, now: float
) -> None:
    """Move the batch that meets the condition to `status`, a closing one; its final status will be `ending`."""
    values = _state(status, now) | {
        "ending": ending.value,
        "owner": None,
        "output_file_id": new_id("file"),
        "error_file_id": new_id("file"),
    }
    connection.execute(_change(condition).values(values))


def _state(status: BatchStatus, now: float) -> dict[str, Any]:
    return {"status": status.value, f"{status.value}_unix_s": now}


def _is(status: BatchStatus) -> ColumnElement[bool]:
    return batches.c.status == status.value


def _change(*conditions: ColumnElement[bool]) -> Any:
    return update(batches).where(*conditions)
