"""Latency targets (SLOs) of a band, and the check of a request against them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Slo(Enum):
    """Service level objective that a request can meet."""

    TTFT = "ttft"
    TPOT = "tpot"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Latency targets of one band; None: no target."""

    ttft_s: float | None = None
    """From the request's arrival at the router to its first output, seconds."""
    tpot_s: float | None = None
    """(last - first output) / (output tokens - 1), seconds."""

    def attained(self, ttft_s: float | None, duration_s: float, num_tokens: int) -> list[Slo]:
        """Return the targets that a request met which ended without an error.

        A target is met if it is None, or if the request's output is too short to measure it.
        """
        tpot_s = None if ttft_s is None or num_tokens < 2 else (duration_s - ttft_s) / (num_tokens - 1)
        met = [
            slo
            for slo, seconds, target_s in ((Slo.TTFT, ttft_s, self.ttft_s), (Slo.TPOT, tpot_s, self.tpot_s))
            if target_s is None or seconds is None or seconds <= target_s
        ]
        return [*met, Slo.ALL] if len(met) == 2 else met
