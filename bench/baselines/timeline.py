"""Time of a run: real, or simulated by whoever moves the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_SHORTEST_SLEEP_S = 1e-4


@dataclass(frozen=True, slots=True)
class Timeline:
    """A clock that counts from some moment, and a way to let it go on."""

    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    def sleep_until(self, moment_s: float) -> None:
        """Return at `moment_s` or a little later; a little time passes in any case."""
        self.sleep(max(_SHORTEST_SLEEP_S, moment_s - self.clock()))
