"""Channels of one ingress: each carries the deltas of all its streams on one replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from replicas.delta_batch import ChannelId, DeltaBatch, PackedDelta, is_last, unpacked
from replicas.errors import ReplicaLost
from replicas.protocol import GenerateRequest, ReplicaStats, TokenDelta, merge


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Limits of the times in a channel's life."""

    idle_s: float = 1.0
    """Time for which a channel without streams stays open, seconds."""
    last_delta_s: float = 5.0
    """Longest wait for the last delta of a stream whose call has ended, seconds: the two travel apart."""


_DEFAULT_LIMITS = ChannelLimits()


class ChannelTransport(Protocol):
    """Transport of calls to replicas; raises only `ServingError`s."""

    def submit(
        self, request: GenerateRequest, ranking: list[str], channel_id: ChannelId, number: int
    ) -> AsyncGenerator[str, None]:
        """Have a replica generate a request into stream `number` of a channel. Closing the generator aborts it.

        Yields the id of the replica that takes it. The generator ends after the last delta, or with an error.
        """

    def read(self, replica_id: str, channel_id: ChannelId) -> AsyncGenerator[DeltaBatch, None]:
        """Yield the deltas of the channel's streams on a replica; ends at once if the replica is not there."""


class IncomingStream:
    """Stream of one request at the ingress: merges the deltas that its reader has not taken.

    It is bounded by the request's `max_tokens`, and holds up no other stream of its channel.
    """

    def __init__(self, request_id: str, number: int, channel: _Channel) -> None:
        self.number = number
        self.channel = channel
        self.is_accepted = False
        """True once a replica has taken the request."""
        self._request_id = request_id
        self._waiting: list[tuple[PackedDelta, ReplicaStats]] = []
        self._is_complete = False
        self._error: Exception | None = None
        self._has_news = asyncio.Event()

    def put(self, packed: PackedDelta, stats: ReplicaStats) -> None:
        """Add the next delta."""
        self._waiting.append((packed, stats))
        self._is_complete = is_last(packed)
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """End the stream with `error` after the deltas that wait, unless its last delta is already here."""
        if not self._is_complete and self._error is None:
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
        return merge([unpacked(packed, self._request_id, stats) for packed, stats in waiting])


class _Channel:
    """Channel to one replica, with its streams. Those that no replica has accepted yet are meant for it."""

    def __init__(self, channel_id: ChannelId, replica_id: str, now_idle: Callable[[_Channel], asyncio.TimerHandle]):
        self.id = channel_id
        self.replica_id = replica_id
        self.streams: dict[int, IncomingStream] = {}
        self.reading: asyncio.Task[None] | None = None
        self.error: Exception | None = None
        """End of the channel; None: it is open."""
        self.is_stopping = False
        """True if the replica was being stopped in order when its last deltas came."""
        self._now_idle = now_idle
        self._closing: asyncio.TimerHandle | None = None

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
            self._closing = self._now_idle(self)

    def deliver(self, deltas: Iterable[PackedDelta], stats: ReplicaStats) -> None:
        """Give the deltas of a batch to their streams."""
        for packed in deltas:
            stream = self.streams.get(packed[0])
            if stream is not None:
                stream.put(packed, stats)

    def end(self, error: Exception) -> None:
        """End the channel, and with it every stream that the replica has accepted."""
        self.error = error
        for stream in list(self.streams.values()):
            if stream.is_accepted:
                stream.fail(self.as_stopped(error))

    def as_stopped(self, error: Exception) -> Exception:
        """Return an error of the replica; the end of one that is being stopped in order is no death."""
        if not (self.is_stopping and isinstance(error, ReplicaLost)):
            return error
        stopped = ReplicaLost("the replica was stopped before the request ended", has_died=False)
        stopped.__cause__ = error
        return stopped


