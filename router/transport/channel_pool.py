"""Channels of one ingress: each carries the deltas of all its streams on one replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from itertools import count

from replicas.errors import ReplicaLost, ServingError
from replicas.protocol import Band, GenerateRequest, TokenDelta
from replicas.transport.wire import ChannelId
from router.transport.channel import Channel, IncomingStream
from router.transport.submission import ChannelLimits, ChannelTransport, Submission

_DEFAULT_LIMITS = ChannelLimits()


class ChannelPool:
    """Channels of one ingress, one to each replica that serves its streams.

    One call submits the requests that are sent to a replica in one turn of the event loop. A batch request waits a
    little for others, and longer while an earlier call is on its way, unless an urgent one comes: a call of Ray costs
    as much as dozens of deltas. The call tells the replica that has taken the requests, aborts them when it is closed,
    and fails with them. Their deltas come through the channel to that replica, together with those of other streams.
    The end of a channel is the end of all its streams. A channel without streams is closed after a while.

    `_submit` adds a request to a submission, which has `_begin` make its call when it is due. During the call the
    submission reports each stream's replica to `_on_accepted`, and to `_on_arrived` that the next call need not wait.

    Invariants:
        A stream is in exactly one channel until it has ended. Once accepted, that channel leads to the replica that
        generates it.
        A channel that is not idle has a reader, or its accepted streams have failed. The replica learns of every
        `ACKNOWLEDGED_BATCHES` batches that the reader has taken.
    """

    def __init__(
        self,
        ingress_id: str,
        transport: ChannelTransport,
        is_stopping: Callable[[str], bool],
        limits: ChannelLimits = _DEFAULT_LIMITS,
    ) -> None:
        """`is_stopping` says if a replica is being stopped gracefully: then its end is no death."""
        self._ingress_id = ingress_id
        self._transport = transport
        self._is_stopping = is_stopping
        self._limits = limits
        self._numbers = count(1)
        self._channels: dict[tuple[str, ChannelId], Channel] = {}
        self._current: dict[str, Channel] = {}
        """Channel for new streams of each replica."""
        self._unsent: dict[Channel, Submission] = {}
        """Requests that will be submitted together, by the channel to the replica that they are meant for."""
        self._on_way: dict[Submission, Channel] = {}
        """Submissions that no replica has taken yet, with the channel to the replica that they are meant for."""

    async def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of one request. Closing the generator aborts the request."""
        with self._register(request.request_id, ranking[0]) as stream:
            submission = self._submit(stream, request, ranking)
            try:
                is_finished = False
                while not is_finished:
                    delta = await stream.take()
                    is_finished = delta.finish_reason is not None
                    yield delta
            finally:
                submission.leave(stream)

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
    def _register(self, request_id: str, replica_id: str) -> Iterator[IncomingStream]:
        channel = self._current.get(replica_id)
        if channel is None:
            channel = self._open(replica_id, ChannelId(self._ingress_id, next(self._numbers)))
        stream = IncomingStream(request_id, next(self._numbers), channel)
        channel.add(stream)
        try:
            yield stream
        finally:
            stream.channel.remove(stream)

    def _submit(self, stream: IncomingStream, request: GenerateRequest, ranking: list[str]) -> Submission:
        """Submit a request, together with others that are sent to the replica now or, for batch requests, soon."""
        channel = stream.channel
        submission = self._unsent.get(channel)
        if submission is not None and not submission.has_room_for(request):
            self._begin(channel, submission)
            submission = None
        if submission is None:
            begin = partial(self._begin, channel)
            submission = Submission(self._transport, ranking, channel.id, self._limits, begin)
            self._unsent[channel] = submission
        submission.add(stream, request)
        submission.begin_within(self._batching_delay_s(channel) if request.band is Band.BATCH else 0.0)
        return submission

    def _batching_delay_s(self, channel: Channel) -> float:
        is_behind = channel in self._on_way.values()
        return self._limits.batching_delay_in_flight_s if is_behind else self._limits.batching_delay_s

    def _begin(self, channel: Channel, submission: Submission) -> None:
        """Begin the call of a submission; the channel's next request begins another one."""
        if self._unsent.get(channel) is submission:
            del self._unsent[channel]
        if submission.call(self._on_accepted, partial(self._on_arrived, channel, submission)):
            self._on_way[submission] = channel

    def _on_arrived(self, channel: Channel, submission: Submission) -> None:
        """Note that a replica has taken a submission, or that it has failed; the next one no longer waits for it."""
        self._on_way.pop(submission, None)
        if (waiting := self._unsent.get(channel)) is not None:
            waiting.begin_within(self._batching_delay_s(channel))

    def _on_accepted(self, stream: IncomingStream, replica_id: str) -> None:
        """Note the replica that generates a stream: from now on the stream ends with the channel to it."""
        stream.is_accepted = True
        channel = meant = stream.channel
        if meant.replica_id != replica_id or meant.was_closed:
            channel = self._channels.get((replica_id, meant.id)) or self._open(replica_id, meant.id)
            meant.remove(stream)
        channel.add(stream)

    def _open(self, replica_id: str, channel_id: ChannelId) -> Channel:
        channel = Channel(channel_id, replica_id, self._on_idle)
        self._channels[replica_id, channel_id] = channel
        self._current.setdefault(replica_id, channel)
        channel.reading = asyncio.create_task(self._read(channel))
        return channel

    async def _read(self, channel: Channel) -> None:
        error: Exception = ReplicaLost("the replica has ended the channel", has_died=False)
        try:
            async with aclosing(self._transport.read(channel.replica_id, channel.id)) as batches:
                async for batch in batches:
                    channel.is_stopping = self._is_stopping(channel.replica_id)
                    channel.deliver(batch)
                    channel.num_read += 1
                    if channel.is_acknowledgement_due and channel.acknowledging is None:
                        channel.acknowledging = asyncio.create_task(self._acknowledge(channel))
        except Exception as failure:  # given to the streams' readers, which raise it
            error = failure
        self._forget(channel)
        channel.end(error)

    async def _acknowledge(self, channel: Channel) -> None:
        """Tell the replica how many batches have been read, until it knows: it sends no more without that."""
        try:
            while channel.is_acknowledgement_due:
                num_read = channel.num_read
                try:
                    await self._transport.acknowledge(channel.replica_id, channel.id, num_read)
                except ServingError:
                    await asyncio.sleep(self._limits.retry_s)
                else:
                    channel.num_acknowledged = num_read
        finally:
            channel.acknowledging = None

    def _on_idle(self, channel: Channel) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._limits.idle_s, self._close_idle, channel)

    def _close_idle(self, channel: Channel) -> None:
        if channel.error is None and channel.reading is not None:
            self._forget(channel)
            channel.error = ReplicaLost("the channel was closed", has_died=False)
            channel.reading.cancel()

    def _forget(self, channel: Channel) -> None:
        self._channels.pop((channel.replica_id, channel.id), None)
        if self._current.get(channel.replica_id) is channel:
            del self._current[channel.replica_id]
        if channel.acknowledging is not None:
            channel.acknowledging.cancel()
