"""Table and plot of all engines' records."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.record import cell

Record = dict[str, Any]
_DECODE_BATCHES = (1, 4, 16, 32)


@dataclass(frozen=True, slots=True)
class EngineRecords:
    """Records that one engine's runner printed."""

    name: str
    records: tuple[Record, ...]

    def of(self, mode: str) -> list[Record]:
        """Return the records of one mode."""
        return [record for record in self.records if record["mode"] == mode]

    @property
    def tokens_per_s(self) -> float | None:
        """Median over the repetitions of the workload; None if it was not run."""
        return _median(record["tok_s"] for record in self.of("workload"))


def by_engine(records: Sequence[Record]) -> list[EngineRecords]:
    """Group records by their `note`, the fastest engine first."""
    names = dict.fromkeys(record["note"] for record in records)
    engines = [EngineRecords(name, tuple(r for r in records if r["note"] == name)) for name in names]
    return sorted(engines, key=lambda engine: -(engine.tokens_per_s or 0.0))


def table(engines: Sequence[EngineRecords], title: str) -> Table:
    """Return a table with one row per engine; figures are medians over repetitions."""
    made = Table(
        "engine", "tok/s", "of the first", "TTFT p50/p99 s", "ITL p50/p99 ms", "1-req tok/s", "1-req TTFT ms",
        "step ms B=" + "/".join(map(str, _DECODE_BATCHES)), "MiB", "other %", title=title,
    )  # fmt: skip
    best = engines[0].tokens_per_s if engines else None
    for engine in engines:
        made.add_row(engine.name, *_cells(engine, best))
    return made


def _cells(engine: EngineRecords, best: float | None) -> list[str]:
    mixed, single = engine.of("workload"), engine.of("single")
    steps = {record["batch"]: record["step_ms"] for record in engine.of("decode")}
    share = engine.tokens_per_s / best if engine.tokens_per_s and best else None
    return [
        _with_range([record["tok_s"] for record in mixed]),
        cell(share, ".0%"),
        _pair(mixed, "ttft_ms", 1e-3),
        _pair(mixed, "itl_ms", 1.0),
        cell(_median(record["decode_tok_s"] for record in single), ".1f"),
        cell(_median(record["ttft_ms"] for record in single), ".0f"),
        "/".join(cell(steps.get(batch), ".1f") for batch in _DECODE_BATCHES),
        cell(max(record["peak_rss_mb"] for record in engine.records), ".0f"),
        cell(_median(record["cpu_other"] for record in engine.records), ".0f"),
    ]


def _with_range(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.0f} ({min(values):.0f}..{max(values):.0f})"


def _pair(records: list[Record], field: str, scale: float) -> str:
    halves = (_median(r[field][name] * scale for r in records if r[field]) for name in ("p50", "p99"))
    return " / ".join(cell(half, ".2f" if scale < 1 else ".0f") for half in halves)


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def plot(engines: Sequence[EngineRecords], title: str, path: Path) -> None:
    """Draw bars of tokens per second into a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Optional dependency; everything else works without it.
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    measured = [engine for engine in reversed(engines) if engine.tokens_per_s is not None]
    figure, axes = pyplot.subplots(figsize=(9, 0.5 + 0.45 * len(measured)), layout="constrained")
    bars = axes.barh([engine.name for engine in measured], [engine.tokens_per_s or 0.0 for engine in measured])
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set(title=title, xlabel="output tokens / s")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