class ChannelPool:
    """Channels of one ingress, one to each replica that serves its streams.

    A request is submitted by a call of its own, which tells the replica that has taken it, aborts it when it is closed,
    and fails with it. Its deltas come through the channel to that replica, together with those of other streams. The
    end of a channel is the end of all its streams. A channel without streams is closed after a while.

    Invariants:
        A stream is in exactly one channel until it has ended. Once accepted, that channel leads to the replica that
        generates it.
        A channel that is not idle has a reader, or its accepted streams have failed.
    """

    def __init__(
        self,
        ingress_id: str,
        transport: ChannelTransport,
        is_stopping: Callable[[str], bool],
        limits: ChannelLimits = _DEFAULT_LIMITS,
    ) -> None:
        """`is_stopping` says if a replica is being stopped in order: then its end is no death."""
        self._ingress_id = ingress_id
        self._transport = transport
        self._is_stopping = is_stopping
        self._limits = limits
        self._numbers = count(1)
        self._channels: dict[tuple[str, ChannelId], _Channel] = {}
        self._current: dict[str, _Channel] = {}
        """Channel for new streams of each replica."""

    async def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of one request. Closing the generator aborts the request."""
        with self._registered(request.request_id, ranking[0]) as stream:
            calling = asyncio.create_task(self._call(stream, request, ranking))
            try:
                is_finished = False
                while not is_finished:
                    delta = await stream.take()
                    is_finished = delta.finish_reason is not None
                    yield delta
            finally:
                calling.cancel()

    def close(self) -> None:
        """Close the channels without streams. The others are closed once their streams have ended."""
        for channel in list(self._channels.values()):
            if not channel.streams:
                self._close_idle(channel)

    def serving(self) -> set[str]:
        """Return the replicas that have streams of this ingress."""
        return {
            channel.replica_id
            for channel in self._channels.values()
            if any(stream.is_accepted for stream in channel.streams.values())
        }

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        for (replica_id, channel_id), channel in self._channels.items():
            assert (channel.replica_id, channel.id) == (replica_id, channel_id) and channel.error is None
            assert channel.reading is not None
            assert all(stream.channel is channel for stream in channel.streams.values())
        assert set(self._current.values()) <= set(self._channels.values())

    @contextmanager
    def _registered(self, request_id: str, replica_id: str) -> Iterator[IncomingStream]:
        channel = self._current.get(replica_id)
        if channel is None:
            channel = self._open(replica_id, ChannelId(self._ingress_id, next(self._numbers)))
        stream = IncomingStream(request_id, next(self._numbers), channel)
        channel.add(stream)
        try:
            yield stream
        finally:
            stream.channel.remove(stream)

    async def _call(self, stream: IncomingStream, request: GenerateRequest, ranking: list[str]) -> None:
        """Submit a request and watch over its call; an error ends the stream."""
        try:
            submitted = self._transport.submit(request, ranking, stream.channel.id, stream.number)
            async with aclosing(submitted) as replica_ids:
                async for replica_id in replica_ids:
                    self._accepted(stream, replica_id)
        except Exception as error:  # given to the stream's reader, which raises it
            stream.fail(stream.channel.as_stopped(error) if stream.is_accepted else error)
            return
        await asyncio.sleep(self._limits.last_delta_s)
        stream.fail(ReplicaLost("the last tokens of the replica did not arrive", has_died=False))

    def _accepted(self, stream: IncomingStream, replica_id: str) -> None:
        """Note the replica that generates a stream: from now on the stream ends with the channel to it."""
        stream.is_accepted = True
        channel = meant = stream.channel
        if meant.replica_id != replica_id or meant.was_closed:
            channel = self._channels.get((replica_id, meant.id)) or self._open(replica_id, meant.id)
            meant.remove(stream)
        channel.add(stream)

    def _open(self, replica_id: str, channel_id: ChannelId) -> _Channel:
        channel = _Channel(channel_id, replica_id, self._now_idle)
        self._channels[replica_id, channel_id] = channel
        self._current.setdefault(replica_id, channel)
        channel.reading = asyncio.create_task(self._read(channel))
        return channel

    async def _read(self, channel: _Channel) -> None:
        error: Exception = ReplicaLost("the replica has ended the channel", has_died=False)
        try:
            async with aclosing(self._transport.read(channel.replica_id, channel.id)) as batches:
                async for batch in batches:
                    channel.is_stopping = self._is_stopping(channel.replica_id)
                    stats = replace(batch.stats, is_draining=True) if channel.is_stopping else batch.stats
                    channel.deliver(batch.deltas, stats)
        except Exception as failure:  # given to the streams' readers, which raise it
            error = failure
        self._forget(channel)
        channel.end(error)

    def _now_idle(self, channel: _Channel) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._limits.idle_s, self._close_idle, channel)

    def _close_idle(self, channel: _Channel) -> None:
        if channel.error is None and channel.reading is not None:
            self._forget(channel)
            channel.error = ReplicaLost("the channel was closed", has_died=False)
            channel.reading.cancel()

    def _forget(self, channel: _Channel) -> None:
        self._channels.pop((channel.replica_id, channel.id), None)
        if self._current.get(channel.replica_id) is channel:
            del self._current[channel.replica_id]
