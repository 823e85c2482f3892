"""Rows of `deliveries`, the outbox of webhooks.

A delivery under way has an owner. Its outcome is recorded only by a worker that names the number of attempts before it
and that the delivery has not been taken from.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, fields, replace

from sqlalchemy import Connection, bindparam, insert, or_, select, tuple_, update

from serve_app.jobs.storage.ownership import Ownership, is_alive
from serve_app.jobs.storage.rows.batches import BatchRow, batch_record
from serve_app.jobs.storage.schema.database import JobsContext
from serve_app.jobs.storage.schema.tables import batches, deliveries
from serve_app.jobs.webhooks.events import Delivery, delivery_of, event_id_of, host_of
from serve_app.jobs.webhooks.receivers import NONE_CLOSED, Closed
from serve_app.tracing.context import TraceContext

logger = logging.getLogger(__name__)

_OF_BATCH = ("tenant", "traceparent", "tracestate")
"""Columns of the batch, which its delivery does not repeat."""
_COLUMNS = (*(field.name for field in fields(Delivery) if field.name != "trace"), *_OF_BATCH[1:])
# Built once: building a statement takes as long as executing it.
_DUE = (
    select(*((batches if name in _OF_BATCH else deliveries).c[name] for name in _COLUMNS))
    .join_from(deliveries, batches, deliveries.c.batch_id == batches.c.id)
    .where(deliveries.c.next_attempt_unix_s <= bindparam("now"), deliveries.c.owner.is_(None))
    .where(tuple_(batches.c.tenant, deliveries.c.host).not_in(bindparam("receivers", expanding=True)))
    .where(batches.c.tenant.not_in(bindparam("tenants", expanding=True)))
    .where(deliveries.c.id.not_in(bindparam("ids", expanding=True)))
    .order_by(deliveries.c.next_attempt_unix_s)
    .limit(bindparam("limit"))
)
_STILL_DUE = (
    select(deliveries.c.id)
    .where(deliveries.c.id.in_(bindparam("ids", expanding=True)), deliveries.c.owner.is_(None))
    .where(deliveries.c.next_attempt_unix_s <= bindparam("now"))
    .with_for_update(skip_locked=True)
)
_CLAIM = (
    update(deliveries)
    .where(deliveries.c.id.in_(_STILL_DUE))
    .values(owner=bindparam("claimed_by"))
    .returning(deliveries.c.id)
)


def enqueue_delivery(connection: Connection, batch: BatchRow, now: float) -> None:
    """Enqueue a webhook for a batch that has just ended; do nothing if it has no callback URL."""
    if batch.callback_url is None:
        return
    record = batch_record(batch)
    delivery = delivery_of(record, batch.callback_url, event_id_of(record), now)
    values = {**asdict(delivery), "host": host_of(delivery.url), "next_attempt_unix_s": now}
    del values["tenant"], values["trace"]  # the batch has them
    connection.execute(insert(deliveries).values(values))


class SqlOutbox:
    """Implementation of `Outbox` in the database."""

    def __init__(self, context: JobsContext, ownership: Ownership) -> None:
        self._database = context.database
        self._clock = context.clock
        self._ownership = ownership

    async def due_deliveries(self, now_unix_s: float, limit: int, closed: Closed = NONE_CLOSED) -> list[Delivery]:
        """Return deliveries whose next attempt is due, the longest due first; none of `closed`."""
        parameters = {
            "now": now_unix_s,
            "receivers": [(receiver.tenant, receiver.host) for receiver in closed.receivers],
            "tenants": list(closed.tenants),
            "ids": list(closed.delivery_ids),
            "limit": limit,
        }
        rows = await self._database.read(lambda connection: connection.execute(_DUE, parameters).all())
        return [replace(Delivery(*row[:-2]), trace=TraceContext.of_columns(*row[-2:])) for row in rows]

    async def claim(self, delivery_ids: Sequence[str], now_unix_s: float) -> set[str]:
        """Claim deliveries that are still due, and return their ids; other workers leave them alone."""
        owner = self._ownership.id

        def claim(connection: Connection) -> set[str]:
            if not is_alive(connection, owner):
                return set()
            parameters = {"ids": list(delivery_ids), "now": now_unix_s, "claimed_by": owner}
            return set(connection.execute(_CLAIM, parameters).scalars())

        return await self._database.write(claim)

    async def delivered(self, delivery: Delivery) -> None:
        """Record a successful attempt."""
        await self._attempted(delivery, next_attempt_unix_s=None, delivered_unix_s=self._clock.unix(), error=None)

    async def delivery_failed(self, delivery: Delivery, next_attempt_unix_s: float | None, error: str) -> None:
        """Record a failed attempt; `next_attempt_unix_s` None: it was the last, and the delivery is dead."""
        await self._attempted(delivery, next_attempt_unix_s=next_attempt_unix_s, error=error)

    async def _attempted(self, delivery: Delivery, **values: object) -> None:
        """Record an attempt, unless another worker has taken the delivery over."""
        mine = or_(deliveries.c.owner.is_(None), deliveries.c.owner == self._ownership.id)
        this = (deliveries.c.id == delivery.id) & (deliveries.c.num_attempts == delivery.num_attempts) & mine
        noted = (
            update(deliveries).where(this).values(values | {"owner": None, "num_attempts": delivery.num_attempts + 1})
        )
        if (await self._database.write(lambda connection: connection.execute(noted))).rowcount == 0:
            logger.warning("a webhook was taken over by another worker", extra={"delivery_id": delivery.id})
