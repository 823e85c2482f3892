"""A model runner that takes a real device's time and computes nothing, for many replicas on few cores.

Its output is a pure function of the sequence's last tokens and their position, so that a sequence that
is preempted, recomputed or resumed elsewhere goes on with the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from replicas.engine.batch import ItemResult, ScheduledBatch, ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.protocol import PositionLogprobs, SamplingParams, TokenLogprob

_SPIN_S = 100e-6
"""How early the sleep ends: about as late as the kernel wakes a sleeper. The rest is spun."""
_FIRST_TOKEN_ID = 16
"""Lower ids are special in most vocabularies; none is generated but the end-of-sequence token."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step as a linear function of what it computes."""

    base_s: float
    per_decode_s: float
    """For each sequence that computes its newest token only."""
    per_prefill_token_s: float
    """For each token of all other sequences."""
    per_context_token_s: float = 0.0
    """For each token, over all sequences, that attention reads."""

    def of(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
        return (
            self.base_s
            + self.per_decode_s * shape.num_decodes
            + self.per_prefill_token_s * shape.num_prefill_tokens
            + self.per_context_token_s * shape.num_context_tokens
        )

    def as_dict(self) -> dict[str, float]:
        """For results."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on."""

    num_decodes: int
    num_prefill_tokens: int
    num_context_tokens: int


def shape_of(batch: ScheduledBatch) -> StepShape:
    """The shape of a batch; a decode computes exactly the last known token."""
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
    """A step whose results are there."""

    results: list[ItemResult]

    def collect(self) -> list[ItemResult]:
        """One result per item, in order."""
        return self.results


class TimedStep:
    """A step of which the results are known and the time has yet to pass."""

    def __init__(self, results: list[ItemResult], wait: Callable[[], None]) -> None:
        self._results = results
        self._wait = wait

    def collect(self) -> list[ItemResult]:
        """One result per item, in order, when the step's time has passed."""
        self._wait()
        return self._results


class TimedRunner:
    """Spends a step's time asleep, then returns made-up tokens; steps launched together take their time in turn.

    A request that may end early (no `ignore_eos`) and whose `seed` is a length that it can still reach ends
    with the end-of-sequence token when it holds that many tokens, prompt included: a length that neither
    router nor engine can know beforehand.
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
        """Begin a step, which takes its time once those launched before have taken theirs."""
        self._free_s = ends_s = max(self._clock(), self._free_s) + self._step_times.of(shape_of(batch))
        results = [self._result(item) for item in batch.items]
        self._sampled = {
            item.sequence: result.token_id
            for item, result in zip(batch.items, results, strict=True)
            if result.token_id is not None
        }
        return TimedStep(results, partial(self._wait_until, ends_s))

    def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        """One result per item, in order, after the time that the step takes."""
        return self.launch(batch).collect()

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
        """The token after these."""
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
