"""Leases of the workers that share a database: their heartbeats, and release of the work of dead ones.

All transactions lock in one order: the owner, then batches by id, then lines and deliveries.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic_core import from_json, to_json
from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from serve_app.jobs.api.records import LineStatus, new_id
from serve_app.jobs.api.responses import ResponseStatus
from serve_app.jobs.storage.rows.batches import lock_batches
from serve_app.jobs.storage.schema.database import JobsContext
from serve_app.jobs.storage.schema.tables import batches, deliveries, lines, owners, responses

logger = logging.getLogger(__name__)

_ALIVE = select(owners.c.id).where(owners.c.id == bindparam("owner")).with_for_update(read=True)
_DATABASE_TIME = select(func.extract("epoch", func.clock_timestamp()))


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of one worker over the last minute."""

    expected: float = 0.0
    """Expected tokens of all lines that ended."""
    by_batch: Mapping[str, float] = field(default_factory=dict)
    """Expected tokens by batch."""
    output_by_tenant: Mapping[str, float] = field(default_factory=dict)
    """Output tokens by tenant."""


class Ownership:
    """Identity of this worker in the database: it writes heartbeats, and reaps workers whose heartbeat stopped.

    A worker that was declared dead although it lives, for example after a long pause, continues under a new id and
    holds nothing.
    """

    def __init__(self, context: JobsContext, speed: Callable[[], Speed] = Speed) -> None:
        """`speed` returns this worker's, which each heartbeat publishes."""
        self._context = context
        self._speed = speed
        self.id = new_id("owner")

    async def renew(self) -> None:
        """Register this worker under a new id; what it held under its former one is released."""
        former, self.id = self.id, new_id("owner")

        def renew(connection: Connection) -> None:
            reap_owner(connection, former)
            self._add(connection)

        await self._context.database.write(renew)

    async def start(self) -> None:
        """Register this worker in the database."""
        await self._context.database.write(self._add)

    async def run(self, on_lost: Callable[[], None], on_freed: Callable[[], None]) -> None:
        """Write heartbeats and reap dead workers until cancelled.

        `on_lost`: called when this worker has lost everything that it held; `on_freed`: when work was released.
        """
        while True:
            if not await self.heartbeat():
                on_lost()
            if await self.reap_dead():
                on_freed()
            await asyncio.sleep(self._context.settings.heartbeat_s)

    async def heartbeat(self) -> bool:
        """Write a heartbeat; False: this worker had been declared dead, and now has a new id."""
        speed = self._speed()
        if await self._context.database.write(lambda c: heartbeat(c, self.id, self._now(c), speed)):
            return True
        logger.warning("this worker was declared dead; its work is done again", extra={"owner": self.id})
        self.id = new_id("owner")
        await self.start()
        return False

    async def reap_dead(self) -> int:
        """Release the work of workers whose heartbeat stopped, and return their number."""
        return await self._context.database.write(self._reap_dead)

    async def stop(self) -> None:
        """Unregister this worker and release its work, which others can then take at once."""
        await self._context.database.write(lambda connection: reap_owner(connection, self.id))

    def _add(self, connection: Connection) -> None:
        add_owner(connection, self.id, self._now(connection), self._context.settings.model_name)

    def _reap_dead(self, connection: Connection) -> int:
        dead = dead_owners(connection, self.id, self._now(connection), self._context.settings.job_lease_s)
        for owner in dead:
            num_lines = reap_owner(connection, owner)
            logger.warning("a jobs worker was lost", extra={"owner": owner, "num_lines": num_lines})
        return len(dead)

    def _now(self, connection: Connection) -> float:
        """Return the unix time of heartbeats: PostgreSQL's, since the clocks of the workers' machines may differ."""
        if connection.dialect.name == "sqlite":
            return self._context.clock.unix()
        return float(connection.execute(_DATABASE_TIME).scalar_one())


def add_owner(connection: Connection, owner: str, now: float, model: str | None = None) -> None:
    """Insert the row of a worker that is about to run lines of `model`."""
    connection.execute(insert(owners).values(id=owner, heartbeat_unix_s=now, model=model))


def heartbeat(connection: Connection, owner: str, now: float, speed: Speed | None = None) -> bool:
    """Write an owner's heartbeat; False: the owner was declared dead and has lost everything."""
    values = {"heartbeat_unix_s": now, "speed": None if speed is None else to_json(speed).decode()}
    return connection.execute(update(owners).where(owners.c.id == owner).values(values)).rowcount == 1


def other_workers(connection: Connection, model: str, owner: str) -> list[Speed]:
    """Return the speeds of the workers of a model, except `owner`, as of their last heartbeats.

    A dead worker counts until it is reaped.
    """
    others = select(owners.c.speed).where(owners.c.model == model, owners.c.id != owner)
    return [Speed() if text is None else Speed(**from_json(text)) for text in connection.execute(others).scalars()]


def is_alive(connection: Connection, owner: str) -> bool:
    """Return True if an owner has a row, and lock that row against reaping until the transaction ends."""
    return connection.execute(_ALIVE, {"owner": owner}).first() is not None


def dead_owners(connection: Connection, excluding: str, now: float, max_age_s: float) -> list[str]:
    """Return owners, except `excluding`, whose last heartbeat is more than `max_age_s` ago."""
    dead = (owners.c.heartbeat_unix_s < now - max_age_s) & (owners.c.id != excluding)
    return list(connection.execute(select(owners.c.id).where(dead)).scalars())


def reap_owner(connection: Connection, owner: str) -> int:
    """Delete an owner, release its lines, batches, deliveries and responses, and return the number of lines.

    If its process still lives, its later results are dropped: it no longer holds the lines.
    """
    connection.execute(delete(owners).where(owners.c.id == owner))
    held = select(lines.c.batch_id).where(lines.c.owner == owner).distinct()
    owned = select(batches.c.id).where(batches.c.owner == owner)
    lock_batches(connection, [*connection.execute(held).scalars(), *connection.execute(owned).scalars()])
    connection.execute(update(batches).where(batches.c.owner == owner).values(owner=None))
    connection.execute(update(deliveries).where(deliveries.c.owner == owner).values(owner=None))
    _free_responses(connection, owner)
    freed = update(lines).where(lines.c.owner == owner).values(status=LineStatus.QUEUED.value, owner=None)
    num_freed = Counter(connection.execute(freed.returning(lines.c.batch_id)).scalars())
    for batch_id, number in num_freed.items():
        queued = batches.c.num_queued + number
        connection.execute(update(batches).where(batches.c.id == batch_id).values(num_queued=queued))
    return num_freed.total()


def _free_responses(connection: Connection, owner: str) -> None:
    """Queue the responses in the background of an owner again; those that its clients waited for have failed."""
    held = update(responses).where(responses.c.owner == owner)
    for is_background, status in ((1, ResponseStatus.QUEUED), (0, ResponseStatus.FAILED)):
        connection.execute(
            held.where(responses.c.is_background == is_background).values(status=status.value, owner=None)
        )
