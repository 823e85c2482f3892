"""`headway keys`, and a server that notices the change of its key file."""

import json
import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from replicas.protocol import Band
from serve_app.cli.main import app
from serve_app.errors import HttpError
from serve_app.keys.authenticator import Authenticator, Principal
from serve_app.keys.key_file import KeyOwner, changed_owners, digest_of, read_owners
from testkit.router.simulated_time import FakeClock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def keys(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments, "--file", str(file)])


def created(file: Path, *arguments: str) -> str:
    result = keys(file, "create", "--tenant", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.removesuffix("\n")


def test_a_new_key_is_shown_once_and_its_hash_is_stored(file: Path) -> None:
    key = created(file, "acme", "--ceiling", "interactive", "--note", "night runs")
    assert key.startswith("hw-") and len(key) > 40 and key != created(file, "zeta")
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    owner = read_owners(file)[digest_of(key)]
    assert (owner.tenant, owner.ceiling, owner.note) == ("acme", Band.INTERACTIVE, "night runs")
    lines = keys(file, "list").stdout.splitlines()
    assert lines[1].split()[:3] == [digest_of(key)[:12], "acme", "interactive"]
    assert lines[2].split()[1:3] == ["zeta", "standard"]


def test_an_operators_key_is_one(file: Path) -> None:
    watching, other = created(file, "ops", "--operator"), created(file, "acme")
    owners = read_owners(file)
    assert owners[digest_of(watching)].is_operator and not owners[digest_of(other)].is_operator
    assert file.read_text().count("operator") == 1
    header, first, second = keys(file, "list").stdout.splitlines()
    assert (header.split()[3], first.split()[3], second.split()[3]) == ("OPERATOR", "yes", "-")


def test_a_key_is_revoked_by_itself_or_its_first_digits(file: Path) -> None:
    first, second, third = (created(file, tenant) for tenant in "abc")
    assert keys(file, "revoke", first).exit_code == 0
    assert keys(file, "revoke", digest_of(second)[:12].upper()).exit_code == 0
    assert set(read_owners(file)) == {digest_of(third)}


def test_a_missing_file_is_told_without_an_errno(file: Path) -> None:
    result = keys(file, "list")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {file}: No such file or directory; `headway keys create` makes")


def test_revoking_needs_exactly_one_key(file: Path) -> None:
    file.write_text("".join(f"{'abcd' + digit * 60}: {{tenant: t}}\n" for digit in "12"))
    for named, message in (("abcd", "2 keys begin with abcd"), ("abc", "no such key"), ("beef", "no such key")):
        result = keys(file, "revoke", named)
        assert (result.exit_code, message in result.stderr) == (1, True), result.output
    assert len(read_owners(file)) == 2


def test_mistakes_change_nothing(file: Path) -> None:
    assert keys(file, "list").exit_code == 1
    assert keys(file, "revoke", "beefbeef").exit_code == 1
    assert "there is no folder" in keys(file.parent / "no" / "keys.yaml", "create", "--tenant", "t").stderr
    assert not file.exists()
    assert keys(file, "create", "--tenant", " ").exit_code == 2
    assert keys(file, "create", "--tenant", "t", "--ceiling", "king").exit_code == 2
    file.write_text("not: a key file")
    result = keys(file, "create", "--tenant", "t")
    assert (result.exit_code, "not a SHA-256 digest" in result.stderr) == (1, True)
    assert file.read_text() == "not: a key file"


def test_a_file_keeps_its_mode_its_link_and_its_form(tmp_path: Path) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    target.write_text("{}")
    target.chmod(0o640)
    link.symlink_to(target)
    key = created(link, "acme")
    assert link.is_symlink() and stat.S_IMODE(target.stat().st_mode) == 0o640
    assert list(json.loads(target.read_text())) == [digest_of(key)]


def test_changes_at_the_same_time_are_all_kept(file: Path) -> None:
    def add(key: str) -> None:
        with changed_owners(file) as owners:
            owners[digest_of(key)] = KeyOwner("acme")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, "abcdefgh"))
    assert set(read_owners(file)) == set(map(digest_of, "abcdefgh"))


def test_a_failed_change_leaves_the_file(file: Path) -> None:
    created(file, "acme")
    before = file.read_bytes()

    def change() -> None:
        with changed_owners(file) as owners:
            owners.clear()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        change()
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir() if "lock" not in path.name] == ["keys.yaml"]


def is_accepted(authenticator: Authenticator, key: str) -> bool:
    try:
        authenticator.authenticate({"authorization": f"Bearer {key}"})
    except HttpError:
        return False
    return True


async def test_a_server_notices_new_and_revoked_keys(file: Path) -> None:
    first, clock = created(file, "one"), FakeClock()
    authenticator = Authenticator(file, clock)
    second = created(file, "two", "--ceiling", "batch")
    await authenticator.refresh()
    assert not is_accepted(authenticator, second)  # It has looked less than a second ago.
    clock.now += 1.0
    await authenticator.refresh()
    found = authenticator.authenticate({"authorization": f"Bearer {second}"})
    assert found == Principal("two", Band.BATCH, digest_of(second))
    for key in (first, second):
        keys(file, "revoke", key)
    clock.now += 1.0
    await authenticator.refresh()
    assert not is_accepted(authenticator, first) and not is_accepted(authenticator, second)


async def test_a_broken_key_file_leaves_the_former_keys(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, clock = created(file, "one"), FakeClock()
    authenticator = Authenticator(file, clock)
    for breakage in (lambda: file.write_text("- broken"), file.unlink):
        breakage()
        caplog.clear()
        for _ in range(3):
            clock.now += 1.0
            await authenticator.refresh()
        assert is_accepted(authenticator, key)
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1 and "the former API keys stay" in errors[0].getMessage()
