"""`headway serve` refuses mistakes at once, and warns of an address that others reach."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.serve import app, is_loopback


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("localhost", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("no-such-host.invalid", False),
    ],
)
def test_loopback_addresses_are_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def warning_of(*arguments: str) -> str:
    """Return the warnings that the command prints before it finds that its port is taken."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        result = CliRunner().invoke(app, ["--port", str(taken.getsockname()[1]), *arguments])
    assert "cannot listen on" in result.stderr
    return "".join(line for line in result.stderr.splitlines() if line.startswith("warning:"))


def test_an_open_port_without_keys_is_warned_of_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("{}")
    assert "no api_key_file is set" in warning_of("--host", "0.0.0.0")
    assert warning_of("--host", "0.0.0.0", f"api_key_file={keys}") == ""
    assert warning_of("--host", "127.0.0.1") == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["max_num_sequences=4"], "max_num_sequences: Extra inputs are not permitted"),
        (["max_num_seqs=lots"], "max_num_seqs: Input should be a valid integer"),
        (["max_num_seqs"], "'max_num_seqs' is not of the form key=value"),
        (["model=/no/such/model"], "there is no directory /no/such/model"),
    ],
)
def test_a_mistake_in_an_argument_is_refused(arguments: list[str], message: str) -> None:
    assert message in error_of(*arguments)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path} has no config.json" in error_of(f"model={tmp_path}")


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in error_of("--port", str(port))


def error_of(*arguments: str) -> str:
    """Return the text that the command prints when it refuses to start."""
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 2
    return result.stderr
