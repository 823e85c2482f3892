"""Where the sender of webhooks finds what is owed."""

from __future__ import annotations

from replicas.clock import Clock
from serve_app.jobs.database import Database
from serve_app.jobs.delivery_rows import delivered, delivery_failed, due_deliveries
from serve_app.jobs.records import Delivery


class SqlOutbox:
    """An `Outbox`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def due_deliveries(
        self, now_unix_s: float, limit: int, without_hosts: frozenset[str] = frozenset()
    ) -> list[Delivery]:
        """Deliveries whose next attempt is due, the longest due first; none to `without_hosts`."""
        return await self._database.read(lambda c: due_deliveries(c, now_unix_s, limit, without_hosts))

    async def delivered(self, delivery_id: str) -> None:
        """Note that the receiver has it."""
        await self._database.write(lambda c: delivered(c, delivery_id, self._clock.unix()))

    async def delivery_failed(self, delivery_id: str, next_attempt_unix_s: float | None, error: str) -> None:
        """Note an attempt that failed; None: there is no next, it is dead."""
        await self._database.write(lambda c: delivery_failed(c, delivery_id, next_attempt_unix_s, error))
