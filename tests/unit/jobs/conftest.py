"""Databases: each test that asks for one runs on SQLite and on a real PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
    """The URL of a database of the test's own, with nothing in it."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/jobs.sqlite3"
        return
    server: PostgreSQL = request.getfixturevalue("postgresql_server")
    with server.fresh_database() as url:
        yield url


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was left out."""
    skipped = [report for report in terminalreporter.getreports("skipped") if NOT_INSTALLED in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests on PostgreSQL skipped: {NOT_INSTALLED}")
