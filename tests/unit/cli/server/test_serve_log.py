"""The log file of `headway serve`: private, few, and the place of all that other processes print."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from serve_app.cli.server.serve_log import Tail, new_log_file
from testkit.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[4]


def test_the_log_is_private_and_old_ones_go(tmp_path):
    folder = tmp_path / "logs"
    paths = []
    for number in range(12):
        with new_log_file(folder, 8000 + number) as path:
            paths.append(path)
    assert len(list(folder.iterdir())) == 10
    assert not paths[0].exists() and paths[-1].exists()
    assert paths[-1].stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_log_of_a_running_server_stays_as_long_as_it_runs(tmp_path):
    with new_log_file(tmp_path, 8000) as oldest:
        for number in range(1, 12):
            with new_log_file(tmp_path, 8000 + number):
                assert oldest.exists()
    with new_log_file(tmp_path, 8012):
        assert not oldest.exists()


def test_a_tail_gives_each_line_once_and_whole(tmp_path):
    path = tmp_path / "log"
    path.write_text("one\ntw")
    tail = Tail(path)
    assert tail.new_lines() == ["one"]
    with path.open("a") as file:
        file.write("o\nthr")
    assert tail.new_lines() == ["two"]
    assert tail.new_lines() == []


def test_what_children_print_goes_to_the_log_alone(tmp_path):
    path = tmp_path / "log"
    code = (
        "import os, subprocess, sys, pathlib\n"
        "from serve_app.cli.server.serve_log import output_to\n"
        f"with output_to(pathlib.Path({str(path)!r})) as terminal:\n"
        "    subprocess.run(['sh', '-c', 'echo child; echo problem >&2'], check=True)\n"
        "    print('ours')\n"
        "    print('for the reader', file=terminal.out)\n"
        "print('afterwards')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.stderr) == ("for the reader\nafterwards\n", "")
    assert sorted(path.read_text().split()) == ["child", "ours", "problem"]


def test_a_terminal_shows_the_steps_of_a_start_alone(tmp_path):
    path = tmp_path / "log"
    code = (
        "import pathlib\n"
        "from serve_app.cli.server.serve_log import output_to\n"
        "from serve_app.cli.server.start_report import Steps\n"
        f"with output_to(pathlib.Path({str(path)!r})) as terminal:\n"
        "    steps = Steps(terminal.out)\n"
        "    steps.begin('first step')\n"
        "    print('noise')\n"
        "    steps.begin('second step')\n"
        "    steps.close()\n"
    )
    reader, writer = pty.openpty()
    with os.fdopen(reader, "rb", buffering=0) as shown:
        command = [sys.executable, "-c", code]
        environment = os.environ | {"TERM": "xterm"}
        subprocess.run(command, cwd=ROOT, stdout=writer, stderr=writer, env=environment, timeout=LIMIT_S, check=True)
        os.close(writer)
        output = shown.read(2**16).decode()
    assert "first step" in output and "second step" in output and "noise" not in output
    assert path.read_text() == "noise\n"
