"""A private, empty PostgreSQL server on a Unix socket, for tests."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from testkit.limits import LIMIT_S, START_LIMIT_S

NOT_INSTALLED = "there is no PostgreSQL server on this machine (initdb and postgres)"

_ROLE = "headway"
_POLL_PERIOD_S = 0.05
_DISCONNECT_OTHERS = """
SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
_SETTINGS = ("listen_addresses=", "fsync=off", "max_connections=100", "shared_buffers=32MB")


class PostgreSQL:
    """Running server, which listens on a socket in a folder."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder = folder
        self.pid = pid
        self._num_databases = 0
        self._unused: list[str] = []

    def url(self, database: str) -> str:
        """Return the SQLAlchemy URL of a database."""
        return f"postgresql+psycopg://{_ROLE}@/{database}?host={self._folder}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        return psycopg.connect(host=str(self._folder), user=_ROLE, dbname=database, autocommit=True)

    @contextmanager
    def fresh_database(self) -> Iterator[str]:
        """Yield the URL of an empty database; empty it afterwards, even with connections open, and give it out again.

        The server empties a database in a third of the time that it takes to make one.
        """
        if not self._unused:
            self._unused.append(f"test_{self._num_databases}")
            self._num_databases += 1
            with self.connect() as connection:
                connection.execute(f"CREATE DATABASE {self._unused[-1]}")
        name = self._unused.pop()
        try:
            yield self.url(name)
        finally:
            with self.connect(name) as connection:
                connection.execute(_DISCONNECT_OTHERS)
                connection.execute("DROP SCHEMA public CASCADE")
                connection.execute("CREATE SCHEMA public")
            self._unused.append(name)


def find_binaries() -> Path | None:
    """Return the folder of `initdb` and `postgres`, of the newest version; None if not installed."""
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    folders.sort(key=lambda folder: [int(part) for part in folder.parent.name.split(".")])
    if (on_path := shutil.which("initdb")) is not None:
        folders.append(Path(on_path).resolve().parent)
    return next((folder for folder in reversed(folders) if (folder / "postgres").exists()), None)


@contextmanager
def postgresql(binaries: Path) -> Iterator[PostgreSQL]:
    """Run a server within the context; delete its folder afterwards."""
    account = _account()
    folder = Path(tempfile.mkdtemp(prefix="hw-pg-"))
    try:
        os.chown(folder, account.get("user", -1), account.get("group", -1))
        data = folder / "data"
        initdb = [str(binaries / "initdb"), "-D", str(data), "-U", _ROLE, "--auth=trust", "--no-sync"]
        subprocess.run(
            [*initdb, "--locale=C", "--encoding=UTF8"], cwd=folder, check=True, capture_output=True, **account
        )
        options = [part for setting in _SETTINGS for part in ("-c", setting)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(binaries / "postgres"), "-D", str(data), "-k", str(folder), *options],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **account,
            )  # fmt: skip
        try:
            server = PostgreSQL(folder, process.pid)
            _wait_until_ready(server, process, folder / "log")
            yield server
        finally:
            process.send_signal(signal.SIGINT)  # fast shutdown: does not wait for clients
            try:
                process.wait(LIMIT_S)
            finally:
                process.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _account() -> dict[str, Any]:
    """Return subprocess arguments for the account to run as: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("postgres") or names["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _wait_until_ready(server: PostgreSQL, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while True:
        try:
            server.connect().close()
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text(errors='replace')}") from None
            time.sleep(_POLL_PERIOD_S)
        else:
            return
