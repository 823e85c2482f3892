"""Channels of a replica: each carries the deltas of all streams that one ingress has there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from replicas.engine.async_engine import AsyncEngine
from replicas.engine.outbox import DeltaOutbox
from replicas.errors import ReplicaLost, ServingError, as_serving_error
from replicas.protocol import TokenDelta
from replicas.transport.wire import WINDOW_BATCHES, ChannelId, DeltaBatch, NumberedRequest, StreamFailure

logger = logging.getLogger(__name__)

_CHECK_PERIOD_S = 1.0
"""Time between two looks whether an ingress is lost that acknowledges nothing, seconds."""


@dataclass(frozen=True, slots=True)
class ChannelWaits:
    """Longest waits of a replica's channels."""

    reader_s: float = 15.0
    """Longest time for which streams wait for the reader of their channel, seconds."""
    idle_s: float = 3.0
    """Time after which a channel without streams ends, seconds. It is longer than an ingress keeps one open, so it ends
    those of ingresses that are gone: Ray (2.60) lets a call outlive its caller."""


_DEFAULT_WAITS = ChannelWaits()


class Credits:
    """Credits of a channel: batches that may leave before the ingress has acknowledged earlier ones.

    Serve's queue between a replica and its caller has no bound, and neither has Ray's list of results that the caller
    has not read. With an ingress slower than its replicas they grew by thousands of deltas a second. Without credits
    the deltas merge in the outbox instead.

    Invariant: 0 <= num_sent - num_acknowledged <= WINDOW_BATCHES.
    """

    def __init__(self) -> None:
        self._num_sent = 0
        self._num_acknowledged = 0
        self._has_credit = asyncio.Event()
        self._has_credit.set()

    @property
    def has_credit(self) -> bool:
        """True if a batch may leave."""
        return self._has_credit.is_set()

    def spend(self) -> None:
        """Note that a batch leaves."""
        self._num_sent += 1
        self._update()

    def acknowledge(self, num_batches: int) -> None:
        """Note that the ingress has read the first `num_batches`. Acknowledgements may arrive in any order."""
        self._num_acknowledged = max(self._num_acknowledged, min(num_batches, self._num_sent))
        self._update()

    async def available(self, limit_s: float) -> bool:
        """Wait until a batch may leave, at most `limit_s`; return whether one may."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._has_credit.wait()
        return self.has_credit

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        assert 0 <= self._num_sent - self._num_acknowledged <= WINDOW_BATCHES

    def _update(self) -> None:
        if self._num_sent - self._num_acknowledged < WINDOW_BATCHES:
            self._has_credit.set()
        else:
            self._has_credit.clear()


@dataclass(slots=True)
class _Channel:
    outbox: DeltaOutbox = field(default_factory=DeltaOutbox)
    generating: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Task of each stream, by the stream's number."""
    credits: Credits = field(default_factory=Credits)
    deadline: asyncio.TimerHandle | None = None
    """End of the wait for a reader; None: it is there."""


