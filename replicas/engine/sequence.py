"""Sequence: a request being generated, owned by the engine thread alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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


class Sequence:
    """Sequence: its known tokens, the number of computed ones, and the blocks that hold their KV.

    A block table belongs to a group of layers. In the table of layers with a window, the places of blocks that no later
    token sees hold 0.

    A step in flight computes tokens of the sequence and samples one. The sampled token is a placeholder until the step
    is collected: it counts like a known token, but only the device knows its value.

    Invariants:
        0 <= num_scheduled_tokens <= num_tokens; the blocks of each table have room for the scheduled tokens.
        No table is shorter than `block_table`.
        0 <= num_computed_tokens <= len(token_ids): every computed token is known.
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
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = self.num_in_flight_tokens = self.num_placeholder_tokens = 0
        self.num_forced_tokens = 0
        """Tokens at the end that the constraint forced, and that are neither computed nor in flight."""
        # The last allowed output token is never computed, as no token follows it.
        self._max_computed_tokens = max(len(self.token_ids), self.num_prompt_tokens + request.params.max_tokens - 1)
        params = request.params
        self.has_penalties = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        """True if counts of the earlier tokens change the probabilities of the next one."""
        self.has_bad_phrases = any(len(word) > 1 for word in params.bad_words)
        """True if the earlier tokens in their order forbid some next ones."""
        self.block_table: list[int] = []
        self.more_tables: list[list[int]] = []
        """Block tables after the first one, if the model's layers are in several groups."""
        self.num_blocks = 0
        """Number of blocks in all tables."""
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
        self.num_held_steps = 0
        """Steps in a row that left out the sequence, which decodes, for the TPOT of others."""
        self.num_prompt_logprobs = 0
        self.work_tokens = 0
        """Tokens computed in the steps that were collected, each as often as it was computed."""
        self.recomputed_tokens = 0
        """Tokens among these that were lost to a preemption before."""
        self.device_s = 0.0
        """Share of the time of these steps, seconds."""
        self.phases = PhaseTimes()
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

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
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Number of known tokens and placeholders that must be computed; it stays the same when one becomes known."""
        return min(len(self.token_ids) + self.num_placeholder_tokens, self._max_computed_tokens)

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
        expected = self.request.expected_output_tokens
        if expected is None:
            expected = self.request.params.max_tokens
        num_output_tokens = self.num_output_tokens + self.num_placeholder_tokens
        return self.num_uncomputed_tokens + max(0, expected - num_output_tokens)

    @property
    def can_sample(self) -> bool:
        """True if another output token is allowed. With a `max_tokens` of 0 the prompt is only scored."""
        return self.num_output_tokens < self.request.params.max_tokens

    def may_sample_at(self, end: int) -> bool:
        """Return True if computing the tokens before `end` yields the next output token."""
        num_tokens = len(self.token_ids) + self.num_placeholder_tokens
        return end == num_tokens and num_tokens - self.num_prompt_tokens < self.request.params.max_tokens

    def launched(self, num_tokens: int, samples: bool) -> None:
        """Note that a step was launched that computes the next `num_tokens`, and samples one if `samples`."""
        self.num_held_steps = 0
        self.num_in_flight_tokens += num_tokens
        if samples:
            self.num_placeholder_tokens += 1
        self.num_forced_tokens = max(0, self.num_forced_tokens - num_tokens)

    def append(self, token_id: int) -> None:
        """Append the value of the oldest placeholder, which is now known."""
        self.num_placeholder_tokens -= 1
        self.token_ids.append(token_id)

    def append_forced(self, token_id: int) -> None:
        """Append a token that is known without a step."""
        assert self.can_be_forced
        self.token_ids.append(token_id)
        self.num_forced_tokens += 1

    def undo_append(self) -> None:
        """Undo the last `append`, and what was forced after it."""
        del self.token_ids[-1 - self.num_forced_tokens :]
        self.num_forced_tokens = 0
        self.num_placeholder_tokens += 1

    def take_prompt_logprobs(self, start: int, logprobs: tuple[PositionLogprobs, ...]) -> tuple[PositionLogprobs, ...]:
        """Return those of a step's prompt log probabilities that are new, since recomputation repeats some.

        `logprobs` belong to prompt tokens start + 1, start + 2, ...
        """
        fresh = logprobs[self.num_prompt_logprobs - start :]
        self.num_prompt_logprobs += len(fresh)
        return fresh
