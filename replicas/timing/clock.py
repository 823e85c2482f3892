"""Clock that is passed as an argument, so that tests can set the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Clock in seconds: monotonic time for durations, unix time for values that cross processes."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time

    def from_unix(self, unix_s: float) -> float:
        """Convert a unix time to monotonic time."""
        return self.monotonic() + (unix_s - self.unix())
