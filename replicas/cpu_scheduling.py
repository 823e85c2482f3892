"""Who goes first on processors that an engine shares with what carries its tokens.

Linux lets a process that wakes up interrupt one that computes. An engine's threads wait for each other many times in
a step, so that all of them lose what one of them loses to an event loop that had little to do and no hurry. Processes
under SCHED_BATCH interrupt nobody when they wake: they get the same share, after at most one time slice. Children
inherit it, and going back to the ordinary policy needs no rights.
"""

from __future__ import annotations

import os
from contextlib import suppress


def use_batch_scheduling() -> None:
    """The calling thread, and what it starts from now on, wait for the end of others' time slices."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):  # of a sandbox: they do interrupt then
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def use_normal_scheduling() -> None:
    """Take `use_batch_scheduling` back for the calling thread and what it starts from now on."""
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_BATCH:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
