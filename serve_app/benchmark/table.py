"""Tables of a benchmark's figures, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table

from serve_app.benchmark.figures import Figures, Spread
from serve_app.benchmark.levels import LevelRun

LATE_AFTER_MS = 10.0
_BUSY_SHARE = 0.9
_MANY_TOKENS_PER_CHUNK = 1.05


def tables(runs: Sequence[LevelRun], figures: Sequence[Figures]) -> Group:
    """Return the table of one level, or one line for each of several."""
    if len(runs) == 1:
        return Group(*_one_level(figures[0]))
    failures = _failures(runs, figures)
    return Group(_levels(runs, figures), *([failures] if failures.row_count else []))


def warnings(run: LevelRun, figures: Figures) -> Iterator[str]:
    """Yield what makes the figures of a level doubtful, in sentences."""
    late = figures.lateness_ms
    if late is not None and late.p99 > LATE_AFTER_MS:
        yield (
            f"{run.name}: requests left late, p99 {late.p99:.1f} ms and at most {late.max:.1f} ms after their times: "
            "this machine is too busy for the load"
        )
    if run.cpu_share > _BUSY_SHARE:
        yield f"{run.name}: the load generator used {run.cpu_share:.0%} of a processor and may be the bottleneck"
    if figures.num_ok and all(row.usage_output_tokens is None for row in run.rows):
        yield f"{run.name}: the server sends no usage: each chunk counts as one token"


def _one_level(figures: Figures) -> Iterator[Table]:
    counts = _table("", "")
    counts.show_header = False
    for name, value in _counts(figures):
        counts.add_row(name, value)
    yield counts
    times = _table("milliseconds", "mean", "p50", "p90", "p99", "max")
    names = {"time to first token": figures.ttft_ms, "between two tokens (ITL)": figures.itl_ms}
    if (figures.tokens_per_chunk or 1) > _MANY_TOKENS_PER_CHUNK:
        names["between two chunks"] = figures.chunk_gap_ms
    names |= {"per output token (TPOT)": figures.tpot_ms, "whole request": figures.total_ms}
    for name, spread in names.items():
        times.add_row(name, *_cells(spread))
    yield times


def _counts(figures: Figures) -> Iterator[tuple[str, str]]:
    cut_off = f", {figures.num_cut_off:,} cut off" if figures.num_cut_off else ""
    yield "requests", f"{figures.num_requests:,} in {figures.duration_s:.1f} s, {figures.num_failed:,} failed{cut_off}"
    for reason, count in sorted(figures.errors.items(), key=lambda item: -item[1]):
        yield "  " + reason, f"{count:,}"
    yield "requests/s", f"{figures.requests_per_s:,.2f}"
    yield "tokens/s in, out", f"{figures.prompt_tokens_per_s:,.1f}, {figures.output_tokens_per_s:,.1f}"
    yield "tokens in, out", f"{figures.prompt_tokens:,}, {figures.output_tokens:,}"
    if (figures.tokens_per_chunk or 1) > _MANY_TOKENS_PER_CHUNK:
        yield "tokens per chunk", f"{figures.tokens_per_chunk:.2f}"
    yield (
        "goodput",
        (
            f"{figures.num_good:,} requests within the targets, {figures.goodput_requests_per_s:,.2f} a second, "
            f"{figures.goodput_tokens_per_s:,.1f} tokens/s"
        ),
    )


def _levels(runs: Sequence[LevelRun], figures: Sequence[Figures]) -> Table:
    table = _table(
        "load", "requests", "failed", "tokens/s in", "out",
        "TTFT p50", "p99 ms", "ITL p50", "p99 ms", "TPOT p50", "p99 ms", "total p50", "p99 ms", "goodput tokens/s",
    )  # fmt: skip
    for run, level in zip(runs, figures, strict=True):
        pairs = (_pair(spread) for spread in (level.ttft_ms, level.itl_ms, level.tpot_ms, level.total_ms))
        table.add_row(
            run.name,
            f"{level.num_requests:,}",
            f"{level.num_failed:,}",
            f"{level.prompt_tokens_per_s:,.1f}",
            f"{level.output_tokens_per_s:,.1f}",
            *(cell for pair in pairs for cell in pair),
            f"{level.goodput_tokens_per_s:,.1f}",
        )
    return table


def _failures(runs: Sequence[LevelRun], figures: Sequence[Figures]) -> Table:
    table = _table("load", "failed", "reason")
    for run, level in zip(runs, figures, strict=True):
        for reason, count in level.errors.items():
            table.add_row(run.name, f"{count:,}", reason)
    return table


def _table(first: str, *headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right" if first else "left", no_wrap=bool(first))
    return table


def _cells(spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return ("-",) * 5
    return tuple(f"{value:,.1f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max))


def _pair(spread: Spread | None) -> tuple[str, str]:
    return ("-", "-") if spread is None else (f"{spread.p50:,.1f}", f"{spread.p99:,.1f}")
