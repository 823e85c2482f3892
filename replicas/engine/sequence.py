"""A request being generated; owned by the engine thread alone."""

from __future__ import annotations

from enum import Enum

from replicas.protocol import Band, GenerateRequest, PositionLogprobs


class SequenceStatus(Enum):
    """Where a sequence is in its life. WAITING and FINISHED sequences hold no blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Known tokens, how many of them are computed, and the blocks that hold their KV.

    Invariants:
        0 <= num_computed_tokens <= len(token_ids); computed tokens have slots in `block_table`.
        WAITING or FINISHED <=> `block_table` is empty. Preemption keeps the tokens.
        Of the first `num_lost_tokens`, every one was in the cache when a preemption took it away.
    """

    def __init__(self, request: GenerateRequest, arrival_s: float, deadline_s: float | None, number: int) -> None:
        """`arrival_s` and `deadline_s` are monotonic; `number` counts sequences in order of arrival."""
        self.request = request
        self.arrival_s = arrival_s
        self.deadline_s = deadline_s
        self.number = number
        self.is_promoted = request.is_promoted
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.status = SequenceStatus.WAITING
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        self.num_prompt_logprobs = 0
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def request_id(self) -> str:
        """The id the ingress gave."""
        return self.request.request_id

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Sort key, most urgent first: promoted, then band, earliest deadline, order of arrival."""
        deadline = float("inf") if self.deadline_s is None else self.deadline_s
        return (-1 if self.is_promoted else self.band, deadline, self.number)

    @property
    def band(self) -> Band:
        """The urgency class the request came with."""
        return self.request.band

    @property
    def effective_band(self) -> Band:
        """The urgency class it is scheduled in: a promoted sequence counts as interactive."""
        return Band.INTERACTIVE if self.is_promoted else self.band

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV is not in the cache."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_spent_tokens(self) -> int:
        """Tokens computed for it here, each counted once; what the prefix cache had cost nothing."""
        return max(self.num_computed_tokens, self.num_lost_tokens) - (self.num_cached_tokens or 0)

    @property
    def num_outstanding_tokens(self) -> int:
        """Tokens still to compute: the known ones, and the output still expected."""
        expected = self.request.expected_output_tokens
        if expected is None:
            expected = self.request.params.max_tokens
        return self.num_uncomputed_tokens + max(0, expected - self.num_output_tokens)

    @property
    def can_sample(self) -> bool:
        """Whether another output token is allowed (a `max_tokens` of 0 only scores its prompt)."""
        return self.num_output_tokens < self.request.params.max_tokens

    def take_prompt_logprobs(self, start: int, logprobs: tuple[PositionLogprobs, ...]) -> tuple[PositionLogprobs, ...]:
        """The part of a step's prompt log probabilities not seen before (recomputation repeats some).

        `logprobs` belong to prompt tokens start + 1, start + 2, ...
        """
        fresh = logprobs[self.num_prompt_logprobs - start :]
        self.num_prompt_logprobs += len(fresh)
        return fresh
