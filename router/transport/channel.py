"""Channel of one ingress to one replica, and its streams as the ingress sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from replicas.errors import ReplicaLost
from replicas.protocol import ReplicaStats, TokenDelta, merge
from replicas.transport.wire import ACKNOWLEDGED_BATCHES, ChannelId, DeltaBatch


class IncomingStream:
    """Stream of one request at the ingress: merges the deltas that its reader has not taken.

    It is bounded by the request's `max_tokens`, and holds up no other stream of its channel.
    """

    def __init__(self, request_id: str, number: int, channel: Channel) -> None:
        self.number = number
        self.channel = channel
        self.is_accepted = False
        """True once a replica has taken the request."""
        self._request_id = request_id
        self._waiting: list[TokenDelta] = []
        self._stats: ReplicaStats | None = None
        """Load of the replica when the last delta left."""
        self._is_complete = False
        self._error: Exception | None = None
        self._has_news = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """True if the last delta is here, or the stream has failed."""
        return self._is_complete or self._error is not None

    def put(self, delta: TokenDelta, stats: ReplicaStats) -> None:
        """Add the next delta, and the load of the replica when it left."""
        self._waiting.append(delta)
        self._stats = stats
        self._is_complete = delta.finish_reason is not None
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """End the stream with `error` after the deltas that wait, unless its last delta is already here."""
        if not self.has_ended:
            self._error = error
            self.channel.remove(self)
            self._has_news.set()

    async def take(self) -> TokenDelta:
        """Wait for a delta; return all that waits as one delta.

        Raises:
            ServingError: the stream has failed, and all deltas before have been taken.
        """
        await self._has_news.wait()
        if not self._waiting:
            assert self._error is not None
            raise self._error
        waiting, self._waiting = self._waiting, []
        if self._error is None:
            self._has_news.clear()
        return merge(waiting)._replace(request_id=self._request_id, stats=self._stats)


class Channel:
    """Channel to one replica, with its streams. Those that no replica has accepted yet are meant for it."""

    def __init__(self, channel_id: ChannelId, replica_id: str, on_idle: Callable[[Channel], asyncio.TimerHandle]):
        self.id = channel_id
        self.replica_id = replica_id
        self.streams: dict[int, IncomingStream] = {}
        self.reading: asyncio.Task[None] | None = None
        self.error: Exception | None = None
        """End of the channel; None: it is open."""
        self.num_read = 0
        """Number of batches that have been read."""
        self.num_acknowledged = 0
        """Number of batches whose reading the replica knows of."""
        self.acknowledging: asyncio.Task[None] | None = None
        self.is_stopping = False
        """True if the replica was being stopped gracefully when its last deltas came."""
        self._on_idle = on_idle
        self._closing: asyncio.TimerHandle | None = None

    @property
    def is_acknowledgement_due(self) -> bool:
        """True if so many batches have been read since the last acknowledgement that the replica must be told."""
        return self.num_read - self.num_acknowledged >= ACKNOWLEDGED_BATCHES

    @property
    def was_closed(self) -> bool:
        """True if the channel has ended and its replica may be alive, which ends a channel that is idle."""
        return self.error is not None and not (isinstance(self.error, ReplicaLost) and self.error.has_died)

    def add(self, stream: IncomingStream) -> None:
        """Add a stream; it fails at once if it has been accepted and the channel has ended."""
        self.streams[stream.number] = stream
        stream.channel = self
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        if self.error is not None and stream.is_accepted:
            stream.fail(self.as_stopped(self.error))

    def remove(self, stream: IncomingStream) -> None:
        """Remove a stream; deltas of it that still come are dropped."""
        self.streams.pop(stream.number, None)
        if not self.streams and self._closing is None and self.error is None:
            self._closing = self._on_idle(self)

    def deliver(self, batch: DeltaBatch) -> None:
        """Give the deltas of a batch to their streams."""
        stats = replace(batch.stats, is_draining=True) if self.is_stopping else batch.stats
        for number, delta in batch.deltas:
            stream = self.streams.get(number)
            if stream is not None:
                stream.put(delta, stats)

    def end(self, error: Exception) -> None:
        """End the channel, and with it every stream that the replica has accepted."""
        self.error = error
        for stream in list(self.streams.values()):
            if stream.is_accepted:
                stream.fail(self.as_stopped(error))

    def as_stopped(self, error: Exception) -> Exception:
        """Return an error of the replica; the end of one that is being stopped gracefully is no death."""
        if not (self.is_stopping and isinstance(error, ReplicaLost)):
            return error
        stopped = ReplicaLost("the replica was stopped before the request ended", has_died=False)
        stopped.__cause__ = error
        return stopped
