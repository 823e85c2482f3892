"""Heartbeats of the processes that share a database, and release of the work of dead ones."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from serve_app.jobs.api.records import LineStatus, new_id
from serve_app.jobs.storage.batches import lock_batches
from serve_app.jobs.storage.database import JobsContext
from serve_app.jobs.storage.tables import batches, lines, owners

logger = logging.getLogger(__name__)

_ALIVE = select(owners.c.id).where(owners.c.id == bindparam("owner")).with_for_update(read=True)


class Ownership:
    """Identity of this process in the database: it writes heartbeats, and reaps processes whose heartbeat stopped.

    A process that was declared dead although it lives, for example after a long pause, continues under a new id and
    holds nothing.
    """

    def __init__(self, context: JobsContext) -> None:
        self._context = context
        self.id = new_id("owner")

    async def renew(self) -> None:
        """Register this process under a new id; what it held under its former one is released."""
        former, self.id = self.id, new_id("owner")

        def renew(connection: Connection) -> None:
            reap_owner(connection, former)
            add_owner(connection, self.id, self._context.clock.unix())

        await self._context.database.write(renew)

    async def start(self) -> None:
        """Register this process in the database."""
        await self._context.database.write(
            lambda connection: add_owner(connection, self.id, self._context.clock.unix())
        )

    async def run(self, on_lost: Callable[[], None], on_freed: Callable[[], None]) -> None:
        """Write heartbeats and reap dead processes until cancelled.

        `on_lost`: called when this process has lost everything that it held; `on_freed`: when work was released.
        """
        while True:
            if not await self.heartbeat():
                on_lost()
            if await self.reap_dead():
                on_freed()
            await asyncio.sleep(self._context.settings.heartbeat_s)

    async def heartbeat(self) -> bool:
        """Write a heartbeat; False: this process had been declared dead, and now has a new id."""
        if await self._context.database.write(
            lambda connection: heartbeat(connection, self.id, self._context.clock.unix())
        ):
            return True
        logger.warning("this process was declared dead; its work is done again", extra={"owner": self.id})
        self.id = new_id("owner")
        await self.start()
        return False

    async def reap_dead(self) -> int:
        """Release the work of processes whose heartbeat stopped, and return their number."""
        return await self._context.database.write(self._reap_dead)

    async def stop(self) -> None:
        """Unregister this process and release its work, which other processes can then take at once."""
        await self._context.database.write(lambda connection: reap_owner(connection, self.id))

    def _reap_dead(self, connection: Connection) -> int:
        dead = dead_owners(connection, self.id, self._context.clock.unix(), self._context.settings.job_lease_s)
        for owner in dead:
            num_lines = reap_owner(connection, owner)
            logger.warning("a jobs process was lost", extra={"owner": owner, "num_lines": num_lines})
        return len(dead)


def add_owner(connection: Connection, owner: str, now: float) -> None:
    """Insert the row of a process that is about to work."""
    connection.execute(insert(owners).values(id=owner, heartbeat_unix_s=now))


def heartbeat(connection: Connection, owner: str, now: float) -> bool:
    """Write an owner's heartbeat; False: the owner was declared dead and has lost everything."""
    return connection.execute(update(owners).where(owners.c.id == owner).values(heartbeat_unix_s=now)).rowcount == 1


def is_alive(connection: Connection, owner: str) -> bool:
    """Return True if an owner has a row, and lock that row against reaping until the transaction ends."""
    return connection.execute(_ALIVE, {"owner": owner}).first() is not None


def dead_owners(connection: Connection, excluding: str, now: float, max_age_s: float) -> list[str]:
    """Return owners, except `excluding`, whose last heartbeat is more than `max_age_s` ago."""
    dead = (owners.c.heartbeat_unix_s < now - max_age_s) & (owners.c.id != excluding)
    return list(connection.execute(select(owners.c.id).where(dead)).scalars())


def reap_owner(connection: Connection, owner: str) -> int:
    """Delete an owner, release its lines and batches, and return the number of lines.

    If its process still lives, its later results are dropped: it no longer holds the lines.
    """
    connection.execute(delete(owners).where(owners.c.id == owner))
    held = select(lines.c.batch_id).where(lines.c.owner == owner).distinct()
    owned = select(batches.c.id).where(batches.c.owner == owner)
    lock_batches(connection, [*connection.execute(held).scalars(), *connection.execute(owned).scalars()])
    connection.execute(update(batches).where(batches.c.owner == owner).values(owner=None))
    freed = update(lines).where(lines.c.owner == owner).values(status=LineStatus.QUEUED.value, owner=None)
    num_freed = Counter(connection.execute(freed.returning(lines.c.batch_id)).scalars())
    for batch_id, number in num_freed.items():
        queued = batches.c.num_queued + number
        connection.execute(update(batches).where(batches.c.id == batch_id).values(num_queued=queued))
    return num_freed.total()
