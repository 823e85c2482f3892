"""Model runner that takes the time of a real device and computes nothing, for many replicas on few cores.

The output is a pure function of the sequence's last tokens and their position. A sequence that is preempted, recomputed
or resumed on another replica therefore continues with the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from replicas.engine.batch import ItemResult, ScheduledBatch, ScheduledSequence, StepResults
from replicas.engine.sequence import Sequence
from replicas.protocol import PositionLogprobs, SamplingParams, TokenLogprob

_SPIN_S = 100e-6
"""Time by which the sleep ends early, about the kernel's wake-up delay. The rest is a busy wait."""
_FIRST_TOKEN_ID = 16
"""First generated id. Lower ids are special in most vocabularies; of those only end-of-sequence is generated."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Linear model of a step's duration, in seconds."""

    base_s: float
    per_decode_s: float
    """Seconds for each sequence that computes only its newest token."""
    per_prefill_token_s: float
    """Seconds for each token of all other sequences."""
    per_context_token_s: float = 0.0
    """Seconds for each token that attention reads, over all sequences."""

    def of(self, shape: StepShape) -> float:
        """Return the seconds of a step of this shape."""
        return (
            self.base_s
            + self.per_decode_s * shape.num_decodes
            + self.per_prefill_token_s * shape.num_prefill_tokens
            + self.per_context_token_s * shape.num_context_tokens
        )


@dataclass(frozen=True, slots=True)
class StepShape:
    """Counts that determine the duration of a step."""

    num_decodes: int
    num_prefill_tokens: int
    num_context_tokens: int


def shape_of(batch: ScheduledBatch) -> StepShape:
    """Return the shape of a batch; a decode computes exactly the last known token."""
    num_decodes = num_prefill_tokens = num_context_tokens = 0
    for item in batch.items:
        num_context_tokens += item.end
        if item.num_tokens == 1 and item.end >= len(item.sequence.token_ids):
            num_decodes += 1
        else:
            num_prefill_tokens += item.num_tokens
    return StepShape(num_decodes, num_prefill_tokens, num_context_tokens)


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Step with its results already present."""

    results: list[ItemResult]

    def sample(self) -> None:
        """Do nothing: the results are known."""

    def collect(self) -> StepResults:
        """Return one result per item, in order."""
        return StepResults.of(self.results)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """Step with known results whose time has yet to pass."""

    results: list[ItemResult]
    wait: Callable[[], None]

    def sample(self) -> None:
        """Do nothing: the results are known."""

    def collect(self) -> StepResults:
        """Wait until the step's time has passed; return one result per item, in order."""
        self.wait()
        return StepResults.of(self.results)


class TimedRunner:
    """Runner that sleeps for a step's time and returns made-up tokens; steps launched together run one after another.

    A request may end early if it does not set `ignore_eos`. Its `seed` is then the total length, prompt included, at
    which it ends with the end-of-sequence token. Neither router nor engine can know this length beforehand.
    """

    def __init__(
        self,
        step_times: StepTimes,
        vocab_size: int,
        eos_token_id: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        assert vocab_size > _FIRST_TOKEN_ID and eos_token_id < _FIRST_TOKEN_ID
        self._step_times = step_times
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._clock = clock
        self._sleep = sleep
        self._free_s = float("-inf")
        self._sampled: dict[Sequence, int] = {}

    def launch(self, batch: ScheduledBatch) -> TimedStep:
        """Begin a step; its time starts when the steps launched before it have ended."""
        self._free_s = ends_s = max(self._clock(), self._free_s) + self._step_times.of(shape_of(batch))
        results = [self._result(item) for item in batch.items]
        self._sampled = {
            item.sequence: result.token_id
            for item, result in zip(batch.items, results, strict=True)
            if result.token_id is not None
        }
        return TimedStep(results, partial(self._wait_until, ends_s))

    def _wait_until(self, ends_s: float) -> None:
        left_s = ends_s - self._clock() - _SPIN_S
        if left_s > 0:
            self._sleep(left_s)
        while self._clock() < ends_s:
            pass

    def _result(self, item: ScheduledSequence) -> ItemResult:
        prompt_logprobs = _prompt_logprobs(item)
        if not item.samples:
            return ItemResult(prompt_logprobs=prompt_logprobs)
        known = item.sequence.token_ids
        token_ids = known if item.end <= len(known) else [*known, self._sampled[item.sequence]]
        token_id = self.next_token(token_ids, item.sequence.request.params)
        params = item.sequence.request.params
        logprobs = None if params.logprobs is None else _logprobs_of(token_id)
        return ItemResult(token_id=token_id, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def next_token(self, token_ids: list[int], params: SamplingParams) -> int:
        """Return the token that follows `token_ids`."""
        if not params.ignore_eos and len(token_ids) + 1 == params.seed:
            return self._eos_token_id
        before = token_ids[-2] if len(token_ids) > 1 else 0
        mixed = (token_ids[-1] * 2654435761 + before * 40503 + len(token_ids) * 2246822519) & 0xFFFFFFFF
        mixed ^= mixed >> 15
        return _FIRST_TOKEN_ID + mixed % (self._vocab_size - _FIRST_TOKEN_ID)


def _prompt_logprobs(item: ScheduledSequence) -> tuple[PositionLogprobs, ...]:
    sequence = item.sequence
    if sequence.request.params.prompt_logprobs is None:
        return ()
    end = min(item.end, sequence.num_prompt_tokens - 1)
    return tuple(_logprobs_of(token_id) for token_id in sequence.token_ids[item.start + 1 : end + 1])


def _logprobs_of(token_id: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token_id, 0.0), ())


STEP_TIMES = {
    "gpu-8b": StepTimes(base_s=8e-3, per_decode_s=0.02e-3, per_prefill_token_s=0.03e-3, per_context_token_s=6e-8),
    "gpu-70b": StepTimes(base_s=22e-3, per_decode_s=0.05e-3, per_prefill_token_s=0.08e-3, per_context_token_s=6e-8),
    "slow-gpu": StepTimes(base_s=40e-3, per_decode_s=0.1e-3, per_prefill_token_s=0.15e-3, per_context_token_s=3e-7),
    "slow-gpu-70b": StepTimes(
        base_s=110e-3, per_decode_s=0.25e-3, per_prefill_token_s=0.4e-3, per_context_token_s=3e-7
    ),
    "h200-1b": StepTimes(base_s=1.2e-3, per_decode_s=0.007e-3, per_prefill_token_s=0.0055e-3, per_context_token_s=4e-9),
    "instant": StepTimes(base_s=0.0, per_decode_s=0.0, per_prefill_token_s=0.0),
}
"""Step times by name. All are stated assumptions.

`gpu-8b`: a model of 8 billion parameters in bfloat16 on one data-centre GPU. A decode step reads 16 GB of weights at
about 2 TB/s (8 ms). Each decode adds its sampling and its share of KV. Prefill runs at about 33,000 tokens a second.
Attention reads 128 KiB of KV per context token.
`gpu-70b`: the same for 70 billion parameters on four GPUs.
`h200-1b`: fitted to what an H200 measured with the shape of Llama-3.2-1B (`bench/results/gpu_h200.json`): 1.2 ms for
one sequence, 2.0 ms for 64 and 4.0 ms for 256 of 1,024 tokens; a prompt of 2,048 tokens takes 11 ms.
`slow-gpu` and `slow-gpu-70b`: the first two five times slower throughout. Two CPU cores that also run HTTP and the
clients keep up with several such replicas. With `gpu-8b` the cores would be the bottleneck.
"""
