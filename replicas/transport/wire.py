"""Values that cross the wire between an ingress and a replica.

A *stream* is the output of one sequence. A *channel* carries all streams of one ingress on one replica. A *batch* is
one message of a channel: deltas of different streams as plain tuples, and one report of the load. A delta as a
dataclass with stats of its own takes many times as long to pickle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from replicas.errors import ServingError
from replicas.protocol import GenerateRequest, ReplicaStats, TokenDelta, Usage

PackedDelta = tuple[int, int, tuple[int, ...], str, tuple[Any, ...], tuple[Any, ...] | None]
"""Number of the stream, start, token ids, text, the fields of the usage, and the other fields if any is set."""

NumberedRequest = tuple[int, GenerateRequest]
"""Request, and the number of its stream in a channel."""


_PACKED_APART = frozenset({"request_id", "start", "token_ids", "text", "usage", "stats"})
_OTHER_FIELDS = tuple(field.name for field in fields(TokenDelta) if field.name not in _PACKED_APART)
_PLAIN = tuple(field.default for field in fields(TokenDelta) if field.name in _OTHER_FIELDS)
_others = attrgetter(*_OTHER_FIELDS)
_counts = attrgetter(*(field.name for field in fields(Usage)))


WINDOW_BATCHES = 8
"""Most batches of a channel that have left the replica and that the ingress has not acknowledged."""
ACKNOWLEDGED_BATCHES = 4
"""Number of batches that one acknowledgement stands for. More batches may leave while it is on its way."""


@dataclass(frozen=True, slots=True)
class ChannelId:
    """Identity of a channel, which carries the deltas of one ingress's streams on one replica."""

    ingress_id: str
    number: int
    """Number of the channel in its ingress. A channel that has ended is never opened again."""


@dataclass(frozen=True, slots=True)
class StreamFailure:
    """Failure of one stream of a channel; its other streams go on."""

    number: int
    error: ServingError


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
    others = {} if rest is None else dict(zip(_OTHER_FIELDS, rest, strict=True))
    return TokenDelta(request_id, start, token_ids, text, Usage(*usage), stats=stats, **others)


def is_last(packed: PackedDelta) -> bool:
    """Return True if no delta of the stream follows."""
    rest = packed[-1]
    return rest is not None and rest[_OTHER_FIELDS.index("finish_reason")] is not None


def _packed(number: int, delta: TokenDelta) -> PackedDelta:
    rest = _others(delta)
    return (number, delta.start, delta.token_ids, delta.text, _counts(delta.usage), None if rest == _PLAIN else rest)
