"""One step's work and its result: what the scheduler and the model runner say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from replicas.engine.sequence import Sequence
from replicas.protocol import PositionLogprobs


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Tokens one sequence computes in this step: positions [start, start + num_tokens).

    Every position already has a slot in the sequence's block table.
    """

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """One past the last position computed."""
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the step reaches the last known token, so that its logits give the next one."""
        return self.end == len(self.sequence.token_ids) and self.sequence.can_sample


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The sequences of one step, each at most once: those that decode first, then those that prefill."""

    items: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(item.num_tokens for item in self.items)


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


class ModelRunner(Protocol):
    """The only thing that knows a device."""

    def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        """Compute every scheduled token, write its KV, sample where an item samples.

        Returns one result per item, in order. Running an item again writes the same KV.

        Raises:
            Exception: the whole batch failed; nothing about it can be relied on.
        """
        ...
