"""Work in a session of its own, which a signal to the terminal's process group does not reach."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

_POLL_PERIOD_S = 0.1
_TOGETHER_S = 0.5
"""Time within which signals count as one, seconds: `make` passes on a signal that the whole group has received."""


def run_in_own_session(work: Callable[[], int]) -> int:
    """Run `work` in a child process, pass SIGTERM and SIGINT on to it, and return its exit status.

    The terminal sends Ctrl-C to all processes of a group, and `kill` may do so too. The processes that `work` starts
    are in another group. Only `work` gets the signal, so it can let them finish in order.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child_id = os.fork()
    if child_id == 0:
        _run_as_child(work)

    last_s = -math.inf

    def pass_on(signum: int, frame: FrameType | None = None) -> None:
        nonlocal last_s
        if time.monotonic() - last_s < _TOGETHER_S:
            return
        last_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child_id, signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, pass_on)
    has_passed_interrupt = False
    while True:
        ended_id, status = os.waitpid(child_id, os.WNOHANG)
        if ended_id == child_id:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if not has_passed_interrupt and _has_make_been_interrupted():
            has_passed_interrupt = True
            pass_on(signal.SIGINT)
        time.sleep(_POLL_PERIOD_S)


def _run_as_child(work: Callable[[], int]) -> None:
    """Run `work` and end this process; nothing of the parent's stack runs in it."""
    status = 1
    try:
        os.setsid()
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _has_make_been_interrupted() -> bool:
    """Return True if the parent process is a `make` that received a SIGINT which this process did not.

    Such a `make` passes on SIGTERM only. It waits for its child inside its signal handler, where SIGINT is blocked.
    """
    parent = Path(f"/proc/{os.getppid()}/status")
    if not parent.exists():
        return False
    fields = dict(line.split(":\t", 1) for line in parent.read_text().splitlines())
    return fields["Name"] == "make" and bool(int(fields["SigBlk"], 16) & 1 << (signal.SIGINT - 1))
