"""Linux scheduling policy of processes that share the processors with an engine.

Linux lets a process that wakes up preempt one that computes. An engine's threads wait for each other many times in a
step, so a delay of one thread delays all of them. Processes under SCHED_BATCH preempt no other process when they wake:
they get the same share of the processors, after at most one time slice. Child processes inherit the policy. Going back
to the normal policy needs no privileges.
"""

from __future__ import annotations

import os
from contextlib import suppress


def use_batch_scheduling() -> None:
    """Set SCHED_BATCH for the calling thread, and for the threads and processes that it starts from now on."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(PermissionError):  # A sandbox may forbid it. The policy then stays the normal one.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def use_normal_scheduling() -> None:
    """Undo `use_batch_scheduling` for the calling thread, and for the threads and processes that it starts later."""
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_BATCH:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
