"""Time of a run, real or simulated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_SHORTEST_SLEEP_S = 1e-4


@dataclass(frozen=True, slots=True)
class Timeline:
    """Clock with an arbitrary origin, and a sleep that advances it."""

    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    def sleep_until(self, moment_s: float) -> None:
        """Return at `moment_s` or a little later; at least a short time passes."""
        self.sleep(max(_SHORTEST_SLEEP_S, moment_s - self.clock()))
