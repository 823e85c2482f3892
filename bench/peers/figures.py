"""Throughput and latency, computed from token arrival times."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from bench.load.percentiles import percentile
from bench.peers.engine import Events


def summary(events: Events) -> dict[str, Any]:
    """Return tokens/s and, in milliseconds, TTFT, inter-token gaps and each request's mean time per token."""
    moments = [times for times in events.token_s.values() if times]
    num_tokens = sum(len(times) for times in moments)
    duration_s = events.ended_s - events.started_s
    return {
        "out_tokens": num_tokens,
        "wall_s": round(duration_s, 2),
        "tok_s": round(num_tokens / duration_s, 2),
        "ttft_ms": _distribution_ms([times[0] - events.started_s for times in moments]),
        "itl_ms": _distribution_ms([b - a for times in moments for a, b in itertools.pairwise(times)]),
        "tpot_ms": _distribution_ms([(t[-1] - t[0]) / (len(t) - 1) for t in moments if len(t) > 1]),
    }


def decode_step_ms(events: Events) -> float | None:
    """Return the mean time of a step in which all sequences decode; None without such a step."""
    begins_s = max(times[0] for times in events.token_s.values())
    ends_s = min(times[-1] for times in events.token_s.values())
    first = next(iter(events.token_s.values()))
    inside = sorted(moment for moment in first if begins_s <= moment <= ends_s)
    return (inside[-1] - inside[0]) / (len(inside) - 1) * 1e3 if len(inside) > 1 else None


def _distribution_ms(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    milliseconds = [value * 1e3 for value in seconds]
    return {
        "mean": round(statistics.fmean(milliseconds), 2),
        "p50": round(percentile(milliseconds, 50), 2),
        "p99": round(percentile(milliseconds, 99), 2),
    }
