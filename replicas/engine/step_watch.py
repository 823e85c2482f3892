"""Watch over the steps of an engine: one that does not end is told from a slow one."""

from __future__ import annotations

import math
from dataclasses import dataclass

_SLOW_STEP_FACTOR = 4.0
_NUM_FIRST_STEPS = 16


@dataclass(slots=True)
class StepWatch:
    """Watch over the engine's present step: a step that does not end is hung, a slow one is not.

    A step is hung after `max_step_s`, but never before 4 times the longest known step. The first 16 steps may compile
    kernels and have at least `first_step_s`. A failed step that is repeated in parts may take `max_step_s` for each.
    The engine's thread writes, any thread may read; one thread asks whether the step is hung.
    """

    max_step_s: float
    longest_step_s: float = 0.0
    """Longest step that has ended; at first the largest step of the warm-up."""
    first_step_s: float = 0.0
    """Least limit of the first steps, seconds; 0: nothing is compiled in them."""
    num_steps: int = 0
    started_s: float | None = None
    """Start of the present step; None: no step runs."""
    num_repeats: int = 0
    """Number of repeated parts when a step ended last, or when `hung_for_s` was called last."""
    repeated_s: float = -math.inf
    """Time at which `hung_for_s` last saw that a part had been repeated."""

    def begin(self, now: float) -> None:
        """Note the start of a step."""
        self.started_s = now

    def end(self, now: float, num_repeats: int) -> None:
        """Note the end of a step, and the number of parts of steps that have been repeated so far."""
        if self.started_s is not None and num_repeats == self.num_repeats:
            self.longest_step_s = max(self.longest_step_s, now - self.started_s)
        self.started_s, self.num_repeats = None, num_repeats
        self.num_steps += 1

    def hung_for_s(self, now: float, num_repeats: int) -> float | None:
        """Return the age of the present step, or of its last known repeated part, if it is hung, else None."""
        started_s = self.started_s
        if started_s is None:
            return None
        if num_repeats != self.num_repeats:
            self.num_repeats, self.repeated_s = num_repeats, now
        started_s = max(started_s, self.repeated_s)
        limit_s = max(self.max_step_s, _SLOW_STEP_FACTOR * self.longest_step_s)
        if self.num_steps < _NUM_FIRST_STEPS:
            limit_s = max(limit_s, self.first_step_s)
        return None if now - started_s <= limit_s else now - started_s
