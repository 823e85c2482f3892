"""Sequence: a request being generated, owned by the engine thread alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from replicas.engine.constraint import Constraint
from replicas.protocol import Band, GenerateRequest, PhaseSeconds, PositionLogprobs


class SequenceStatus(Enum):
    """Status of a sequence. WAITING and FINISHED sequences hold no blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Phase(Enum):
    """Phase of a sequence in its engine."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class HeldSlot:
    """State slot that a sequence holds."""

    slot: int
    boundary: int
    """Position of the state: the number of tokens that went into it."""
    end: int
    """End of the step that writes the slot; the state is computed once the tokens before it are."""
    is_shared: bool = False
    """True if another sequence wrote the slot. It is only read."""
    is_snapshot: bool = False
    """True if the slot is only to be cached. The sequence does not read it."""


class PhaseTimes:
    """Times that a sequence has spent in the phases of its life in the engine.

    Invariant: the times add up to the time from `begin` to the present.
    """

    __slots__ = ("_seconds", "_since_s", "has_news", "phase")

    def __init__(self) -> None:
        self.phase = Phase.WAITING
        self._since_s = 0.0
        self._seconds = dict.fromkeys(Phase, 0.0)
        self.has_news = False
        """True if the sequence has begun to decode, at first or again, since the times were read."""

    def begin(self, now: float) -> None:
        """Begin the first phase, `WAITING`."""
        self._since_s = now

    def enter(self, phase: Phase, now: float) -> None:
        """End the present phase and begin another one."""
        self._seconds[self.phase] += max(0.0, now - self._since_s)
        # A step that is collected late was measured before the phase that has begun since.
        self._since_s = max(self._since_s, now)
        self.phase = phase
        self.has_news |= phase is Phase.DECODE

    def read(self, now: float, num_preemptions: int) -> PhaseSeconds:
        """Return the times up to now, with the sequence's number of preemptions."""
        seconds = self._seconds | {self.phase: self._seconds[self.phase] + max(0.0, now - self._since_s)}
        self.has_news = False
        return PhaseSeconds(
            waiting_s=seconds[Phase.WAITING],
            prefill_s=seconds[Phase.PREFILL],
            decode_s=seconds[Phase.DECODE],
            preempted_s=seconds[Phase.PREEMPTED],
            num_preemptions=num_preemptions,
        )


(
    KNOWN, PENDING, COMPUTED, IN_FLIGHT, PLACEHOLDERS, FORCED, PREEMPTED, MAX_COMPUTED, PROMPT, MAX_OUTPUT,
    EXPECTED_OUTPUT, TABLE_BLOCKS, BLOCKS, NEWEST_TOKEN, HELD_STEPS, PREEMPTIONS, WORK, BAND, EFFECTIVE_BAND, DECODES,
    NEWEST_BLOCK, STATE_SLOT, STATE_BOUNDARY, NUM_AWAITED_STATES, NUM_NUMBERS,
) = range(25)  # fmt: skip
"""Indices of the numbers of a sequence: token counts, unless their names say otherwise."""
DEVICE_S, LAST_TOKEN_S, NUM_TIMES = range(3)
"""Indices of the times of a sequence, seconds."""
MAX_PENDING_TOKENS = 64
"""Most output tokens of a running sequence that are in the table alone."""


_NOTHING_PENDING = np.zeros(0, np.int64)


