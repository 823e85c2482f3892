"""Submission of requests to a replica by one call."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from replicas.errors import ReplicaLost, ServingError
from replicas.protocol import GenerateRequest
from replicas.transport.wire import ChannelId, DeltaBatch, NumberedRequest, StreamFailure
from router.transport.channel import IncomingStream


@dataclass(frozen=True, slots=True)
class ChannelLimits:
    """Limits of a channel, and of the calls that submit its requests."""

    idle_s: float = 1.0
    """Time for which a channel without streams stays open, seconds."""
    last_delta_s: float = 5.0
    """Longest wait for the last delta of a stream whose call has ended, seconds: the two travel apart."""
    batching_delay_s: float = 0.015
    """Wait of a batch request for others to be submitted with, seconds. A busy replica holds more batch requests than
    it has slots, so its slots stay full."""
    batching_delay_in_flight_s: float = 0.25
    """Longest wait of a batch request while an earlier call is on its way, seconds. Calls are slow on a busy machine:
    there they become fewer and larger."""
    retry_s: float = 1.0
    """Time between two attempts to abort a stream in its replica, or to acknowledge batches, seconds."""
    max_submitted: int = 64
    """Most requests that one call submits."""
    max_submitted_tokens: int = 16_384
    """Most tokens of all requests that one call submits, unless it is a single one: Ray carries a message of up to
    100 KB by itself, and larger ones by the object store."""


class ChannelTransport(Protocol):
    """Transport of calls to replicas; raises only `ServingError`s."""

    def submit(
        self, requests: Sequence[NumberedRequest], ranking: list[str], channel_id: ChannelId
    ) -> AsyncGenerator[str | StreamFailure, None]:
        """Have a replica generate requests into streams of a channel. Closing the generator aborts all of them.

        Yields the id of the replica that takes them, then the streams that fail by themselves. The generator ends
        after the last delta of the last stream, or with an error of all streams.
        """

    async def abort(self, replica_id: str, channel_id: ChannelId, numbers: Sequence[int]) -> None:
        """Abort streams of a channel; those that the replica does not have, or has no longer, are passed by."""

    async def acknowledge(self, replica_id: str, channel_id: ChannelId, num_batches: int) -> None:
        """Tell a replica that the first `num_batches` of a channel have been read."""

    def read(self, replica_id: str, channel_id: ChannelId) -> AsyncGenerator[DeltaBatch, None]:
        """Yield the deltas of the channel's streams on a replica; ends at once if the replica is not there."""


