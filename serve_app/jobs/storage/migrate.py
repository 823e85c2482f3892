"""Migration of a database to the newest version of the tables."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text

_MIGRATIONS = Path(__file__).parent / "migrations"
_LOCK = 0x48656164
"""Key of the PostgreSQL advisory lock for migrations: an arbitrary number that other programs are unlikely to use."""


class DatabaseTooNew(Exception):
    """Error for a database that a newer version of Headway has migrated."""


def upgrade(connection: Connection, version: str = "head") -> None:
    """Create the tables or migrate them to `version` (`head`: the newest), in the connection's transaction.

    Processes that start together migrate one after the other: SQLite by its write lock, PostgreSQL by an advisory
    lock.

    Raises:
        DatabaseTooNew: the database is newer than this program; nothing was changed.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, version)
    except CommandError as error:
        newest = ScriptDirectory.from_config(config).get_current_head()
        raise DatabaseTooNew(f"the database is of a version after {newest}, the newest known here: {error}") from error
