"""Percentiles of many values, sorted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def percentiles(values: Iterable[float], percents: Sequence[float]) -> list[float]:
    """Return linearly interpolated percentiles of at least one value."""
    ordered = sorted(values)
    return [_at(ordered, (len(ordered) - 1) * percent / 100) for percent in percents]


def percentile(values: Iterable[float], percent: float) -> float:
    """Return one percentile of at least one value."""
    return percentiles(values, (percent,))[0]


def _at(ordered: Sequence[float], position: float) -> float:
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
