"""Values that cross the wire between an ingress and a replica.

A *stream* is the output of one sequence. A *channel* carries all streams of one ingress on one replica. A *batch* is
one message of a channel: deltas of different streams, and one report of the load, in MessagePack. To pickle them takes
several times as long.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import msgspec

from replicas.errors import ServingError
from replicas.protocol import GenerateRequest, ReplicaStats, TokenDelta

NumberedRequest = tuple[int, GenerateRequest]
"""Request, and the number of its stream in a channel."""


WINDOW_BATCHES = 32
"""Most batches of a channel that have left the replica and that the ingress has not acknowledged."""
ACKNOWLEDGED_BATCHES = 16
"""Number of batches that one acknowledgement stands for, since it is a call through Serve, which costs as much as
several batches. More batches may leave while it is on its way."""


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
    deltas: list[tuple[int, TokenDelta]]
    """Deltas, each with the number of its stream and without stats of its own."""


def encoded(batch: DeltaBatch) -> bytes:
    """Return a batch as one message, which Ray carries as it is."""
    return _ENCODER.encode(batch)


def decoded(message: bytes) -> DeltaBatch:
    """Return the batch of a message."""
    return _DECODER.decode(message)


def _decoded_error(_: type, pickled: bytes) -> ServingError:
    error: ServingError = pickle.loads(pickled)
    return error


_ENCODER = msgspec.msgpack.Encoder(enc_hook=pickle.dumps)
"""Encoder of batches; errors, which are rare, are pickled."""
_DECODER = msgspec.msgpack.Decoder(DeltaBatch, dec_hook=_decoded_error)
