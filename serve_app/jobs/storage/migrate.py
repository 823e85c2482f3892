"""Brings a database to the newest version of the tables."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text

_MIGRATIONS = Path(__file__).parent / "migrations"
_LOCK = 0x48656164
"""Any number that nobody else takes a PostgreSQL advisory lock of."""


class DatabaseTooNew(Exception):
    """A newer Headway has changed the tables; this one cannot know how."""


def upgrade(connection: Connection, version: str = "head") -> None:
    """Make the tables, or bring them to a version, the newest, all within the connection's transaction.

    Processes that start together do it one after the other: SQLite's transactions that write are exclusive, and
    PostgreSQL is asked for a lock.

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
