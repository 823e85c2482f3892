"""This process among those that work on the same database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sqlalchemy import Connection

from serve_app.jobs.database import Database
from serve_app.jobs.ids import new_id
from serve_app.jobs.owner_rows import add_owner, beat, bury_owner, dead_owners
from serve_app.jobs.settings import JobsSettings

logger = logging.getLogger(__name__)


class Ownership:
    """Tells the others that this process lives, and takes from those that do not what they held.

    A process that was found dead though it lives, as after a long stop, goes on under a new name with nothing.
    """

    def __init__(self, database: Database, settings: JobsSettings, unix_clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._settings = settings
        self._unix_clock = unix_clock
        self.id = new_id("owner")

    async def start(self) -> None:
        """Be known from now on."""
        await self._database.write(lambda connection: add_owner(connection, self.id, self._unix_clock()))

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
        if await self._database.write(lambda connection: beat(connection, self.id, self._unix_clock())):
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
        dead = dead_owners(connection, self.id, self._unix_clock(), self._settings.job_lease_s)
        for owner in dead:
            num_lines = bury_owner(connection, owner)
            logger.warning("a jobs process was lost", extra={"owner": owner, "num_lines": num_lines})
        return len(dead)
