"""The database, reached from worker threads so that the event loop never waits for a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, make_url

from serve_app.jobs.storage.migrate import upgrade

ResultT = TypeVar("ResultT")

_NUM_READERS = 2
_BUSY_TIMEOUT_S = 30.0
"""How long a transaction waits for one of another process on the same SQLite file."""


class Database:
    """Runs transactions: those that write one after the other in one thread, those that only read beside them.

    A transaction is a function of a connection; what it raises undoes it. It should be short, as all others wait.
    """

    def __init__(self, url: str) -> None:
        """Connects and brings the tables to the newest version; blocks meanwhile.

        `url`: `sqlite:///path` or `postgresql+psycopg://...`.

        Raises:
            DatabaseTooNew, SQLAlchemyError: it cannot be used.
        """
        self._engine = _engine(url)
        self._writer = ThreadPoolExecutor(1, "jobs-writer")
        self._readers = ThreadPoolExecutor(_NUM_READERS, "jobs-reader")
        with self._engine.begin() as connection:
            upgrade(connection)

    async def write(self, work: Callable[[Connection], ResultT]) -> ResultT:
        """What `work` gives, once it is committed and no crash can undo it.

        Who is cancelled leaves at once; the transaction still happens, unless it had not begun.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._write, work)

    async def read(self, work: Callable[[Connection], ResultT]) -> ResultT:
        """What `work` gives, of one moment; it must not write."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    def close(self) -> None:
        """Wait for the transactions that have begun, and disconnect."""
        for executor in (self._writer, self._readers):
            executor.shutdown(wait=True, cancel_futures=True)
        self._engine.dispose()

    def _write(self, work: Callable[[Connection], ResultT]) -> ResultT:
        with self._engine.begin() as connection:
            return work(connection)

    def _read(self, work: Callable[[Connection], ResultT]) -> ResultT:
        with self._engine.connect().execution_options(**_READ_ONLY) as connection, connection.begin():
            return work(connection)


_READ_ONLY = {"headway_reads": True}


def _engine(url: str) -> Engine:
    if not url.startswith("sqlite"):
        # One reader may be in the middle of a long page while all others and the writer work.
        return create_engine(url, pool_pre_ping=True, pool_size=_NUM_READERS + 1)
    path = make_url(url).database
    if path and path != ":memory:":
        Path(path).touch(mode=0o600)  # SQLite gives its other files the mode of this one
    engine = create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    """Each commit reaches the disk before it is reported; readers see the moment at which they began."""
    connection.isolation_level = None  # or Python's driver would begin transactions by itself, too late
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    """One that writes takes the lock at once: to take it later, after reading, may fail."""
    reads = connection.get_execution_options().get("headway_reads", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
