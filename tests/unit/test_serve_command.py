"""`headway serve` knows which addresses others reach, and says what that means."""

from __future__ import annotations

import socket

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
    """What the command prints before it finds that its port is taken."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        result = CliRunner().invoke(app, ["--port", str(taken.getsockname()[1]), *arguments])
    assert "cannot listen on" in result.stderr
    return "".join(line for line in result.stderr.splitlines() if line.startswith("warning:"))


def test_an_open_port_without_keys_is_warned_of_once(tmp_path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("{}")
    assert "no api_key_file is set" in warning_of("--host", "0.0.0.0")
    assert warning_of("--host", "0.0.0.0", f"api_key_file={keys}") == ""
    assert warning_of("--host", "127.0.0.1") == ""
