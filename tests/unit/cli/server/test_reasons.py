"""A start that fails says the reason and the remedy in one line."""

import errno
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import serve_app.cli.main as main
import serve_app.cli.server.disk_space as disk_space
from replicas.child_processes import Stalled
from serve_app.cli.server.application import ApplicationFailed
from serve_app.cli.server.server import _reason_of
from testkit.free_port import free_port


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/d/x"), "OSError: [Errno 28] No space", "make room on"),
        (ApplicationFailed("no start: Read-only file system: '/c'"), "no start: Read-only", "name a folder that"),
        (PermissionError(13, "Permission denied", "/d"), "PermissionError: [Errno 13]", "name a folder that"),
        (ModuleNotFoundError("No module named 'ray'"), "ModuleNotFoundError: No module", "install the libraries"),
        (OSError("libgomp.so.1: cannot open shared object file"), "OSError: libgomp", "install the system's"),
        (RuntimeError("Traceback\n  File x\nAddress already in use"), "RuntimeError: Address", "choose another port"),
    ],
)  # fmt: skip
def test_a_known_fault_has_a_remedy(error: Exception, reason: str, remedy: str) -> None:
    line = _reason_of(error)
    assert line.startswith(reason) and f"; {remedy}" in line and "\n" not in line


def test_another_fault_has_its_reason_alone() -> None:
    assert _reason_of(Stalled("Ray stood still")) == "Ray stood still"
    assert _reason_of(ValueError("first\n\nlast\n")) == "ValueError: last"


def test_a_start_on_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "_LEAST_FREE_BYTES", 2**60)
    words = ["serve", "headway-demo", "--port", str(free_port("127.0.0.1")), f"data_dir={tmp_path}"]
    refused = CliRunner().invoke(main.app, words)
    assert refused.exit_code == 2
    assert f"error: data_dir {tmp_path} has " in refused.stderr and "make room, or name another one" in refused.stderr


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "serve_app.cli.clients.top", None)
    refused = CliRunner().invoke(main.app, ["top"])
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: ") and "install the libraries again: `make venv`" in refused.stderr
