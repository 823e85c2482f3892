"""The work of one step, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.engine.sequence import Sequence
from replicas.protocol import PositionLogprobs

_set = object.__setattr__


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Tokens one sequence computes in this step: positions [start, start + num_tokens).

    Every position already has a slot in the sequence's block table. The last token may be awaited: the step
    launched before samples it, and the runner takes it from there.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool = field(init=False)
    """Whether the step reaches the last token known or awaited, so that its logits give the next one."""
    num_repeated_tokens: int = field(init=False)
    """How many of the tokens were computed before a preemption already."""
    preemption: int = field(init=False)
    """How often the sequence had been preempted: another number later says that the blocks have been taken back."""

    def __post_init__(self) -> None:
        # Fixed now: the sequence goes on while the step is on its way.
        sequence, end, num_lost_tokens = self.sequence, self.start + self.num_tokens, self.sequence.num_lost_tokens
        num_repeated_tokens = min(end, num_lost_tokens) - self.start if num_lost_tokens > self.start else 0
        _set(self, "samples", sequence.may_sample_at(end))
        _set(self, "num_repeated_tokens", num_repeated_tokens)
        _set(self, "preemption", sequence.num_preemptions)

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.start + self.num_tokens

    @property
    def output_index(self) -> int:
        """Index, from 0, of the output token that the item samples."""
        return self.end - self.sequence.num_prompt_tokens

    @property
    def holds_blocks(self) -> bool:
        """Whether the blocks that the step writes are still the sequence's own."""
        return bool(self.sequence.block_table) and self.sequence.num_preemptions == self.preemption

    def part(self, start: int, num_tokens: int) -> ScheduledSequence:
        """Positions [start, start + num_tokens) of these; only the part at the end samples."""
        part = ScheduledSequence(self.sequence, start, num_tokens)
        _set(part, "samples", self.samples and part.end == self.end)
        return part


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The sequences of one step, each at most once: those that decode first, then those that prefill."""

    items: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(item.num_tokens for item in self.items)

    @property
    def must_be_known_at_once(self) -> bool:
        """Whether some sequence cannot go on before the host knows the token that it samples here."""
        return any(item.samples and item.sequence.needs_known_tokens for item in self.items)


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What a step gave one scheduled sequence."""

    token_id: int | None = None
    """The sampled token; None when the item does not sample, or failed."""
    logprobs: PositionLogprobs | None = None
    """Of the sampled token, where its params ask for them."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """Where asked for: one per prompt token at positions start + 1 .. min(end, num_prompt_tokens - 1)."""
    error: str | None = None
    """Why this sequence, and it alone, failed (for example logits that are not numbers)."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A batch to launch."""

    batch: ScheduledBatch
    begun_s: float
    """Monotonic time at which its scheduling began."""
    is_saturated: bool
    """Whether it has as much work as the engine's limits allow."""


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """A step whose results are known."""

    batch: ScheduledBatch
    results: list[tuple[ScheduledSequence, ItemResult]]
    """In order of the items. A repeated step has none for sequences that were preempted or have ended since."""
    collected_s: float
    """Monotonic time at which they became known."""
    duration_s: float
    """Time since the step began, or since the one before it was collected: steps overlap."""
    is_saturated: bool
