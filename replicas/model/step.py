"""A launched step and the pending results of its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from replicas.engine.batch import ItemResult
from replicas.model.batch.transfers import DeviceToHostBuffer
from replicas.model.sampling.logprobs import PendingLogprobs
from replicas.model.sampling.sampler import PendingTokens
from replicas.protocol import PositionLogprobs


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Log probabilities of prompt tokens, on their way to the host."""

    targets: list[int]
    num_top: int
    logprobs: PendingLogprobs

    def read(self, to_host: DeviceToHostBuffer) -> list[PositionLogprobs]:
        """Return the log probabilities, one per target. Call it after `to_host.wait()`."""
        return self.logprobs.read(to_host, self.targets, [self.num_top] * len(self.targets))


@dataclass(frozen=True, slots=True)
class PendingPart:
    """Pending results of the batch's items at `indices`, which sample a token or score their prompt."""

    indices: list[int]
    tokens: PendingTokens | None
    scores: tuple[PendingScores, ...]

    def with_scores(self, result: ItemResult, to_host: DeviceToHostBuffer) -> ItemResult:
        """Return `result` with the prompt's log probabilities, or an error if one of them is NaN."""
        if not self.scores:
            return result
        scores = [logprobs for piece in self.scores for logprobs in piece.read(to_host)]
        if result.error is None and any(math.isnan(score.chosen.logprob) for score in scores):
            result = ItemResult(error="the model's logits are not finite numbers")
        return replace(result, prompt_logprobs=() if result.error else tuple(scores))


class TorchStep:
    """Launched step. `collect` waits for its results."""

    def __init__(self, num_items: int, parts: list[PendingPart], to_host: DeviceToHostBuffer) -> None:
        self._num_items = num_items
        self._parts = parts
        self._to_host = to_host

    def collect(self) -> list[ItemResult]:
        """Wait for the step and return one result per item."""
        self._to_host.wait()
        results = [ItemResult()] * self._num_items
        for part in self._parts:
            nothing = [ItemResult()] * len(part.indices)
            sampled = nothing if part.tokens is None else part.tokens.read(self._to_host)
            for index, result in zip(part.indices, sampled, strict=True):
                results[index] = part.with_scores(result, self._to_host)
        return results
