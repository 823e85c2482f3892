"""The tables come into being, once, and a database that is newer is left alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, insert, inspect, select, text

from serve_app.jobs.storage.database import Database
from serve_app.jobs.storage.migrate import DatabaseTooNew, upgrade
from serve_app.jobs.storage.tables import metadata, owners


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


def version(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def test_migrations_give_the_tables_that_the_program_uses(database_url, engine):
    Database(database_url).close()
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_a_database_at_the_newest_version_stays_as_it_is(database_url, engine):
    for _ in range(2):
        Database(database_url).close()
    with engine.connect() as connection:
        assert version(connection) == "0003"


def test_a_database_of_an_older_version_is_brought_to_the_newest(database_url, engine):
    with engine.begin() as connection:
        upgrade(connection, "0001")
        assert version(connection) == "0001"
        connection.execute(insert(owners).values(id="owner", heartbeat_unix_s=1.0))
    Database(database_url).close()
    with engine.connect() as connection:
        assert version(connection) == "0003"
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.execute(select(owners.c.id)).scalars().all() == ["owner"]


def test_processes_that_start_together_make_the_tables_once(database_url, engine):
    failures: list[BaseException] = []

    def start() -> None:
        try:
            Database(database_url).close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert {"batches", "files", "lines"} <= set(inspect(engine).get_table_names())


def test_a_database_of_a_newer_program_is_refused(database_url, engine):
    Database(database_url).close()
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseTooNew, match="after 0003"):
        Database(database_url)
