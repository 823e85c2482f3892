"""Figures of one method's run, and the upper limit of continuous batching's gain for the lengths of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from bench.baselines.serving_loop import StaticBatches
from bench.baselines.trace import TraceRequest
from bench.engine.token_times import StepFigures, TokenTimes
from bench.record import percentile

_NUM_GAPS = 24
_NUM_OUTPUT_TOKENS = 2 * _NUM_GAPS


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
    """Check that every request was answered in full, once; return the figures.

    Without `steps` the padding efficiency and the utilization are None.

    Raises:
        WrongAnswers: a request was lost, or its answer has the wrong number of tokens.
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


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Step times of one model on one machine, in seconds."""

    decode_s: dict[int, float]
    """Time by number of sequences, ascending. Linear between two entries, constant beyond the last."""
    prompt_token_s: float = 0.0

    def decode(self, num_seqs: int) -> float:
        """Return the time of a step with `num_seqs` sequences."""
        return float(np.interp(num_seqs, list(self.decode_s), list(self.decode_s.values())))


EQUAL_STEPS = StepCosts({1: 1.0})
"""Costs of a model whose step takes the same time for any number of sequences, and prompts none."""


def measure_costs(runner: StaticBatches, prompt: tuple[int, ...], max_num_seqs: int) -> StepCosts:
    """Measure decode steps of 1, 2, 4 ... `max_num_seqs` sequences that continue `prompt`."""
    powers = [2**power for power in range(max_num_seqs.bit_length())]
    decode_s, prompt_token_s = dict[int, float](), 0.0
    for size in sorted({*powers, max_num_seqs}):
        began_s = runner.engine.timeline.clock()
        times = runner.run([TraceRequest(number, 0.0, prompt, _NUM_OUTPUT_TOKENS) for number in range(size)])
        last = max(times.values())  # the last to begin: from its first token on all decode, until the first has ended
        decode_s[size] = median(later - earlier for earlier, later in pairwise(last[: _NUM_GAPS + 1]))
        prompt_token_s = (last[0] - began_s) / (size * len(prompt))
    return StepCosts(decode_s, prompt_token_s)


def allowed_gain(trace: Sequence[TraceRequest], batch_size: int, costs: StepCosts) -> float:
    """Return the time of fixed batches in order of arrival / the time with slots that are always full.

    Fixed batches take a step for each token of their longest output, at the cost of the sequences that have not ended.
    Full slots take the sum of all outputs / `batch_size` steps. Prompts cost the same in both.
    """
    prompts_s = costs.prompt_token_s * sum(len(request.prompt) for request in trace)
    static_s = sum(costs.decode(num_seqs) for num_seqs in _sequences_by_step(trace, batch_size))
    full_s = costs.decode(batch_size) * sum(request.num_output_tokens for request in trace) / batch_size
    return (prompts_s + static_s) / (prompts_s + full_s)


def _sequences_by_step(trace: Sequence[TraceRequest], batch_size: int) -> Iterator[int]:
    for first in range(0, len(trace), batch_size):
        outputs = [request.num_output_tokens for request in trace[first : first + batch_size]]
        for step in range(max(outputs)):
            yield sum(num_tokens > step for num_tokens in outputs)
