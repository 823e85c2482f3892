"""Upper limit of continuous batching's gain over fixed batches without padding, for the lengths of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from bench.baselines.engine_batches import RaggedBatches
from bench.baselines.timeline import Timeline
from bench.baselines.trace import TraceRequest

_NUM_GAPS = 24
_NUM_OUTPUT_TOKENS = 2 * _NUM_GAPS


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


def measure_costs(runner: RaggedBatches, prompt: tuple[int, ...], max_num_seqs: int, timeline: Timeline) -> StepCosts:
    """Measure decode steps of 1, 2, 4 ... `max_num_seqs` sequences that continue `prompt`."""
    powers = [2**power for power in range(max_num_seqs.bit_length())]
    decode_s, prompt_token_s = dict[int, float](), 0.0
    for size in sorted({*powers, max_num_seqs}):
        began_s = timeline.clock()
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
