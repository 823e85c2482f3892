"""Plan of one step while the scheduler fills it, and the controller of its token budget."""

from __future__ import annotations

from collections.abc import Collection

from replicas.engine.batch import ScheduledBatch, ScheduledSequence
from replicas.engine.config import EngineConfig
from replicas.engine.sequence import Sequence
from replicas.engine.state_slots import StateSlots
from replicas.protocol import Band

_HIGH, _LOW = 1.2, 0.8
_MAX_CUT = 0.5
_INCREASES_TO_FULL = 64


class StepPlan:
    """Plan of one step: the tokens given to each sequence so far, and the rest of the step's limits.

    It begins with the decodes, which wait for no prompt: the newest token of each running sequence that misses no
    other, and the tokens that its constraint forced after it, as far as they fit. Those in `held` are left out.

    Invariants: the tokens given never exceed `max_num_batched_tokens`, nor a sequence's uncomputed tokens.
    """

    def __init__(self, config: EngineConfig, running: list[Sequence], held: Collection[Sequence] = ()) -> None:
        self._config = config
        self._num_held = len(held)
        self._scheduled: dict[Sequence, int] = {}
        self._prefilling: list[Sequence] = []
        # A band may be in the list twice: promoted sequences run before all others.
        self.decoding_bands: list[Band] = []
        for sequence in running:
            if sequence in held:
                continue
            if sequence.is_decoding:
                self._scheduled[sequence] = 1
                if not self.decoding_bands or self.decoding_bands[-1] is not sequence.request.band:
                    self.decoding_bands.append(sequence.request.band)
            elif sequence.is_prefilling:
                self._prefilling.append(sequence)
        self._num_scheduled_tokens = len(self._scheduled)
        self._num_long = 0
        self._completed_hashes: set[bytes] = set()
        self._limit = config.max_num_batched_tokens
        for sequence in self._scheduled:
            if sequence.num_forced_tokens:
                self.schedule(sequence, sequence.num_forced_tokens)
        self.num_decode_tokens = self._num_scheduled_tokens
        """Number of tokens of the decodes."""

    def limit(self, num_tokens: int) -> None:
        """Limit the step to `num_tokens` in all. Tokens that are given already stay given."""
        self._limit = num_tokens

    @property
    def num_tokens_left(self) -> int:
        """Number of tokens that may still be given."""
        return max(0, self._limit - self._num_scheduled_tokens)

    def prefilling(self, band: Band) -> list[Sequence]:
        """Return the sequences of `band` that were part-way through their prefill before the step, most urgent first.

        `band` is the band they are scheduled in. Sequences preempted since the step began are included.
        """
        return [sequence for sequence in self._prefilling if sequence.effective_band is band]

    def is_long(self, sequence: Sequence) -> bool:
        """Return True if `sequence` needs more than one whole step to catch up."""
        return sequence.num_uncomputed_tokens > self._config.max_num_batched_tokens

    @property
    def can_take_long_prefill(self) -> bool:
        """True if another long prefill may take part. If there are several places, one is kept for short prefills."""
        return self._num_long < max(1, self._config.max_num_partial_prefills - 1)

    @property
    def long_prefill_chunk(self) -> int:
        """Number of tokens that a long prefill gets before the other prefills of its band."""
        return max(1, self.num_tokens_left // self._config.max_num_partial_prefills)

    def schedule(self, sequence: Sequence, at_most: int) -> None:
        """Give `sequence` up to `at_most` more of its tokens in this step."""
        num_scheduled = self._scheduled.get(sequence, 0)
        if num_scheduled == 0 and self.is_long(sequence):
            self._num_long += 1
        more = min(at_most, self.num_tokens_left, sequence.num_uncomputed_tokens - num_scheduled)
        assert more >= 0
        if more:
            self._scheduled[sequence] = num_scheduled + more
            self._num_scheduled_tokens += more

    def unschedule(self, sequence: Sequence) -> None:
        """Remove `sequence` from the step. Called before the sequence is preempted."""
        num_scheduled = self._scheduled.pop(sequence, 0)
        self._num_scheduled_tokens -= num_scheduled
        if num_scheduled and self.is_long(sequence):
            self._num_long -= 1

    def completes(self, block_hash: bytes) -> bool:
        """Return True if the step completes the block with this hash, for any sequence."""
        return block_hash in self._completed_hashes

    def note_completed(self, block_hashes: list[bytes]) -> None:
        """Note blocks that the given tokens complete. They stay noted if their sequence is removed from the step."""
        self._completed_hashes.update(block_hashes)

    def num_scheduled(self, sequence: Sequence) -> int:
        """Return the number of tokens given to `sequence` so far."""
        return self._scheduled.get(sequence, 0)

    def batch(self, states: StateSlots) -> ScheduledBatch | None:
        """Return the finished batch, whose items have slots of `states`; None if no sequence has work."""
        if not self._scheduled:
            return None
        return ScheduledBatch(
            tuple(
                ScheduledSequence.of(
                    sequence,
                    start := sequence.num_scheduled_tokens,
                    num_scheduled,
                    states.move(sequence, start, start + num_scheduled),
                )
                for sequence, num_scheduled in self._scheduled.items()
            ),
            tuple(self.decoding_bands),
            self._num_held,
        )


class LatencyController:
    """Controller of the token budget, which keeps the time of steps with decodes near `target_itl_ms`.

    1. A step that took more than 1.2 times the target multiplies the budget by target / duration. The factor is at
       least 0.5, so one stall of the machine does not undo the earlier adjustments.
    2. A step that used its whole budget and took less than 0.8 times the target adds a 64th of
       `max_num_batched_tokens`. A step that used less does not show the cost of more tokens.
    3. In between, nothing changes. A step without decodes delays no running stream: it is neither limited nor counted.
    4. A decode is never held back for it. If decodes alone use the budget, prompts wait until some decodes have ended.
       Prompts that are more urgent than a running sequence do not wait: together they get a block of tokens per step.

    Invariants:
        min(block_size, max_num_batched_tokens) <= budget <= max_num_batched_tokens, so that prompts progress once the
        decodes leave room.
        Without a target the budget is always `max_num_batched_tokens`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._target_s = None if config.target_itl_ms is None else config.target_itl_ms / 1000
        self._max_budget = config.max_num_batched_tokens
        self._min_budget = min(config.block_size, self._max_budget)
        self._budget = float(self._max_budget)

    @property
    def budget(self) -> int:
        """Number of tokens that a step in which sequences decode may compute."""
        return int(self._budget)

    def num_tokens(self, num_decode_tokens: int, is_more_urgent: bool) -> int:
        """Return the number of tokens that a step with `num_decode_tokens` of decodes may compute in all.

        `is_more_urgent`: the step's prompts are more urgent than some running sequence.
        """
        if num_decode_tokens == 0:
            return self._max_budget
        num_reserved = num_decode_tokens + self._min_budget if is_more_urgent else num_decode_tokens
        return min(max(self.budget, num_reserved), self._max_budget)

    def stepped(self, batch: ScheduledBatch, duration_s: float) -> None:
        """Adapt the budget to a step that took `duration_s`."""
        if self._target_s is None or not any(item.num_tokens == 1 for item in batch.items):
            return
        if duration_s > _HIGH * self._target_s:
            self._budget *= max(_MAX_CUT, self._target_s / duration_s)
        elif duration_s < _LOW * self._target_s and batch.num_tokens >= self.budget:
            self._budget += self._max_budget / _INCREASES_TO_FULL
        self._budget = min(max(self._budget, self._min_budget), self._max_budget)
