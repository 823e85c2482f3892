"""Database access through thread pools, so that the event loop never waits for the disk, and migrations."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import tenacity
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError, SQLAlchemyError

from replicas.timing.clock import Clock
from serve_app.jobs.api.errors import StorageUnavailable, storage_error_of, storage_unavailable
from serve_app.jobs.api.records import JobsSettings
from serve_app.jobs.files.store import FileStore

ResultT = TypeVar("ResultT")

_NUM_READERS = 2
_BUSY_TIMEOUT_S = 30.0
"""Seconds that a write transaction waits for another process that holds SQLite's write lock."""
_BUSY_PAUSE_S = 0.05
"""Longest pause before another attempt to change the mode of a database that another process changes, seconds."""
_MIN_FAULT_S = 2.0
"""Shortest time for which a failure counts as present, seconds: small writes may work while others fail."""
_READ_ONLY = {"headway_reads": True}
_MIGRATIONS = Path(__file__).parent / "migrations"
_REPEATABLE = ("40P01", "40001")
"""States of SQL of a deadlock and of a serialization failure: PostgreSQL has rolled back one of the transactions."""
_NUM_TRIES = 4
"""Most tries of a transaction that ends in one of them."""
_LOCK = 0x48656164
"""Key of the PostgreSQL advisory lock for migrations: an arbitrary number that other programs are unlikely to use."""


class DatabaseTooNew(Exception):
    """Error for a database that a newer version of Headway has migrated."""


class Database:
    """Executor of transactions: writes one at a time in one thread, reads in parallel in a thread pool.

    A transaction is a function of a connection; an exception rolls it back. A write should be short, because all
    others wait for it. One that PostgreSQL ends because of a deadlock with another process is repeated. If the database
    itself fails, a transaction raises `StorageUnavailable`.
    """

    def __init__(self, url: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Create the pools; nothing is connected before `open`.

        `url`: `sqlite:///path` or `postgresql+psycopg://...`.
        """
        self._url = url
        self._monotonic = monotonic
        self._engine = _engine(url)
        self._writer = ThreadPoolExecutor(1, "jobs-writer")
        self._readers = ThreadPoolExecutor(_NUM_READERS, "jobs-reader")
        self._fault: str | None = None
        self._fault_s = -math.inf
        self._has_written = True
        """True if a write has been committed since the last failure."""

    @classmethod
    def opened(cls, url: str) -> Self:
        """Return a database after `open`."""
        database = cls(url)
        database.open()
        return database

    def open(self) -> None:
        """Connect anew and migrate the tables to the newest version. This blocks the calling thread.

        Raises:
            DatabaseTooNew: a newer version of Headway has migrated the database.
            StorageUnavailable: the database cannot be used.
        """
        self._engine.dispose()
        with self._noted_faults():
            _create_file(self._url)
            with self._engine.begin() as connection:
                upgrade(connection)

    @property
    def fault(self) -> str | None:
        """Code of the database's last failure, until a later write is committed and for at least 2 s."""
        is_over = self._has_written and self._monotonic() - self._fault_s >= _MIN_FAULT_S
        return None if is_over else self._fault

    async def write(self, work: Callable[[Connection], ResultT]) -> ResultT:
        """Run `work` in a write transaction, and return its result once the commit is durable.

        A cancellation returns at once. A transaction that has begun still completes; a queued one is dropped.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._write, work)

    async def read(self, work: Callable[[Connection], ResultT]) -> ResultT:
        """Run `work` on one snapshot of the database, and return its result. `work` must not write."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)

    def close(self) -> None:
        """Wait for transactions that have begun, drop queued ones, and disconnect."""
        for executor in (self._writer, self._readers):
            executor.shutdown(wait=True, cancel_futures=True)
        self._engine.dispose()

    def _write(self, work: Callable[[Connection], ResultT]) -> ResultT:
        with self._noted_faults():
            result = self._commit(work)
        self._has_written = True
        return result

    def _commit(self, work: Callable[[Connection], ResultT], num_tries: int = _NUM_TRIES) -> ResultT:
        try:
            with self._engine.begin() as connection:
                return work(connection)
        except DBAPIError as error:
            if num_tries == 1 or getattr(error.orig, "sqlstate", None) not in _REPEATABLE:
                raise
        return self._commit(work, num_tries - 1)

    def _read(self, work: Callable[[Connection], ResultT]) -> ResultT:
        with (
            self._noted_faults(),
            self._engine.connect().execution_options(**_READ_ONLY) as connection,
            connection.begin(),
        ):
            return work(connection)

    @contextlib.contextmanager
    def _noted_faults(self) -> Iterator[None]:
        """Raise failures of the database itself as `StorageUnavailable`, and remember the last."""
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            fault = _fault_of(error)
            if fault is None:
                raise
            self._fault, self._fault_s, self._has_written = fault.code, self._monotonic(), False
            raise fault from error


@dataclass(frozen=True, slots=True)
class JobsContext:
    """Database, file store, limits, key and clock of one jobs process."""

    database: Database
    files: FileStore
    settings: JobsSettings
    content_key: bytes = field(repr=False)
    """Key of the encrypted contents of responses' items."""
    clock: Clock = field(default_factory=Clock)


def _engine(url: str) -> Engine:
    if not url.startswith("sqlite"):
        # A connection for each reader thread, and one for the writer.
        return create_engine(url, pool_pre_ping=True, pool_size=_NUM_READERS + 1)
    engine = create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _create_file(url: str) -> None:
    """Create the file of a SQLite database for its owner alone; SQLite gives its other files the same mode."""
    path = make_url(url).database if url.startswith("sqlite") else None
    if path and path != ":memory:" and not Path(path).exists():
        Path(path).touch(mode=0o600)


def _fault_of(error: Exception) -> StorageUnavailable | None:
    """Return the failure of the storage that `error` tells of; None: it tells of the transaction itself."""
    if isinstance(error, OSError):
        return storage_error_of(error)
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(error, (IntegrityError, ProgrammingError, DataError)) or isinstance(cause, SQLAlchemyError):
        return None
    name = getattr(cause, "sqlite_errorname", type(cause).__name__)
    # SQLITE_ERROR is a mistake in a statement; SQLAlchemy counts it as an OperationalError.
    return None if name == "SQLITE_ERROR" else storage_unavailable(is_full=name in ("SQLITE_FULL", "DiskFull"))


def _prepare_sqlite(connection: Any, _record: object) -> None:
    """Configure a connection: commits are flushed to disk before they return, and readers see a snapshot (WAL)."""
    connection.isolation_level = None  # else Python's driver begins a transaction only at its first write
    # Of connections that change the mode of a new database together, SQLite refuses all but one without a wait.
    for attempt in tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_busy),
        stop=tenacity.stop_after_delay(_BUSY_TIMEOUT_S),
        wait=tenacity.wait_random(0.0, _BUSY_PAUSE_S),
        reraise=True,
    ):
        with attempt:
            connection.execute("PRAGMA journal_mode = WAL")
    for pragma in ("synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _is_busy(error: BaseException) -> bool:
    return getattr(error, "sqlite_errorname", None) == "SQLITE_BUSY"


def _begin_sqlite(connection: Connection) -> None:
    """Begin a transaction. A write takes the write lock at once: taking it later, after a read, may fail."""
    reads = connection.get_execution_options().get("headway_reads", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


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
