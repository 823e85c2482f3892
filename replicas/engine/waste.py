"""Tokens that an engine computed in vain."""

from __future__ import annotations

from collections import Counter
from enum import Enum

from replicas.protocol import Metric, MetricKind


class WasteCause(Enum):
    """Why computed tokens were of no use."""

    PREEMPT = "preempt"
    """They were computed again after a preemption."""
    ABORT = "abort"
    """Their request was aborted: its client left or cancelled."""
    EXPIRED = "expired"
    """Their request's deadline passed before it was finished."""
    SURPLUS = "surplus"
    """Their sequence had ended with the token before, which nobody knew yet (`async_scheduling`)."""


class WastedTokens:
    """Counts by cause; written by the engine thread, read by any.

    Every token is counted as often as it was computed in vain, so that the sum is a share of all that were computed.
    """

    def __init__(self) -> None:
        self._tokens: Counter[WasteCause] = Counter()

    def add(self, cause: WasteCause, num_tokens: int) -> None:
        """Count tokens, prompt and output, whose computing turned out to be in vain."""
        self._tokens[cause] += num_tokens

    def metrics(self) -> tuple[Metric, ...]:
        """The counts so far."""
        help_text = (
            "tokens computed in vain: again after a preemption, for a sequence that had ended already, or (prompt "
            "beyond the prefix hit, and output) for requests that were aborted or whose deadline passed; share = "
            "this / vllm:iteration_tokens_total_sum"
        )
        return tuple(
            Metric(
                "headway:wasted_tokens", help_text, MetricKind.COUNTER, self._tokens[cause], (("cause", cause.value),)
            )
            for cause in WasteCause
        )
