"""Figures of one method's run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.baselines.engine_batches import StepFigures, TokenTimes
from bench.baselines.trace import TraceRequest
from bench.load.percentiles import percentile


class WrongAnswers(Exception):
    """Lost request, or answer with the wrong number of tokens."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one method on the trace."""

    method: str
    tokens_per_s: float
    """Requested output tokens / time from the start of the trace to the last token."""
    padding_efficiency: float | None
    """Needed tokens / computed tokens."""
    utilization: float | None
    """Mean share of the slots that computed in a step, needed or not."""
    ttft_p50_s: float
    ttft_p99_s: float
    latency_p50_s: float
    latency_p99_s: float
    urgent_latency_p50_s: float | None
    """Median latency of the urgent requests alone."""


def outcome_of(method: str, trace: Sequence[TraceRequest], answers: TokenTimes, steps: StepFigures | None) -> Outcome:
    """Check that every request was answered in full, once; return the figures, without `steps` not all of them.

    Raises:
        WrongAnswers: a request was not.
    """
    wrong = [r.number for r in trace if len(answers.get(r.number, ())) != r.num_output_tokens]
    if wrong or len(answers) != len(trace):
        raise WrongAnswers(f"{method}: requests {wrong[:5]} of {len(trace)}, {len(answers)} answers")
    num_output = sum(request.num_output_tokens for request in trace)
    num_needed = sum(request.num_tokens - 1 for request in trace)  # the last token is never computed
    efficiency = num_needed / steps.num_tokens if steps else None
    latencies_s = [answers[request.number][-1] - request.arrival_s for request in trace]
    ttfts_s = [answers[request.number][0] - request.arrival_s for request in trace]
    urgent_s = [latency for request, latency in zip(trace, latencies_s, strict=True) if request.band == 0]
    return Outcome(
        method=method,
        tokens_per_s=num_output / max(times[-1] for times in answers.values()),
        padding_efficiency=efficiency,
        utilization=steps.mean_utilization if steps else None,
        ttft_p50_s=percentile(ttfts_s, 50),
        ttft_p99_s=percentile(ttfts_s, 99),
        latency_p50_s=percentile(latencies_s, 50),
        latency_p99_s=percentile(latencies_s, 99),
        urgent_latency_p50_s=percentile(urgent_s, 50) if urgent_s else None,
    )
