"""What is forgotten: jobs, batches and webhooks that ended long ago."""

from __future__ import annotations

from sqlalchemy import Connection, delete, func, select

from serve_app.jobs.batch_rows import FINAL
from serve_app.jobs.records import BatchKind
from serve_app.jobs.tables import batches, deliveries, idempotency_keys, lines


def forget_old_batches(connection: Connection, before_unix_s: float, limit: int) -> int:
    """Forget some jobs and prompt batches that ended before then, with their results and keys; gives how many.

    Batches of files are kept, as their results are: they are as small as their records.
    """
    ended = func.coalesce(
        batches.c.completed_unix_s, batches.c.failed_unix_s, batches.c.expired_unix_s, batches.c.cancelled_unix_s
    )
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
