"""A server has a data directory of its own, and a restart finds what it left."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.cli.server.data_folder import left_data_dir, own_data_dir
from serve_app.cli.server.locks import try_lock
from serve_app.cli.server.ports import Address
from serve_app.config import HeadwayConfig
from testkit.limits import LIMIT_S

FIRST, SECOND, THIRD = (Address("127.0.0.1", port) for port in (8000, 8001, 8002))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default data directory, which does not exist yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".headway"


def started(stack: contextlib.ExitStack, address: Address, **fields: object) -> Path:
    """Return the data directory of a server that starts, and runs as long as the stack."""
    config = stack.enter_context(own_data_dir(HeadwayConfig(**fields), address))
    return Path(config.data_dir)


def test_a_server_alone_keeps_the_default_directory_at_any_address(home: Path) -> None:
    for address in (FIRST, SECOND, THIRD):
        with contextlib.ExitStack() as stack:
            assert started(stack, address) == home
    assert [path.name for path in home.iterdir()] == ["lock"]
    assert home.stat().st_mode & 0o777 == 0o700


def test_servers_beside_it_have_directories_of_their_own(home: Path) -> None:
    with contextlib.ExitStack() as stack:
        assert started(stack, FIRST) == home
        own = started(stack, SECOND)
        assert own == home / "servers" / "127.0.0.1-8001"
        assert started(stack, Address("::", 8001)) == home / "servers" / "__-8001"
    for folder in (own, own.parent):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_restart_finds_what_it_left_in_any_order(home: Path) -> None:
    with contextlib.ExitStack() as stack:
        left = {address: started(stack, address) for address in (FIRST, SECOND, THIRD)}
    for order in ((THIRD, SECOND, FIRST), (SECOND, FIRST, THIRD)):
        with contextlib.ExitStack() as stack:
            assert {address: started(stack, address) for address in order} == left


def test_a_server_that_ends_frees_its_directory(home: Path) -> None:
    with contextlib.ExitStack() as running:
        with contextlib.ExitStack() as ended:
            assert started(ended, FIRST) == home
            started(running, SECOND)
        assert started(running, THIRD) == home


@pytest.mark.parametrize("field", ["data_dir", "database_url"])
def test_a_directory_or_database_that_is_given_is_shared(home: Path, field: str) -> None:
    given = {"data_dir": str(home), "database_url": f"sqlite:///{home}/jobs.sqlite3"}[field]
    with contextlib.ExitStack() as stack:
        started(stack, FIRST)
        assert started(stack, SECOND, **{field: given}) == home
        assert started(stack, THIRD, **{field: given}) == home


def test_the_start_names_a_directory_that_is_not_the_default_one(home: Path) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(own_data_dir(HeadwayConfig(), FIRST))
        second = stack.enter_context(own_data_dir(HeadwayConfig(), SECOND))
    assert left_data_dir(first) is None
    assert left_data_dir(second) == home


def test_a_program_does_not_inherit_a_lock(tmp_path: Path) -> None:
    lock = try_lock(tmp_path / "lock")
    assert lock is not None and try_lock(tmp_path / "lock") is None
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lock.close()
    again = try_lock(tmp_path / "lock")
    assert again is not None
    again.close()
    program.communicate(timeout=LIMIT_S)
