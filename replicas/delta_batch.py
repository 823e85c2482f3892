"""Batch of deltas of many streams, as it crosses from a replica to an ingress: plain tuples and one report of the load.

A delta as a dataclass with stats of its own takes many times as long to pickle as a plain tuple.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from replicas.protocol import ReplicaStats, TokenDelta, Usage

PackedDelta = tuple[int, int, tuple[int, ...], str, tuple[Any, ...], tuple[Any, ...] | None]
"""Number of the stream, start, token ids, text, the fields of the usage, and the other fields if any is set."""


@dataclass(frozen=True, slots=True)
class ChannelId:
    """Identity of a channel, which carries the deltas of one ingress's streams on one replica."""

    ingress_id: str
    number: int
    """Number of the channel in its ingress. A channel that has ended is never opened again."""


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """Deltas of different streams that leave a replica together."""

    stats: ReplicaStats
    """Load of the replica when they left."""
    deltas: tuple[PackedDelta, ...]

    @classmethod
    def of(cls, stats: ReplicaStats, deltas: Iterable[tuple[int, TokenDelta]]) -> DeltaBatch:
        """Pack deltas, each with the number of its stream."""
        return cls(stats, tuple(_packed(number, delta) for number, delta in deltas))


def unpacked(packed: PackedDelta, request_id: str, stats: ReplicaStats) -> TokenDelta:
    """Return a delta with the id of its request and the stats of its batch."""
    _, start, token_ids, text, usage, rest = packed
    if rest is None:
        return TokenDelta(request_id, start, token_ids, text, Usage(*usage), stats=stats)
    logprobs, prompt_logprobs, finish_reason, stop_reason, error, phases = rest
    return TokenDelta(
        request_id,
        start,
        token_ids,
        text,
        Usage(*usage),
        logprobs,
        prompt_logprobs,
        finish_reason,
        stop_reason,
        error,
        stats,
        phases,
    )


def _packed(number: int, delta: TokenDelta) -> PackedDelta:
    usage = delta.usage
    counts = (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.computed_tokens,
        usage.recomputed_tokens,
        usage.device_s,
    )
    rest = (
        delta.logprobs,
        delta.prompt_logprobs,
        delta.finish_reason,
        delta.stop_reason,
        delta.error,
        delta.phases,
    )
    is_plain = rest == _PLAIN
    return (number, delta.start, delta.token_ids, delta.text, counts, None if is_plain else rest)


_PLAIN = ((), (), None, None, None, None)
