"""Channels of a replica: each carries the deltas of all streams that one ingress has there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from replicas.delta_batch import ChannelId, DeltaBatch
from replicas.engine.async_engine import AsyncEngine
from replicas.engine.outbox import Outbox
from replicas.errors import ReplicaLost
from replicas.protocol import GenerateRequest

_READER_LIMIT_S = 15.0
"""Longest time for which streams wait for the reader of their channel, seconds."""


@dataclass(slots=True)
class _Channel:
    outbox: Outbox = field(default_factory=Outbox)
    deadline: asyncio.TimerHandle | None = None
    """End of the wait for a reader; None: it is there."""


class DeltaChannels:
    """Channels of a replica to the ingresses.

    A channel begins with its first stream or with its reader, whichever comes first. It ends with its reader, or when
    none comes in time: then every stream in it is aborted and its call fails.

    Invariants: a channel has a reader, or a limit on the wait for one. A stream is in a channel, or its call has ended.
    """

    def __init__(
        self, engine: AsyncEngine, is_lost: Callable[[str], bool], reader_limit_s: float = _READER_LIMIT_S
    ) -> None:
        """`is_lost` says if the ingress with an id is gone; `reader_limit_s` bounds the wait for a reader."""
        self._engine = engine
        self._reader_limit_s = reader_limit_s
        self._is_lost = is_lost
        self._channels: dict[ChannelId, _Channel] = {}

    async def generate(self, request: GenerateRequest, channel_id: ChannelId, number: int) -> None:
        """Generate one request as stream `number` of a channel; return once the channel's reader has its last delta.

        Cancelling the call aborts the request.

        Raises:
            ReplicaLost: the channel has ended before. If its ingress is alive, it resumes the request elsewhere.
        """
        channel = self._channels.get(channel_id) or self._opened(channel_id)
        try:
            await self._engine.generate_into(request, channel.outbox, number)
        finally:
            if channel.deadline is not None and channel.outbox.num_streams == 0:
                self._close(channel_id, channel)

    async def read(self, channel_id: ChannelId) -> AsyncGenerator[DeltaBatch, None]:
        """Yield the deltas of a channel's streams; closing the generator ends the channel.

        Raises:
            ReplicaLost: the ingress is lost.
        """
        channel = self._channels.get(channel_id) or self._opened(channel_id)
        if channel.deadline is not None:
            channel.deadline.cancel()
            channel.deadline = None
        try:
            while True:
                deltas = await channel.outbox.take()
                if self._is_lost(channel_id.ingress_id):
                    raise ReplicaLost(
                        f"ingress {channel_id.ingress_id} no longer sends polls or requests", has_died=False
                    )
                yield DeltaBatch.of(self._engine.last_stats, deltas)
        finally:
            self._close(channel_id, channel)

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        for channel in self._channels.values():
            channel.outbox.check_invariants()
            assert channel.deadline is None or channel.outbox.num_streams > 0

    def _opened(self, channel_id: ChannelId) -> _Channel:
        channel = self._channels[channel_id] = _Channel()
        channel.deadline = asyncio.get_running_loop().call_later(self._reader_limit_s, self._close, channel_id, channel)
        return channel

    def _close(self, channel_id: ChannelId, channel: _Channel) -> None:
        if channel.deadline is not None:
            channel.deadline.cancel()
        if self._channels.get(channel_id) is channel:
            del self._channels[channel_id]
        channel.outbox.close(ReplicaLost("the channel to the ingress has ended", has_died=False))
