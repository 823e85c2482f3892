"""Rows of `batches`: reading them and their lines as records, counts, row locks, and deletion of old ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json
from sqlalchemy import Connection, Row, Select, bindparam, delete, func, select

from replicas.protocol import Band
from serve_app.jobs.api.errors import UnknownBatch
from serve_app.jobs.api.records import (
    BatchError,
    BatchKind,
    BatchProgress,
    BatchRecord,
    BatchStatus,
    LineRecord,
    LineStatus,
    Page,
    PageRequest,
    RequestCounts,
)
from serve_app.jobs.storage.schema.tables import batches, deliveries, idempotency_keys, lines, read_page

BatchRow = Row[Any]
FINAL = tuple(status.value for status in BatchStatus if status.is_final)
UNFINISHED = tuple(status.value for status in BatchStatus if not status.is_final)
# Built once: building a statement takes as long as executing it.
_BATCH = select(batches).where(batches.c.id == bindparam("batch_id"))
_LOCK = (
    select(batches)
    .where(batches.c.id.in_(bindparam("batch_ids", expanding=True)))
    .order_by(batches.c.id)
    .with_for_update()
)
_UNFINISHED_OF_TENANT = (batches.c.tenant == bindparam("tenant")) & batches.c.status.in_(UNFINISHED)
_NUM_UNFINISHED = select(func.count()).select_from(batches).where(_UNFINISHED_OF_TENANT)
_NUM_UNFINISHED_LINES = select(
    func.coalesce(func.sum(batches.c.num_lines - batches.c.num_completed - batches.c.num_failed), 0)
).where(_UNFINISHED_OF_TENANT)

_AS_THEY_ARE = (
    "id", "tenant", "endpoint", "created_unix_s", "expires_unix_s", "input_file_id", "callback_url", "request_id",
    "in_progress_unix_s", "finalizing_unix_s", "completed_unix_s", "failed_unix_s", "expired_unix_s",
    "cancelling_unix_s", "cancelled_unix_s", "num_prompt_tokens", "num_output_tokens",
    "num_cached_tokens", "num_undone",
)  # fmt: skip


def batch_record(row: BatchRow) -> BatchRecord:
    """Return a row as clients see it. The ids of result files are hidden until the batch is final."""
    status = BatchStatus(row.status)
    return BatchRecord(
        kind=BatchKind(row.kind),
        band=Band(row.band),
        status=status,
        counts=RequestCounts(row.num_lines, row.num_completed, row.num_failed),
        output_file_id=row.output_file_id if status.is_final else None,
        error_file_id=row.error_file_id if status.is_final else None,
        errors=() if row.errors is None else tuple(BatchError(**error) for error in from_json(row.errors)),
        metadata=None if row.metadata is None else from_json(row.metadata),
        **{name: getattr(row, name) for name in _AS_THEY_ARE},
    )


def find_batch(connection: Connection, batch_id: str) -> BatchRow | None:
    """Return the batch with this id, of any tenant; None: there is none."""
    return connection.execute(_BATCH, {"batch_id": batch_id}).first()


def select_batch(connection: Connection, batch_id: str) -> BatchRow:
    """Return a batch that must exist, of any tenant."""
    return connection.execute(_BATCH, {"batch_id": batch_id}).one()


def num_unfinished_batches(connection: Connection, tenant: str) -> int:
    """Return the number of a tenant's batches and jobs that are not final."""
    return int(connection.execute(_NUM_UNFINISHED, {"tenant": tenant}).scalar_one())


def num_unfinished_lines(connection: Connection, tenant: str) -> int:
    """Return the number of unfinished lines in a tenant's batches. A batch being validated counts as zero lines."""
    return int(connection.execute(_NUM_UNFINISHED_LINES, {"tenant": tenant}).scalar_one())


def lock_batches(connection: Connection, batch_ids: Iterable[str]) -> list[BatchRow]:
    """Lock these batches and their lines against other transactions until this one ends, and return the rows.

    On SQLite the database's only write lock already does so. On PostgreSQL each transaction that changes lines first
    locks their batches in order of id. That keeps the counts consistent and prevents deadlocks.
    """
    distinct_ids = list(set(batch_ids))
    return list(connection.execute(_LOCK, {"batch_ids": distinct_ids})) if distinct_ids else []


def get_batch(connection: Connection, tenant: str, batch_id: str, is_to_change: bool = False) -> BatchRow:
    """Return a tenant's batch, locked until the transaction ends if `is_to_change`.

    Raises:
        UnknownBatch: there is no such batch, or it belongs to another tenant.
    """
    query: Select[Any] = select(batches).where(batches.c.id == batch_id, batches.c.tenant == tenant)
    row = connection.execute(query.with_for_update() if is_to_change else query).first()
    if row is None:
        raise UnknownBatch(f"there is no batch or job `{batch_id[:100]}`")
    return row


def list_batches(connection: Connection, tenant: str, kind: BatchKind, page: PageRequest) -> Page[BatchRecord]:
    """Return a page of a tenant's batches of one kind."""
    condition = (batches.c.tenant == tenant) & (batches.c.kind == kind.value)
    return read_page(connection, batches, condition, page, batch_record)


def list_lines(connection: Connection, tenant: str, batch_id: str, after_index: int, limit: int) -> list[LineRecord]:
    """Return lines with an index above `after_index`, in order.

    Raises:
        UnknownBatch: there is no such batch, or it belongs to another tenant.
    """
    get_batch(connection, tenant, batch_id)
    query = select(lines).where(lines.c.batch_id == batch_id, lines.c.position > after_index)
    return [_line_record(row) for row in connection.execute(query.order_by(lines.c.position).limit(limit))]


def count_by_status(connection: Connection, tenant: str | None = None) -> dict[BatchStatus, int]:
    """Count a tenant's batches of all kinds by status; None: those of all tenants."""
    of_tenant = () if tenant is None else (batches.c.tenant == tenant,)
    query = select(batches.c.status, func.count()).where(*of_tenant).group_by(batches.c.status)
    return {BatchStatus(status): number for status, number in connection.execute(query)}


def running_batches(connection: Connection, limit: int) -> tuple[BatchProgress, ...]:
    """Return the newest batches of all tenants that run, without jobs."""
    columns = (batches.c[name] for name in ("id", "tenant", "num_lines", "num_completed", "num_failed", "callback_url"))
    is_shown = (batches.c.status == BatchStatus.IN_PROGRESS.value) & (batches.c.kind != BatchKind.JOB.value)
    query = select(*columns).where(is_shown).order_by(batches.c.created_unix_s.desc()).limit(limit)
    return tuple(
        BatchProgress(id, tenant, RequestCounts(*counts), callback_url is not None)
        for id, tenant, *counts, callback_url in connection.execute(query)
    )


def forget_old_batches(connection: Connection, before_unix_s: float, limit: int) -> int:
    """Delete some jobs and prompt batches that ended before `before_unix_s`, and return their number.

    Their lines, idempotency keys and webhook deliveries are deleted too. Batches of files are kept: only their small
    records are in the database.
    """
    ended = func.coalesce(*(batches.c[f"{status}_unix_s"] for status in FINAL))
    old = (
        select(batches.c.id)
        .where(batches.c.status.in_(FINAL), batches.c.kind != BatchKind.FILE.value)
        .where(batches.c.created_unix_s < before_unix_s, ended < before_unix_s)
        .limit(limit)
        .with_for_update(skip_locked=True)
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