class _Number:
    """Descriptor of one of a sequence's numbers."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, sequence: Sequence, _: type[Sequence]) -> int:
        return sequence.numbers.item(self._index)

    def __set__(self, sequence: Sequence, value: int) -> None:
        sequence.numbers[self._index] = value


class Sequence:
    """Sequence: its known tokens, the number of computed ones, and the blocks that hold their KV.

    What changes with every token are numbers in an array. While the sequence runs, they are a column of the scheduler's
    `SequenceTable`, which advances all running sequences at once.

    A block table belongs to a group of layers. In the table of layers with a window, the places of blocks that no later
    token sees hold 0.

    A step in flight computes tokens of the sequence and samples one. The sampled token is a placeholder until the step
    is collected: it counts like a known token, but only the device knows its value.

    Invariants:
        0 <= num_scheduled_tokens <= num_tokens; the blocks of each table have room for the scheduled tokens.
        No table is shorter than `block_table`.
        0 <= num_computed_tokens <= num_known_tokens: every computed token is known.
        WAITING or FINISHED <=> `block_table` is empty. Preemption keeps the tokens and placeholders.
        The first `num_preempted_tokens` tokens were computed or in flight when a preemption took their blocks.
    """

    def __init__(
        self,
        request: GenerateRequest,
        arrival_s: float,
        deadline_s: float | None,
        arrival_index: int,
        constraint: Constraint | None = None,
    ) -> None:
        """Make the sequence; `constraint` has accepted the output that the request brings.

        `arrival_s` and `deadline_s` are monotonic; `arrival_index` counts sequences in order of arrival.
        """
        self.request = request
        self.request_id = request.request_id
        self.arrival_s = arrival_s
        self.deadline_s = deadline_s
        self.arrival_index = arrival_index
        self.constraint = constraint
        self.is_promoted = request.is_promoted
        self.row: int | None = None
        """Column of the sequence in the table of the running ones; None: it does not run."""
        self.admission = -1
        """Number of the sequence's admission to that column."""
        self.numbers = np.zeros(NUM_NUMBERS, np.int64)
        self.times = np.array([0.0, math.nan])
        self.pending = _NOTHING_PENDING
        """Newest tokens of the sequence, of which the first `PENDING` are not in the list yet."""
        self._token_ids: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        params = request.params
        # The last allowed output token is never computed, as no token follows it.
        self._max_computed_tokens = max(len(self._token_ids), self.num_prompt_tokens + params.max_tokens - 1)
        self.has_penalties = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        """True if counts of the earlier tokens change the probabilities of the next one."""
        self.has_bad_phrases = any(len(word) > 1 for word in params.bad_words)
        """True if the earlier tokens in their order forbid some next ones."""
        self.is_special = (
            constraint is not None
            or self.changes_logits
            or bool(params.allowed_token_ids)
            or params.logprobs is not None
            or params.pool is not None
        )
        """True if the output needs more than sampling by temperature, top-p, top-k and min-p."""
        self.block_table: list[int] = []
        self.more_tables: list[list[int]] = []
        """Block tables after the first one, if the model's layers are in several groups."""
        self.block_hashes: list[bytes] = []
        self.state_slots: list[HeldSlot] = []
        """Slots with recurrent state, in order of the steps that write them; the next step reads the last one."""
        self.kept_boundaries: list[int] = []
        """Boundaries whose state stays cached, ascending."""
        self.status = SequenceStatus.WAITING
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.num_preempted_tokens = 0
        self.is_fairness_preempted = False
        """True if the last preemption was for another tenant's fair share."""
        self.fairness_preemption_step: int | None = None
        """Number of the step of the last such preemption."""
        self.num_prompt_logprobs = 0
        self.recomputed_tokens = 0
        """Tokens among these that were lost to a preemption before."""
        self.phases = PhaseTimes()
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None

    num_computed_tokens = _Number(COMPUTED)
    num_in_flight_tokens = _Number(IN_FLIGHT)
    num_placeholder_tokens = _Number(PLACEHOLDERS)
    num_forced_tokens = _Number(FORCED)
    """Tokens at the end that the constraint forced, and that are neither computed nor in flight."""
    num_blocks = _Number(BLOCKS)
    """Number of blocks in all tables."""
    num_table_blocks = _Number(TABLE_BLOCKS)
    """Length of `block_table`."""
    newest_block = _Number(NEWEST_BLOCK)
    """Last block that came to `block_table`; 0: it is empty."""
    num_held_steps = _Number(HELD_STEPS)
    """Steps in a row that left out the sequence, which decodes, for the TPOT of others."""
    state_slot = _Number(STATE_SLOT)
    """Last one of `state_slots` if the sequence writes it; 0: it has none."""
    state_boundary = _Number(STATE_BOUNDARY)
    """Boundary of that slot."""
    num_awaited_states = _Number(NUM_AWAITED_STATES)
    """Number of the last `state_slots` whose state was not computed when that was last looked at."""
    work_tokens = _Number(WORK)
    """Tokens computed in the steps that were collected, each as often as it was computed."""

    @property
    def token_ids(self) -> list[int]:
        """Known tokens: the prompt and the output."""
        self._list_pending()
        return self._token_ids

    @property
    def changes_logits(self) -> bool:
        """True if logits change by more than a mask before a token is chosen."""
        params = self.request.params
        return self.has_penalties or any(map(bool, (params.bad_words, params.logit_bias, params.min_tokens)))

    @property
    def has_stop_or_constraint(self) -> bool:
        """True if the request has stop strings or a constraint, which are followed after each output token."""
        return self.constraint is not None or bool(self.request.params.stop)

    @property
    def may_be_continued(self) -> bool:
        """True if output tokens may be applied in arrays, see `Scheduler.continued`: they change numbers and text."""
        params = self.request.params
        return params.logprobs is None and not (self.has_stop_or_constraint and params.min_tokens)

    @property
    def num_known_tokens(self) -> int:
        """Number of known tokens."""
        return len(self._token_ids) + self.numbers.item(PENDING)

    @property
    def device_s(self) -> float:
        """Share of the time of the steps that were collected, seconds."""
        return float(self.times[DEVICE_S])

    @property
    def last_token_s(self) -> float | None:
        """Monotonic time of the newest output token that was generated here; None: there is none."""
        last_token_s = self.times.item(LAST_TOKEN_S)
        return None if math.isnan(last_token_s) else last_token_s

    @last_token_s.setter
    def last_token_s(self, now: float) -> None:
        self.times[LAST_TOKEN_S] = now

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Sort key, most urgent first: promoted, band, earliest deadline, order of arrival."""
        deadline = float("inf") if self.deadline_s is None else self.deadline_s
        return (-1 if self.is_promoted else self.band, deadline, self.arrival_index)

    @property
    def band(self) -> Band:
        """Urgency class of the request."""
        return self.request.band

    @property
    def effective_band(self) -> Band:
        """Urgency class in which the sequence is scheduled: a promoted one counts as interactive."""
        return Band.INTERACTIVE if self.is_promoted else self.band

    @property
    def num_output_tokens(self) -> int:
        """Number of known output tokens."""
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Number of known tokens and placeholders that must be computed; it stays the same when one becomes known."""
        return min(self.num_known_tokens + self.num_placeholder_tokens, self._max_computed_tokens)

    @property
    def num_scheduled_tokens(self) -> int:
        """Number of computed tokens and tokens in flight."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of known tokens and placeholders that are neither computed nor in flight."""
        return self.num_tokens - self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def is_decoding(self) -> bool:
        """True if the sequence misses its newest token alone, with those that its constraint forced after it."""
        return 0 < self.num_uncomputed_tokens <= 1 + self.num_forced_tokens

    @property
    def is_prefilling(self) -> bool:
        """True if the sequence misses earlier tokens, too."""
        return self.num_uncomputed_tokens > 1 + self.num_forced_tokens

    @property
    def can_be_forced(self) -> bool:
        """True if `append_forced` may be called: the sequence runs, and no step in flight samples its next token."""
        return self.status is SequenceStatus.RUNNING and self.num_placeholder_tokens == 0

    @property
    def num_spent_tokens(self) -> int:
        """Number of tokens computed for the sequence in this engine, each counted once; prefix hits are not counted."""
        return max(self.num_scheduled_tokens, self.num_preempted_tokens) - (self.num_cached_tokens or 0)

    @property
    def num_surplus_tokens(self) -> int:
        """Number of tokens in flight that are wasted if the sequence ends with its known tokens."""
        return max(0, self.num_scheduled_tokens - max(self.num_computed_tokens, self.num_preempted_tokens))

    @property
    def num_outstanding_tokens(self) -> int:
        """Number of tokens still to compute: known ones, placeholders, and the output still expected."""
        num_output_tokens = self.num_output_tokens + self.num_placeholder_tokens
        return self.num_uncomputed_tokens + max(0, self.num_expected_output_tokens - num_output_tokens)

    @property
    def num_expected_output_tokens(self) -> int:
        """Output length that the ingress predicts, or the most that the request allows."""
        expected = self.request.expected_output_tokens
        return self.request.params.max_tokens if expected is None else expected

    @property
    def can_sample(self) -> bool:
        """True if another output token is allowed. With a `max_tokens` of 0 the prompt is only scored."""
        return self.num_output_tokens < self.request.params.max_tokens

    def may_sample_at(self, end: int) -> bool:
        """Return True if computing the tokens before `end` yields the next output token."""
        num_tokens = self.num_known_tokens + self.num_placeholder_tokens
        return end == num_tokens and num_tokens - self.num_prompt_tokens < self.request.params.max_tokens

    def launched(self, num_tokens: int, samples: bool) -> None:
        """Note that a step was launched that computes the next `num_tokens`, and samples one if `samples`."""
        self.num_held_steps = 0
        self.num_in_flight_tokens += num_tokens
        if samples:
            self.num_placeholder_tokens += 1
        self.num_forced_tokens = max(0, self.num_forced_tokens - num_tokens)

    def add_work(self, num_tokens: int, device_s: float) -> None:
        """Count tokens of a step that was collected, and the share of its time."""
        self.work_tokens += num_tokens
        self.times[DEVICE_S] += device_s

    def append(self, token_id: int) -> None:
        """Append the value of the oldest placeholder, which is now known."""
        self.num_placeholder_tokens -= 1
        self._append(token_id)

    def append_forced(self, token_id: int) -> None:
        """Append a token that is known without a step."""
        assert self.can_be_forced
        self._append(token_id)
        self.num_forced_tokens += 1

    def undo_append(self) -> None:
        """Undo the last `append`, and what was forced after it."""
        del self.token_ids[-1 - self.num_forced_tokens :]
        self.numbers[KNOWN], self.numbers[NEWEST_TOKEN] = len(self._token_ids), self._token_ids[-1]
        self.num_forced_tokens = 0
        self.num_placeholder_tokens += 1

    def leave_table(self) -> None:
        """Keep the numbers in arrays of the sequence's own."""
        self._list_pending()
        self.admission = -1
        self.row, self.numbers, self.times, self.pending = (
            None,
            self.numbers.copy(),
            self.times.copy(),
            _NOTHING_PENDING,
        )

    def enter_table(
        self, row: int, admission: int, numbers: np.ndarray, times: np.ndarray, pending: np.ndarray
    ) -> None:
        """Move the numbers to column `row` of a table."""
        self.admission = admission
        token_ids, request = self.token_ids, self.request
        numbers[:], times[:] = self.numbers, self.times
        self.row, self.numbers, self.times, self.pending = row, numbers, times, pending
        numbers[KNOWN], numbers[NEWEST_TOKEN] = len(token_ids), token_ids[-1]
        numbers[PREEMPTED], numbers[PREEMPTIONS] = self.num_preempted_tokens, self.num_preemptions
        numbers[MAX_COMPUTED], numbers[PROMPT] = self._max_computed_tokens, self.num_prompt_tokens
        numbers[MAX_OUTPUT], numbers[EXPECTED_OUTPUT] = request.params.max_tokens, self.num_expected_output_tokens
        numbers[BAND], numbers[EFFECTIVE_BAND] = self.band, self.effective_band

    def enter_phase(self, phase: Phase, now: float) -> None:
        """End the present phase and begin another one."""
        self.phases.enter(phase, now)
        self.numbers[DECODES] = phase is Phase.DECODE

    def _list_pending(self) -> None:
        num_pending = self.numbers.item(PENDING)
        if num_pending:
            self._token_ids.extend(self.pending[:num_pending].tolist())
            self.numbers[PENDING] = 0

    def _append(self, token_id: int) -> None:
        token_ids = self.token_ids
        token_ids.append(token_id)
        self.numbers[KNOWN], self.numbers[NEWEST_TOKEN] = len(token_ids), token_id

    def take_prompt_logprobs(self, start: int, logprobs: tuple[PositionLogprobs, ...]) -> tuple[PositionLogprobs, ...]:
        """Return those of a step's prompt log probabilities that are new, since recomputation repeats some.

        `logprobs` belong to prompt tokens start + 1, start + 2, ...
        """
        fresh = logprobs[self.num_prompt_logprobs - start :]
        self.num_prompt_logprobs += len(fresh)
        return fresh
