"""Figures of a run, per band and in total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.load.spec import LoadSpec, Targets
from bench.record import percentiles
from serve_app.benchmark.rows import Outcome, Row

BAND_NAMES = {0: "interactive", 1: "standard", 2: "batch"}
VOID_EXIT_CODE = 3
"""Exit code of a run in which too many sends were late."""
PERCENTS = (50, 90, 99)
_NAMES = (*(f"p{percent}" for percent in PERCENTS), "max")


def summarize(spec: LoadSpec, rows: Sequence[Row], duration_s: float) -> dict[str, Any]:
    """Return the whole result; `is_void` means that too many sends were late."""
    late = [row for row in rows if row.lateness_s > spec.late_after_s or row.sent_s is None]
    late_share = len(late) / len(rows) if rows else 0.0
    bands = sorted({row.priority for row in rows})
    return {
        "is_void": late_share > spec.max_late_share,
        "late": {
            "after_ms": spec.late_after_s * 1e3,
            "count": len(late),
            "share": late_share,
            "max_share": spec.max_late_share,
            "worst_ms": max((row.lateness_s for row in rows), default=0.0) * 1e3,
        },
        "duration_s": duration_s,
        "all": summarize_rows(spec, rows, duration_s),
        "bands": {
            BAND_NAMES[band]: summarize_rows(spec, [row for row in rows if row.priority == band], duration_s)
            for band in bands
        },
    }


def summarize_rows(spec: LoadSpec, rows: Sequence[Row], duration_s: float) -> dict[str, Any]:
    """Return counts, latencies and rates of some rows.

    TTFT and end-to-end times count from the scheduled moment. The inter-token time spreads each gap between two chunks
    over the tokens of the second chunk. Rates divide by `duration_s`.
    """
    outcomes = Counter(row.outcome.value for row in rows)
    whole = [row for row in rows if row.outcome is Outcome.OK]
    targets = {row.priority: spec.targets.get(row.priority, Targets()) for row in whole}
    good = [row for row in whole if targets[row.priority].are_met(row.ttft_s, row.tpot_s)]
    return {
        "requests": len(rows),
        "outcomes": {outcome.value: outcomes[outcome.value] for outcome in Outcome if outcomes[outcome.value]},
        "status": dict(Counter(str(row.status) for row in rows)),
        "error_codes": dict(Counter(row.error_code for row in rows if row.error_code is not None)),
        "attempts": sum(row.num_attempts for row in rows),
        "unanswered": sum(row.ttft_s is None for row in rows),
        "ttft_ms": _percentiles([row.ttft_s for row in rows if row.ttft_s is not None]),
        "inter_token_ms": _percentiles([gap for row in rows for gap in row.inter_token_s]),
        "tpot_ms": _percentiles([row.tpot_s for row in rows if row.tpot_s is not None]),
        "e2e_ms": _percentiles([row.end_s - row.scheduled_s for row in whole if row.end_s is not None]),
        "output_tokens": sum(row.num_tokens for row in rows),
        "prompt_tokens": sum(row.num_prompt_tokens for row in rows),
        "tokens_per_s": sum(row.num_tokens for row in rows) / duration_s,
        "good_requests": len(good),
        "goodput_tokens_per_s": sum(row.num_tokens for row in good) / duration_s,
    }


def table(summary: dict[str, Any]) -> str:
    """Return a short table for the terminal."""
    late = summary["late"]
    lines = [
        f"{summary['duration_s']:.1f} s; {late['count']} sends ({100 * late['share']:.2f} %) more than "
        f"{late['after_ms']:.0f} ms late, the worst {late['worst_ms']:.1f} ms{'  VOID' if summary['is_void'] else ''}",
        "band         requests  ok  TTFT p50/p99 ms  inter-token p50/p99 ms  tokens/s  goodput/s  other outcomes",
    ]
    for name, band in [*summary["bands"].items(), ("all", summary["all"])]:
        ttft, gap = band["ttft_ms"] or {}, band["inter_token_ms"] or {}
        others = {key: count for key, count in band["outcomes"].items() if key != "ok"}
        lines.append(
            f"{name:12s} {band['requests']:6d} {band['outcomes'].get('ok', 0):5d}"
            f"  {ttft.get('p50', 0):7.1f} {ttft.get('p99', 0):8.1f}  {gap.get('p50', 0):9.2f} {gap.get('p99', 0):9.2f}"
            f"  {band['tokens_per_s']:9.1f} {band['goodput_tokens_per_s']:9.1f}  {others or ''}"
        )
    return "\n".join(lines)


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return percentiles in milliseconds; None without values."""
    if not seconds:
        return None
    values_s = percentiles(seconds, (*PERCENTS, 100))
    return {name: value_s * 1e3 for name, value_s in zip(_NAMES, values_s, strict=True)}
