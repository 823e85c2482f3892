"""Rows of `batches`: read as records, listed for clients, deleted when they are old."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from pydantic_core import from_json, to_json
from sqlalchemy import Connection, Row, Select, bindparam, delete, func, select

from replicas.protocol import Band
from serve_app.jobs.api.errors import UnknownBatch
from serve_app.jobs.api.records import (
    BatchError,
    BatchKind,
    BatchRecord,
    BatchStatus,
    LineRecord,
    LineStatus,
    Page,
    PageRequest,
    RequestCounts,
)
from serve_app.jobs.storage.paging import read_page
from serve_app.jobs.storage.tables import batches, deliveries, idempotency_keys, lines

BatchRow = Row[Any]
FINAL = tuple(status.value for status in BatchStatus if status.is_final)
UNFINISHED = tuple(status.value for status in BatchStatus if not status.is_final)
# Made once: to put a statement together takes as long as to carry it out.
_BATCH = select(batches).where(batches.c.id == bindparam("batch_id"))
_UNFINISHED_OF_TENANT = (batches.c.tenant == bindparam("tenant")) & batches.c.status.in_(UNFINISHED)
_NUM_UNFINISHED = select(func.count()).select_from(batches).where(_UNFINISHED_OF_TENANT)
_NUM_UNFINISHED_LINES = select(
    func.coalesce(func.sum(batches.c.num_lines - batches.c.num_completed - batches.c.num_failed), 0)
).where(_UNFINISHED_OF_TENANT)

_AS_THEY_ARE = (
    "id", "tenant", "endpoint", "created_unix_s", "expires_unix_s", "input_file_id", "callback_url", "request_id",
    "in_progress_unix_s", "finalizing_unix_s", "completed_unix_s", "failed_unix_s", "expired_unix_s",
    "cancelling_unix_s", "cancelled_unix_s", "num_prompt_tokens", "num_output_tokens",
    "num_cached_tokens",
)  # fmt: skip


def batch_record(row: BatchRow) -> BatchRecord:
    """A row as clients see it; its files show once they are there."""
    status = BatchStatus(row.status)
    return BatchRecord(
        kind=BatchKind(row.kind),
        band=Band(row.band),
        status=status,
        counts=RequestCounts(row.num_lines, row.num_completed, row.num_failed),
        output_file_id=row.output_file_id if status.is_final else None,
        error_file_id=row.error_file_id if status.is_final else None,
        errors=errors_of(row),
        metadata=None if row.metadata is None else from_json(row.metadata),
        **{name: getattr(row, name) for name in _AS_THEY_ARE},
    )


def errors_of(row: BatchRow) -> tuple[BatchError, ...]:
    """What was found wrong with the batch."""
    return () if row.errors is None else tuple(BatchError(**error) for error in from_json(row.errors))


def errors_text(errors: tuple[BatchError, ...]) -> str:
    """What `errors_of` reads."""
    return to_json([asdict(error) for error in errors]).decode()


def find_batch(connection: Connection, batch_id: str) -> BatchRow | None:
    """A batch, whoever's it is, if there is one of this id."""
    return connection.execute(_BATCH, {"batch_id": batch_id}).first()


def select_batch(connection: Connection, batch_id: str) -> BatchRow:
    """A batch that is known to exist, whoever's it is."""
    return connection.execute(_BATCH, {"batch_id": batch_id}).one()


def num_unfinished_batches(connection: Connection, tenant: str) -> int:
    """A tenant's batches and jobs that have not ended."""
    return int(connection.execute(_NUM_UNFINISHED, {"tenant": tenant}).scalar_one())


def num_unfinished_lines(connection: Connection, tenant: str) -> int:
    """Lines of a tenant's batches that have not ended; of one that is being validated none is known yet."""
    return int(connection.execute(_NUM_UNFINISHED_LINES, {"tenant": tenant}).scalar_one())


def lock_batches(connection: Connection, batch_ids: Iterable[str]) -> None:
    """Keep others from changing these batches and their lines until the transaction ends.

    SQLite's transactions exclude each other anyway. On PostgreSQL everything that changes lines locks their batches
    first, in the same order, so that counts stay true and no two transactions wait for each other.
    """
    if connection.dialect.name == "sqlite":
        return
    for batch_id in sorted(set(batch_ids)):
        connection.execute(select(batches.c.id).where(batches.c.id == batch_id).with_for_update())


def get_batch(connection: Connection, tenant: str, batch_id: str, is_to_change: bool = False) -> BatchRow:
    """A tenant's batch.

    Raises:
        UnknownBatch: there is none, or it is another tenant's.
    """
    query: Select[Any] = select(batches).where(batches.c.id == batch_id, batches.c.tenant == tenant)
    row = connection.execute(query.with_for_update() if is_to_change else query).first()
    if row is None:
        raise UnknownBatch(f"there is no batch or job `{batch_id[:100]}`")
    return row


def list_batches(connection: Connection, tenant: str, kind: BatchKind, page: PageRequest) -> Page[BatchRecord]:
    """Some of a tenant's batches of one kind."""
    condition = (batches.c.tenant == tenant) & (batches.c.kind == kind.value)
    return read_page(connection, batches, condition, page, batch_record)


def list_lines(connection: Connection, tenant: str, batch_id: str, after_index: int, limit: int) -> list[LineRecord]:
    """Lines behind `after_index`, in order.

    Raises:
        UnknownBatch: there is no such batch, or it is another tenant's.
    """
    get_batch(connection, tenant, batch_id)
    query = select(lines).where(lines.c.batch_id == batch_id, lines.c.position > after_index)
    return [_line_record(row) for row in connection.execute(query.order_by(lines.c.position).limit(limit))]


def count_by_status(connection: Connection, tenant: str) -> dict[BatchStatus, int]:
    """A tenant's batches of all kinds."""
    query = select(batches.c.status, func.count()).where(batches.c.tenant == tenant).group_by(batches.c.status)
    return {BatchStatus(status): number for status, number in connection.execute(query)}


def count_all_by_status(connection: Connection) -> dict[BatchStatus, int]:
    """Everybody's batches of all kinds."""
    query = select(batches.c.status, func.count()).group_by(batches.c.status)
    return {BatchStatus(status): number for status, number in connection.execute(query)}


def forget_old_batches(connection: Connection, before_unix_s: float, limit: int) -> int:
    """Forget some jobs and prompt batches that ended before then, with their results and keys; gives how many.

    Batches of files are kept, as their results are: they are as small as their records.
    """
    ended = func.coalesce(*(batches.c[f"{status}_unix_s"] for status in FINAL))
    old = (
        select(batches.c.id)
        .where(batches.c.status.in_(FINAL), batches.c.kind != BatchKind.FILE.value)
        .where(batches.c.created_unix_s < before_unix_s, ended < before_unix_s)
        .limit(limit)
    )
    batch_ids = list(connection.execute(old).scalars())
    for table in (lines, idempotency_keys, deliveries):
        connection.execute(delete(table).where(table.c.batch_id.in_(batch_ids)))
    connection.execute(delete(batches).where(batches.c.id.in_(batch_ids)))
    return len(batch_ids)


def _line_record(row: Row[Any]) -> LineRecord:
    return LineRecord(
        index=row.position,
        custom_id=row.custom_id,
        status=LineStatus(row.status),
        status_code=row.status_code,
        response=None if row.response is None else from_json(row.response),
        error=None if row.error is None else from_json(row.error),
    )
