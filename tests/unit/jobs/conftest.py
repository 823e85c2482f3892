"""Databases: each test that asks for one runs on SQLite and on a real PostgreSQL server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.jobs.storage.schema.database import Database
from testkit.jobs.database_worlds import World
from testkit.jobs.postgresql import NOT_INSTALLED, PostgreSQL, find_binaries, postgresql


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgreSQL]:
    """One server for all tests."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip(NOT_INSTALLED)
    with postgresql(binaries) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the URL of an empty database of the test's own."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/jobs.sqlite3"
        return
    server: PostgreSQL = request.getfixturevalue("postgresql_server")
    with server.fresh_database() as url:
        yield url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database.opened(database_url)
    yield database
    database.close()


@pytest.fixture
def world(database: Database) -> World:
    """Return the database with a store in memory and a manual clock; a module may override it."""
    return World(database)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was left out."""
    skipped = [report for report in terminalreporter.getreports("skipped") if NOT_INSTALLED in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests on PostgreSQL skipped: {NOT_INSTALLED}")