class ReplicaChannels:
    """Channels of a replica to the ingresses.

    A channel begins with its first stream or with its reader, whichever comes first. It ends with its reader, or when
    none comes in time: then every stream in it is aborted and its call fails.

    Invariants: a channel has a reader, or a limit on the wait for one. A stream is in a channel, or its call has ended.
    """

    def __init__(
        self, replica_id: str, engine: AsyncEngine, is_lost: Callable[[str], bool], waits: ChannelWaits = _DEFAULT_WAITS
    ) -> None:
        """`is_lost` says if the ingress with an id is gone."""
        self._replica_id = replica_id
        self._engine = engine
        self._waits = waits
        self._is_lost = is_lost
        self._channels: dict[ChannelId, _Channel] = {}

    async def submit(
        self, requests: Sequence[NumberedRequest], channel_id: ChannelId
    ) -> AsyncGenerator[str | StreamFailure, None]:
        """Generate requests as streams of a channel, until the channel's reader has the last delta of each one.

        Yields the replica's id when all can be aborted. Then it yields the streams that fail otherwise: the channel has
        ended before (`ReplicaLost`; if its ingress is alive, it resumes the requests elsewhere), or there is a fault.
        Closing the generator aborts all its requests.
        """
        channel = self._channels.get(channel_id) or self._open(channel_id)
        ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        tasks: dict[asyncio.Task[None], int] = {}
        for number, request in requests:
            if (earlier := channel.generating.get(number)) is not None:
                earlier.cancel()  # Serve makes a call again if it does not know that the replica has taken it.
            task = asyncio.create_task(self._engine.generate_into(request, channel.outbox, number))
            task.add_done_callback(partial(self._on_stream_end, channel_id, channel, number))
            task.add_done_callback(ended.put_nowait)
            channel.generating[number], tasks[task] = task, number
        try:
            yield self._replica_id
            for _ in tasks:
                task = await ended.get()
                if not task.cancelled() and (error := task.exception()) is not None:
                    if not isinstance(error, ServingError):
                        logger.error("a stream failed", exc_info=error)
                    yield StreamFailure(tasks[task], as_serving_error(error))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def abort(self, channel_id: ChannelId, numbers: Sequence[int]) -> None:
        """Abort streams of a channel; those that are not here, or are no longer here, are passed by."""
        if (channel := self._channels.get(channel_id)) is not None:
            for number in channel.generating.keys() & set(numbers):
                channel.generating[number].cancel()

    async def read(self, channel_id: ChannelId) -> AsyncGenerator[DeltaBatch, None]:
        """Yield the deltas of a channel's streams, no faster than the ingress acknowledges them. Ends when it is idle.

        Closing the generator ends the channel.

        Raises:
            ReplicaLost: the ingress is lost.
        """
        channel = self._channels.get(channel_id) or self._open(channel_id)
        if channel.deadline is not None:
            channel.deadline.cancel()
            channel.deadline = None
        try:
            while True:
                while not await channel.credits.available(_CHECK_PERIOD_S):
                    self._check_ingress(channel_id.ingress_id)
                deltas = await self._next_deltas(channel)
                if not deltas and not channel.generating:
                    return
                self._check_ingress(channel_id.ingress_id)
                if deltas:
                    channel.credits.spend()
                    yield DeltaBatch(self._engine.last_stats, deltas)
        finally:
            self._close(channel_id, channel)

    def acknowledge(self, channel_id: ChannelId, num_batches: int) -> None:
        """Note that the ingress has read the first `num_batches` of a channel, if the channel is still here."""
        if (channel := self._channels.get(channel_id)) is not None:
            channel.credits.acknowledge(num_batches)

    def _check_ingress(self, ingress_id: str) -> None:
        """Raise `ReplicaLost` if an ingress is lost."""
        if self._is_lost(ingress_id):
            raise ReplicaLost(f"ingress {ingress_id} no longer sends polls or requests", has_died=False)

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        for channel in self._channels.values():
            channel.outbox.check_invariants()
            channel.credits.check_invariants()
            assert channel.deadline is None or channel.generating

    async def _next_deltas(self, channel: _Channel) -> list[tuple[int, TokenDelta]]:
        """Return the deltas that are due next; none if there are none for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._waits.idle_s):
                return await channel.outbox.take()
        return []

    def _open(self, channel_id: ChannelId) -> _Channel:
        channel = self._channels[channel_id] = _Channel()
        channel.deadline = asyncio.get_running_loop().call_later(self._waits.reader_s, self._close, channel_id, channel)
        return channel

    def _on_stream_end(self, channel_id: ChannelId, channel: _Channel, number: int, task: asyncio.Task[None]) -> None:
        """Note the end of a stream's task. Without streams there is no wait for a reader."""
        if channel.generating.get(number) is task:
            del channel.generating[number]
        if channel.deadline is not None and not channel.generating:
            self._close(channel_id, channel)

    def _close(self, channel_id: ChannelId, channel: _Channel) -> None:
        if channel.deadline is not None:
            channel.deadline.cancel()
        if self._channels.get(channel_id) is channel:
            del self._channels[channel_id]
        channel.outbox.close(ReplicaLost("the channel to the ingress has ended", has_died=False))
