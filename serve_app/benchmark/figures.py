"""Figures of one level of load: counts, latencies, rates and goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from serve_app.benchmark.rows import Outcome, Row, Targets

_NOT_FAILED = (Outcome.OK, Outcome.CUT_OFF)


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of a time, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Spread | None:
        """Return the distribution of the values that there are; None without any."""
        values = np.array([value for value in seconds if value is not None]) * 1e3
        if not len(values):
            return None
        return cls(float(values.mean()), *(float(value) for value in np.percentile(values, (50, 90, 99, 100))))


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a level; times in milliseconds, rates for the time from the first send to the last response's end.

    TTFT and total time count from the scheduled moment. The inter-token time spreads each gap between two chunks over
    the tokens of the second chunk. Latencies are those of all responses that began, goodput that of whole ones.
    """

    num_requests: int
    outcomes: dict[str, int]
    errors: dict[str, int]
    """Number of failed requests by status and code."""
    duration_s: float
    prompt_tokens: int
    """Prompt tokens of the responses, by the server's usage where it sends one."""
    output_tokens: int
    requests_per_s: float
    """Whole responses."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    total_ms: Spread | None
    chunk_gap_ms: Spread | None
    """Time between two chunks, whatever they hold."""
    tokens_per_chunk: float | None
    lateness_ms: Spread | None
    """Delay of sends after their scheduled times: the generator's own."""
    num_good: int
    """Responses that met the targets."""
    goodput_requests_per_s: float
    goodput_tokens_per_s: float

    @property
    def num_ok(self) -> int:
        """Number of whole responses."""
        return self.outcomes.get(Outcome.OK.value, 0)

    @property
    def num_failed(self) -> int:
        """Number of requests that ended without a whole response."""
        return self.num_requests - self.num_ok - self.num_cut_off

    @property
    def num_cut_off(self) -> int:
        """Number of requests that were open when the run ended."""
        return self.outcomes.get(Outcome.CUT_OFF.value, 0)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return asdict(self)


def figures_of(rows: Sequence[Row], targets: Targets) -> Figures:
    """Return the figures of the requests that were sent."""
    sent = [row for row in rows if row.sent_s is not None]
    whole = [row for row in sent if row.outcome is Outcome.OK]
    good = [row for row in whole if targets.are_met(row)]
    duration_s = _duration_s(sent)
    prompt_tokens = sum(_prompt_tokens(row) for row in sent if row.chunk_s)
    output_tokens = sum(row.num_tokens for row in sent)
    num_chunks = sum(len(row.chunk_s) for row in sent)
    return Figures(
        num_requests=len(sent),
        outcomes=dict(Counter(row.outcome.value for row in sent)),
        errors=dict(Counter(_reason(row) for row in sent if row.outcome not in _NOT_FAILED)),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(whole) / duration_s,
        prompt_tokens_per_s=prompt_tokens / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        ttft_ms=Spread.of(row.ttft_s for row in sent),
        itl_ms=Spread.of(gap for row in sent for gap in row.inter_token_s),
        tpot_ms=Spread.of(row.tpot_s for row in sent),
        total_ms=Spread.of(row.total_s for row in whole),
        chunk_gap_ms=Spread.of(gap for row in sent for gap in row.gaps_s),
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else None,
        lateness_ms=Spread.of(row.lateness_s for row in sent),
        num_good=len(good),
        goodput_requests_per_s=len(good) / duration_s,
        goodput_tokens_per_s=sum(row.num_tokens for row in good) / duration_s,
    )


def _prompt_tokens(row: Row) -> int:
    return row.num_prompt_tokens if row.usage_prompt_tokens is None else row.usage_prompt_tokens


def _duration_s(sent: Sequence[Row]) -> float:
    """Return the time from the first send to the last end; a small positive number without any."""
    starts = [row.sent_s for row in sent if row.sent_s is not None]
    ends = [row.end_s for row in sent if row.end_s is not None]
    return max(1e-9, max(ends, default=0.0) - min(starts, default=0.0))


def _reason(row: Row) -> str:
    """Return a short reason: status and code, or the outcome."""
    code = (row.error_code or "").removeprefix("client:")
    status = "" if row.status is None or row.status < 400 else str(row.status)
    return f"{status} {code}".strip() or str(row.outcome.value)
