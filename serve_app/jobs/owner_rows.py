"""Rows of `owners`: who works, and what becomes of the work of those who stopped."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from serve_app.jobs.batch_rows import lock_batches
from serve_app.jobs.records import LineStatus
from serve_app.jobs.tables import batches, lines, owners

_ALIVE = select(owners.c.id).where(owners.c.id == bindparam("owner")).with_for_update(read=True)


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
