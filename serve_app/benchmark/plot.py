"""Plots of a benchmark with matplotlib: one level over time, or several levels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from serve_app.benchmark.figures import Figures
from serve_app.benchmark.levels import LevelRun
from serve_app.benchmark.rows import Row, Targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUM_WINDOWS = 60
_SIZE_INCHES = (11.0, 7.0)
_HEADROOM = 1.1


@dataclass(frozen=True, slots=True)
class Window:
    """Figures of a part of the time."""

    start_s: float
    ttft_ms: tuple[float, float]
    """p50 and p99 of the first tokens that came in it; not a number without any."""
    itl_ms: tuple[float, float]
    tokens_per_s: float
    goodput_tokens_per_s: float
    """Tokens in it of the responses that met the targets."""


def windows(rows: Sequence[Row], targets: Targets) -> list[Window]:
    """Return the figures over time, in windows of equal length."""
    end_s = max((row.chunk_s[-1] for row in rows if row.chunk_s), default=0.0)
    width_s = max(end_s / _NUM_WINDOWS, 1e-3)
    num_windows = max(1, math.ceil(end_s / width_s))
    first: list[list[float]] = [[] for _ in range(num_windows)]
    gaps: list[list[float]] = [[] for _ in range(num_windows)]
    tokens, good = [0.0] * num_windows, [0.0] * num_windows
    for row in rows:
        is_good = targets.are_met(row)
        for at_s, count, gap_s in _chunks(row):
            index = min(int(at_s / width_s), num_windows - 1)
            tokens[index] += count
            good[index] += count * is_good
            (first if gap_s is None else gaps)[index].append(row.ttft_s or 0.0 if gap_s is None else gap_s / count)
    return [
        Window(number * width_s, _percentiles_ms(ttft), _percentiles_ms(itl), total / width_s, met / width_s)
        for number, (ttft, itl, total, met) in enumerate(zip(first, gaps, tokens, good, strict=True))
    ]


def plot_over_time(path: Path, rows: Sequence[Row], targets: Targets, title: str) -> None:
    """Draw TTFT, ITL, throughput and goodput over the time of one level."""
    spans = windows(rows, targets)
    times = [window.start_s for window in spans]
    _draw(path, title, "seconds", times, [
        [window.ttft_ms for window in spans],
        [window.itl_ms for window in spans],
        [(window.tokens_per_s,) for window in spans],
        [(window.goodput_tokens_per_s,) for window in spans],
    ])  # fmt: skip


def plot_over_levels(path: Path, runs: Sequence[LevelRun], figures: Sequence[Figures], title: str) -> None:
    """Draw TTFT, ITL, throughput and goodput over the levels."""
    nothing = (math.nan, math.nan)
    _draw(path, title, "load", [run.name for run in runs], [
        [nothing if level.ttft_ms is None else (level.ttft_ms.p50, level.ttft_ms.p99) for level in figures],
        [nothing if level.itl_ms is None else (level.itl_ms.p50, level.itl_ms.p99) for level in figures],
        [(level.output_tokens_per_s,) for level in figures],
        [(level.goodput_tokens_per_s,) for level in figures],
    ])  # fmt: skip


_PANELS = (
    ("time to first token", "ms"),
    ("time between two tokens", "ms"),
    ("throughput", "output tokens/s"),
    ("goodput", "output tokens/s"),
)


def _draw(
    path: Path,
    title: str,
    axis: str,
    places: Sequence[float] | Sequence[str],
    panels: Sequence[Sequence[tuple[float, ...]]],
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    figure.suptitle(title)
    for axes, (name, unit), values in zip(figure.subplots(2, 2).flat, _PANELS, panels, strict=True):
        _draw_panel(axes, places, values)
        axes.set_title(name)
        axes.set_xlabel(axis)
        axes.set_ylabel(unit)
        highest = np.nanmax([0.0, *(value for point in values for value in point)])
        axes.set_ylim(0, highest * _HEADROOM or None)
        axes.grid(alpha=0.3)
    figure.savefig(path)


def _draw_panel(axes: Axes, places: Sequence[float] | Sequence[str], values: Sequence[tuple[float, ...]]) -> None:
    lines = list(zip(*values, strict=True))
    labels = ("p50", "p99") if len(lines) > 1 else (None,)
    for line, label in zip(lines, labels, strict=True):
        # Places without a value are left out, so that the line goes on behind them.
        is_known = ~np.isnan(line)
        axes.plot(np.array(places)[is_known], np.array(line)[is_known], marker=".", label=label)
    if len(lines) > 1:
        axes.legend()


def _chunks(row: Row) -> Iterator[tuple[float, float, float | None]]:
    """Yield time, tokens and the gap before each chunk; the first one has no gap."""
    gaps: list[float | None] = [None, *row.gaps_s]
    return zip(row.chunk_s, row.tokens_by_chunk, gaps[: len(row.chunk_s)], strict=True)


def _percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    if not seconds:
        return math.nan, math.nan
    p50, p99 = np.percentile(np.array(seconds) * 1e3, (50, 99))
    return float(p50), float(p99)