class Submission:
    """Requests that one call submits to a replica, and that call.

    A stream leaves when its reader does. The last one cancels the call, which aborts what has not ended. An earlier one
    that has not ended is aborted by another call.
    """

    def __init__(
        self,
        transport: ChannelTransport,
        ranking: list[str],
        channel_id: ChannelId,
        limits: ChannelLimits,
        on_due: Callable[[Submission], None],
    ) -> None:
        """`on_due` is called with the submission when its call is to begin."""
        self._transport = transport
        self._ranking = ranking
        self._channel_id = channel_id
        self._limits = limits
        self._on_due = on_due
        self._requests: dict[int, GenerateRequest] = {}
        """Requests that the call has not sent, by the numbers of their streams."""
        self._num_tokens = 0
        self._streams: dict[int, IncomingStream] = {}
        """Streams whose readers are there."""
        self._created_s = asyncio.get_running_loop().time()
        self._beginning: asyncio.Handle | None = None
        self._begins_s = math.inf
        """Time of the event loop at which the call begins."""
        self._calling: asyncio.Task[None] | None = None
        """The call, while it runs."""
        self._replica_id: str | None = None
        """Replica that has taken the requests; None: none yet."""
        self._to_abort: set[int] = set()
        """Streams that the replica may still generate, although their readers have left."""
        self._aborting: asyncio.Task[None] | None = None

    def has_room_for(self, request: GenerateRequest) -> bool:
        """Return True if the call may submit this request besides the others."""
        num_tokens = self._num_tokens + _num_tokens(request)
        return not self._requests or (
            len(self._requests) < self._limits.max_submitted and num_tokens <= self._limits.max_submitted_tokens
        )

    def add(self, stream: IncomingStream, request: GenerateRequest) -> None:
        """Add a request, before the call begins."""
        self._requests[stream.number] = request
        self._streams[stream.number] = stream
        self._num_tokens += _num_tokens(request)

    def begin_within(self, wait_s: float) -> None:
        """Have the call begin when the first request has waited for `wait_s`, unless an earlier time has been set."""
        begins_s = self._created_s + wait_s
        if begins_s < self._begins_s:
            if self._beginning is not None:
                self._beginning.cancel()
            self._beginning = asyncio.get_running_loop().call_at(begins_s, self._on_due, self)
            self._begins_s = begins_s

    def call(self, on_accepted: Callable[[IncomingStream, str], None], on_arrived: Callable[[], None]) -> bool:
        """Begin the call; return False if there is none, as all readers have left.

        `on_accepted` is called with each stream and its replica. `on_arrived` is called when a replica has taken the
        requests, and at the end of the call.
        """
        if self._beginning is not None:
            self._beginning.cancel()
            self._beginning = None
        if self._streams:
            self._calling = asyncio.create_task(self._run(on_accepted, on_arrived))
            self._calling.add_done_callback(partial(self._on_end, on_arrived))
        return self._calling is not None

    def leave(self, stream: IncomingStream) -> None:
        """Note that a stream's reader has left; the stream is aborted unless it has ended."""
        del self._streams[stream.number]
        unsent = self._requests.pop(stream.number, None)
        if unsent is not None:
            self._num_tokens -= _num_tokens(unsent)
        elif self._streams and not stream.has_ended:
            self._to_abort.add(stream.number)
            self._abort()
        if not self._streams:
            for task in (self._calling, self._aborting):
                if task is not None:
                    task.cancel()

    async def _run(self, on_accepted: Callable[[IncomingStream, str], None], on_arrived: Callable[[], None]) -> None:
        """Submit the requests and watch over the call; an error ends their streams."""
        requests = list(self._requests.items())
        self._requests.clear()
        try:
            async with aclosing(self._transport.submit(requests, self._ranking, self._channel_id)) as answers:
                async for answer in answers:
                    if isinstance(answer, StreamFailure):
                        self._fail(answer.error, answer.number)
                    else:
                        self._replica_id = answer
                        for stream in list(self._streams.values()):
                            on_accepted(stream, answer)
                        on_arrived()
                        self._abort()
        except Exception as error:  # given to the streams' readers, which raise it
            self._fail(error, *self._streams)
            return
        finally:
            self._to_abort.clear()
        await asyncio.sleep(self._limits.last_delta_s)
        self._fail(ReplicaLost("the last tokens of the replica did not arrive", has_died=False), *self._streams)

    def _on_end(self, on_arrived: Callable[[], None], _: asyncio.Task[None]) -> None:
        self._calling = None  # A cancelled task refers to its frame, which refers to this object.
        on_arrived()

    def _fail(self, error: Exception, *numbers: int) -> None:
        for number in numbers:
            if (stream := self._streams.get(number)) is not None:
                stream.fail(stream.channel.as_stopped(error) if stream.is_accepted else error)

    def _abort(self) -> None:
        if self._to_abort and self._replica_id is not None and self._aborting is None:
            self._aborting = asyncio.create_task(self._abort_in(self._replica_id))

    async def _abort_in(self, replica_id: str) -> None:
        try:
            while self._to_abort:
                numbers = sorted(self._to_abort)
                try:
                    await self._transport.abort(replica_id, self._channel_id, numbers)
                except ServingError:
                    await asyncio.sleep(self._limits.retry_s)
                else:
                    self._to_abort.difference_update(numbers)
        finally:
            self._aborting = None


def _num_tokens(request: GenerateRequest) -> int:
    return len(request.prompt_token_ids) + len(request.output_token_ids)
