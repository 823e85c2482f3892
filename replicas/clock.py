"""Time as an argument."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Monotonic time for durations, unix time for what crosses processes; both in seconds."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time

    def from_unix(self, unix_s: float) -> float:
        """The monotonic time of a moment given in unix time."""
        return self.monotonic() + (unix_s - self.unix())
