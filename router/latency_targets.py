"""How soon each band's requests should be answered, and which were."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Slo(Enum):
    """What a request can be in time for."""

    TTFT = "ttft"
    TPOT = "tpot"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """How soon a band's requests should be answered; None: whenever."""

    ttft_s: float | None = None
    """From the request's arrival at the router to its first output, seconds."""
    tpot_s: float | None = None
    """(last - first output) / (output tokens - 1), seconds."""

    def attained(self, ttft_s: float | None, duration_s: float, num_tokens: int) -> list[Slo]:
        """What a request that ended well was in time for; without a target, or without output to wait for, it was."""
        tpot_s = None if ttft_s is None or num_tokens < 2 else (duration_s - ttft_s) / (num_tokens - 1)
        met = [
            slo
            for slo, seconds, target_s in ((Slo.TTFT, ttft_s, self.ttft_s), (Slo.TPOT, tpot_s, self.tpot_s))
            if target_s is None or seconds is None or seconds <= target_s
        ]
        return [*met, Slo.ALL] if len(met) == 2 else met
