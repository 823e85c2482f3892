"""Work in a session of its own: a signal to the group reaches it once, and its exit status is the command's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = """
import signal, subprocess, sys, time
from serve_app.cli.server.own_session import run_in_own_session

def work():
    helper = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"])
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        signal.signal(signal.SIGINT, lambda *_: sys.exit())
        time.sleep(1000)
    except SystemExit:
        time.sleep(0.2)
        print("helper", "lives" if helper.poll() is None else "is dead", flush=True)
        helper.kill()
        return 7

sys.exit(run_in_own_session(work))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_spares_what_the_work_has_started(signum):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.killpg(process.pid, signum)
    assert process.stdout.readline() == "helper lives\n"
    assert process.wait(LIMIT_S) == 7
    process.stdout.close()


def test_work_that_raises_ends_with_1():
    code = (
        "from serve_app.cli.server.own_session import run_in_own_session as run; raise SystemExit(run(lambda: 1 / 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
