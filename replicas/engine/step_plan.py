"""Plan of one step while the scheduler fills it, and the controller of its token budget."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import groupby

import numpy as np

from replicas.engine.batch import ScheduledBatch
from replicas.engine.config import EngineConfig
from replicas.engine.sequence import BAND, Sequence
from replicas.engine.sequence_table import Lag, SequenceTable
from replicas.engine.state_slots import StateSlots
from replicas.protocol import BANDS, Band

_HIGH, _LOW = 1.2, 0.8
_MAX_CUT = 0.5
_INCREASES_TO_FULL = 64


class StepPlan:
    """Plan of one step while the scheduler fills it: the tokens given to each sequence, and the step's limits.

    It begins with the decodes, which wait for no prompt: the newest token of each running sequence that misses no
    other, and the tokens that its constraint forced after it, as far as they fit. Those in `held` are left out.

    Invariants: the tokens given never exceed `max_num_batched_tokens`, nor a sequence's uncomputed tokens.
    """

    def __init__(
        self, config: EngineConfig, table: SequenceTable, running: list[Sequence], lag: Lag, held: Collection[int] = ()
    ) -> None:
        """`lag` is that of `running`; `held` are indices of the latter."""
        self._config = config
        self._table = table
        self._prefilling = lag.prefilling(running)
        # The decodes: their columns, sequences and numbers of tokens.
        decodes = lag.is_decoding.nonzero()[0]
        if held:
            decodes = np.setdiff1d(decodes, list(held), assume_unique=True)
        is_whole = len(decodes) == len(running)
        self._rows = lag.rows if is_whole else lag.rows[decodes]
        self._decodes = running.copy() if is_whole else [running[index] for index in decodes.tolist()]
        self._num_decode_tokens = np.ones(len(self._rows), np.int64)
        # Tokens of all others.
        self._scheduled: dict[Sequence, int] = {}
        self.num_scheduled_tokens = len(self._rows)
        """Number of tokens given so far; callers only read it."""
        self._num_long = 0
        self._completed_hashes: set[bytes] = set()
        self._limit = config.max_num_batched_tokens
        for index in lag.num_forced[decodes].nonzero()[0].tolist():
            more = min(self.num_tokens_left, self._decodes[index].num_forced_tokens)
            more = min(more, self._decodes[index].num_uncomputed_tokens - 1)
            self._num_decode_tokens[index] += more
            self.num_scheduled_tokens += more
        self.num_decode_tokens = self.num_scheduled_tokens
        """Number of tokens of the decodes."""
        # A band may be in the list twice: promoted sequences run before all others.
        self.decoding_bands = [BANDS[band] for band, _ in groupby(table.numbers[BAND][self._rows].tolist())]

    def limit(self, num_tokens: int) -> None:
        """Limit the step to `num_tokens` in all. Tokens that are given already stay given."""
        self._limit = num_tokens

    @property
    def num_tokens_left(self) -> int:
        """Number of tokens that may still be given."""
        return max(0, self._limit - self.num_scheduled_tokens)

    @property
    def has_prefilling(self) -> bool:
        """True if some running sequence was part-way through its prefill before the step."""
        return bool(self._prefilling)

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
        """Give `sequence`, which is not one of the decodes, up to `at_most` more of its tokens in this step.

        A prompt that must be computed whole gets all of them or none.
        """
        num_scheduled = self._scheduled.get(sequence, 0)
        if num_scheduled == 0 and self.is_long(sequence):
            self._num_long += 1
        more = min(at_most, self.num_tokens_left, sequence.num_uncomputed_tokens - num_scheduled)
        assert more >= 0
        if self._config.whole_prompts and more < sequence.num_uncomputed_tokens:
            return
        if more:
            self._scheduled[sequence] = num_scheduled + more
            self.num_scheduled_tokens += more

    def unschedule(self, sequence: Sequence) -> None:
        """Remove `sequence` from the step. Called before the sequence is preempted."""
        num_scheduled = self._scheduled.pop(sequence, 0)
        for index in (self._rows == sequence.row).nonzero()[0].tolist():
            num_scheduled += self._num_decode_tokens.item(index)
            del self._decodes[index]
            self._rows = np.delete(self._rows, index)
            self._num_decode_tokens = np.delete(self._num_decode_tokens, index)
        self.num_scheduled_tokens -= num_scheduled
        if num_scheduled and self.is_long(sequence):
            self._num_long -= 1

    def completes(self, block_hash: bytes) -> bool:
        """Return True if the step completes the block with this hash, for any sequence."""
        return block_hash in self._completed_hashes

    def note_completed(self, block_hashes: list[bytes]) -> None:
        """Note blocks that the given tokens complete. They stay noted if their sequence is removed from the step."""
        self._completed_hashes.update(block_hashes)

    def num_scheduled(self, sequence: Sequence) -> int:
        """Return the number of tokens given so far to `sequence`, which is not one of the decodes."""
        return self._scheduled.get(sequence, 0)

    def batch(self, states: StateSlots) -> ScheduledBatch | None:
        """Return the finished batch, whose items have slots of `states`; None if no sequence has work."""
        sequences = [*self._decodes, *self._scheduled]
        if not sequences:
            return None
        rows, num_tokens = self._rows, self._num_decode_tokens
        if self._scheduled:
            rows = np.append(rows, [sequence.row for sequence in self._scheduled])
            num_tokens = np.append(num_tokens, list(self._scheduled.values()))
        columns = self._table.columns(sequences, rows, num_tokens, self.num_scheduled_tokens, len(self._decodes))
        if states.num_slots:
            columns = replace(columns, states=states.moves(columns, self._table.numbers))
        return ScheduledBatch((), tuple(self.decoding_bands), columns)


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
        if self._target_s is None or not np.count_nonzero(batch.columns.num_tokens == 1):
            return
        if duration_s > _HIGH * self._target_s:
            self._budget *= max(_MAX_CUT, self._target_s / duration_s)
        elif duration_s < _LOW * self._target_s and batch.num_tokens >= self.budget:
            self._budget += self._max_budget / _INCREASES_TO_FULL
        self._budget = min(max(self._budget, self._min_budget), self._max_budget)
