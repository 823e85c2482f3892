"""Rows of `deliveries`, the outbox of webhooks."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, bindparam, insert, select, update

from serve_app.jobs.batch_rows import BatchRow, batch_record
from serve_app.jobs.ids import new_id
from serve_app.jobs.records import Delivery
from serve_app.jobs.tables import deliveries
from serve_app.jobs.webhook_events import event_of, host_of

_COLUMNS = ("id", "batch_id", "event", "url", "body", "num_attempts", "created_unix_s")
# Made once: to put a statement together takes as long as to carry it out.
_DUE = (
    select(*(deliveries.c[name] for name in _COLUMNS))
    .where(deliveries.c.next_attempt_unix_s <= bindparam("now"))
    .where(deliveries.c.host.not_in(bindparam("hosts", expanding=True)))
    .order_by(deliveries.c.next_attempt_unix_s)
    .limit(bindparam("limit"))
)


def owe_delivery(connection: Connection, batch: BatchRow, now: float) -> None:
    """Note, where a batch that has just ended has a callback, that its end is to be told."""
    if batch.callback_url is None:
        return
    delivery_id = new_id("evt")
    event = event_of(batch_record(batch), delivery_id)
    connection.execute(
        insert(deliveries).values(
            id=delivery_id,
            batch_id=batch.id,
            event=event.type,
            url=batch.callback_url,
            host=host_of(batch.callback_url),
            body=event.body,
            num_attempts=0,
            created_unix_s=now,
            next_attempt_unix_s=now,
        )
    )


def due_deliveries(connection: Connection, now: float, limit: int, without_hosts: Collection[str]) -> list[Delivery]:
    """Deliveries whose next attempt is due, those first that are due longest; none to these hosts."""
    rows = connection.execute(_DUE, {"now": now, "hosts": list(without_hosts), "limit": limit})
    return [Delivery(*row) for row in rows]


def delivered(connection: Connection, delivery_id: str, now: float) -> None:
    """Note that a delivery has arrived."""
    _attempted(connection, delivery_id, {"next_attempt_unix_s": None, "delivered_unix_s": now, "error": None})


def delivery_failed(connection: Connection, delivery_id: str, next_attempt_unix_s: float | None, error: str) -> None:
    """Note that an attempt has failed, and when the next one is due; None: never, it is dead."""
    _attempted(connection, delivery_id, {"next_attempt_unix_s": next_attempt_unix_s, "error": error})


def _attempted(connection: Connection, delivery_id: str, values: dict[str, object]) -> None:
    more = {"num_attempts": deliveries.c.num_attempts + 1}
    connection.execute(update(deliveries).where(deliveries.c.id == delivery_id).values(values | more))
