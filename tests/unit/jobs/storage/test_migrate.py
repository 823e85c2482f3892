"""Migrations make the tables once, refuse a newer database, and start from an empty one in each test."""

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, insert, inspect, select, text

from serve_app.jobs.storage.schema.database import Database, DatabaseTooNew, _prepare_sqlite, upgrade
from serve_app.jobs.storage.schema.tables import metadata, owners


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


def version(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def test_migrations_give_the_tables_that_the_program_uses(database_url, engine):
    Database.opened(database_url).close()
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_a_database_at_the_newest_version_stays_as_it_is(database_url, engine):
    for _ in range(2):
        Database.opened(database_url).close()
    with engine.connect() as connection:
        assert version(connection) == "0008"


def test_a_database_of_an_older_version_is_brought_to_the_newest(database_url, engine):
    with engine.begin() as connection:
        upgrade(connection, "0001")
        assert version(connection) == "0001"
        connection.execute(insert(owners).values(id="owner", heartbeat_unix_s=1.0))
    Database.opened(database_url).close()
    with engine.connect() as connection:
        assert version(connection) == "0008"
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.execute(select(owners.c.id)).scalars().all() == ["owner"]


def journal_mode(path: Path, barrier: threading.Barrier) -> str:
    barrier.wait()
    with closing(sqlite3.connect(path, timeout=30.0)) as connection:
        _prepare_sqlite(connection, None)
        [mode] = connection.execute("PRAGMA journal_mode").fetchone()
        return str(mode)


def test_connections_that_open_a_new_sqlite_together_get_snapshots(tmp_path):
    barrier = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        for number in range(60):
            opened = [pool.submit(journal_mode, tmp_path / f"{number}.sqlite3", barrier) for _ in range(8)]
            assert [one.result() for one in opened] == ["wal"] * 8


def test_processes_that_start_together_make_the_tables_once(database_url, engine):
    with ThreadPoolExecutor(4) as pool:
        for database in pool.map(Database.opened, [database_url] * 4):
            database.close()
    assert {"batches", "files", "lines"} <= set(inspect(engine).get_table_names())


def test_a_database_of_a_newer_program_is_refused(database_url, engine):
    Database.opened(database_url).close()
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseTooNew, match="after 0008"):
        Database.opened(database_url)


@pytest.mark.parametrize("_turn", [1, 2])
def test_each_test_has_an_empty_database_of_its_own(database_url: str, _turn: int) -> None:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        assert inspect(connection).get_table_names() == []
        connection.execute(text("CREATE TABLE left_behind (id INTEGER)"))
    assert inspect(engine).get_table_names() == ["left_behind"]
    engine.dispose()
