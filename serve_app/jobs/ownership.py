"""Processes that work on one database: who is alive, and what becomes of the work of those that stopped."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from serve_app.jobs.batch_rows import lock_batches
from serve_app.jobs.context import JobsContext
from serve_app.jobs.ids import new_id
from serve_app.jobs.records import LineStatus
from serve_app.jobs.tables import batches, lines, owners

logger = logging.getLogger(__name__)

_ALIVE = select(owners.c.id).where(owners.c.id == bindparam("owner")).with_for_update(read=True)


class Ownership:
    """Tells the others that this process lives, and takes from those that do not what they held.

    A process that was found dead though it lives, as after a long stop, goes on under a new name with nothing.
    """

    def __init__(self, context: JobsContext) -> None:
        self._database = context.database
        self._settings = context.settings
        self._clock = context.clock
        self.id = new_id("owner")

    async def start(self) -> None:
        """Be known from now on."""
        await self._database.write(lambda connection: add_owner(connection, self.id, self._clock.unix()))

    async def run(self, on_lost: Callable[[], None], on_freed: Callable[[], None]) -> None:
        """Keep alive until cancelled; `on_lost`: all we held is others'; `on_freed`: something waits again."""
        while True:
            if not await self.beat():
                on_lost()
            if await self.bury_dead():
                on_freed()
            await asyncio.sleep(self._settings.heartbeat_s)

    async def beat(self) -> bool:
        """Give a sign of life; False: we had been found dead, and have a new name."""
        if await self._database.write(lambda connection: beat(connection, self.id, self._clock.unix())):
            return True
        logger.warning("this process was taken for dead; what it was doing is done again", extra={"owner": self.id})
        self.id = new_id("owner")
        await self.start()
        return False

    async def bury_dead(self) -> int:
        """Take from processes that are silent what they held; gives how many there were."""
        return await self._database.write(self._bury_dead)

    async def stop(self) -> None:
        """Let others have what is left, at once."""
        await self._database.write(lambda connection: bury_owner(connection, self.id))

    def _bury_dead(self, connection: Connection) -> int:
        dead = dead_owners(connection, self.id, self._clock.unix(), self._settings.job_lease_s)
        for owner in dead:
            num_lines = bury_owner(connection, owner)
            logger.warning("a jobs process was lost", extra={"owner": owner, "num_lines": num_lines})
        return len(dead)


def add_owner(connection: Connection, owner: str, now: float) -> None:
    """Register a process that is about to work."""
    connection.execute(insert(owners).values(id=owner, heartbeat_unix_s=now))


def beat(connection: Connection, owner: str, now: float) -> bool:
    """Note that an owner lives; False: it was found dead before, and has lost everything."""
    alive = update(owners).where(owners.c.id == owner).values(heartbeat_unix_s=now)
    return connection.execute(alive).rowcount == 1


def is_alive(connection: Connection, owner: str) -> bool:
    """Whether an owner may take work; if so nobody buries it before the transaction ends."""
    return connection.execute(_ALIVE, {"owner": owner}).first() is not None


def dead_owners(connection: Connection, but: str, now: float, max_age_s: float) -> list[str]:
    """Owners, all but one, whose heartbeat stopped so long ago."""
    dead = (owners.c.heartbeat_unix_s < now - max_age_s) & (owners.c.id != but)
    return list(connection.execute(select(owners.c.id).where(dead)).scalars())


def bury_owner(connection: Connection, owner: str) -> int:
    """Remove an owner and let others have what it held; gives how many lines.

    An owner that lives after all has no row any more: none of its results is taken.
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
