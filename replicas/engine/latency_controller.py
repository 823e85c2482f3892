"""Latency controller: adapts the token budget of steps to a target for the time between two tokens."""

from __future__ import annotations

from replicas.engine.batch import ScheduledBatch
from replicas.engine.config import EngineConfig

_HIGH, _LOW = 1.2, 0.8
_MAX_CUT = 0.5
_INCREASES_TO_FULL = 64


class LatencyController:
    """Controller of the token budget, which keeps the time of steps with decodes near `target_itl_ms`.

    1. A step that took more than 1.2 times the target multiplies the budget by target / duration, but at least by 0.5,
       so that one stall of the machine does not undo what was learnt.
    2. A step that used its whole budget and took less than 0.8 times the target adds a 64th of
       `max_num_batched_tokens`. A step that used less does not show the cost of more tokens.
    3. In between, nothing changes. A step without decodes delays no running stream: it is neither limited nor counted.
    4. A decode is never held back. If decodes alone use the budget, prompts wait until some decodes have ended.
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

    def num_tokens(self, num_decodes: int, is_more_urgent: bool) -> int:
        """Return the number of tokens that a step with `num_decodes` decodes may compute in all.

        `is_more_urgent`: the step's prompts are more urgent than some running sequence.
        """
        if num_decodes == 0:
            return self._max_budget
        return min(max(self.budget, num_decodes + is_more_urgent * self._min_budget), self._max_budget)

    def stepped(self, batch: ScheduledBatch, duration_s: float) -> None:
        """Adapt the budget to a step that took `duration_s`."""
        if self._target_s is None or not any(item.num_tokens == 1 for item in batch.items):
            return
        if duration_s > _HIGH * self._target_s:
            self._budget *= max(_MAX_CUT, self._target_s / duration_s)
        elif duration_s < _LOW * self._target_s and batch.num_tokens >= self.budget:
            self._budget += self._max_budget / _INCREASES_TO_FULL
        self._budget = min(max(self._budget, self._min_budget), self._max_budget)
