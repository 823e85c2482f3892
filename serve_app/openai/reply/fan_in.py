"""Merging of the delta streams of one request's sequences into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass

from replicas.errors import RequestAborted, ServingError, is_cancelled
from replicas.protocol import TokenDelta
from router.dispatch import MAX_OPEN_STREAMS

DeltaStream = AsyncGenerator[TokenDelta, None]


@dataclass(frozen=True, slots=True)
class IndexedDelta:
    """Delta with the index of its stream."""

    index: int
    delta: TokenDelta


DeltaContext = AbstractAsyncContextManager[AsyncGenerator[IndexedDelta, None]]
"""Context in which the deltas of a request's streams can be read."""


def merge_streams(streams: Sequence[DeltaStream]) -> DeltaContext:
    """Return the deltas of all streams, in order of arrival.

    One stream is read in the reader's own task, several streams in one task each; of many, some wait until others have
    ended. The iteration ends when every stream has given its last delta. The first failure of a stream, a
    `ServingError`, is raised and ends it. Leaving the context closes every stream, which aborts the unfinished
    requests. While a reader is slow, no stream is read, and its deltas merge in the router's `IncomingStream`.
    """
    return aclosing(_indexed(0, streams[0]) if len(streams) == 1 else _merged(streams))


async def _indexed(index: int, stream: DeltaStream) -> AsyncGenerator[IndexedDelta, None]:
    """Yield the deltas of one stream up to its last one."""
    try:
        async with aclosing(stream):
            async for delta in stream:
                if delta.finish_reason is None:
                    yield IndexedDelta(index, delta)
                    continue
                # Close now: the request's slot is free before the client has read the last delta.
                await stream.aclose()
                yield IndexedDelta(index, delta)
                return
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise RequestAborted("the request was cancelled") from None
    raise ServingError("the sequence's stream ended before the sequence did")


async def _merged(streams: Sequence[DeltaStream]) -> AsyncGenerator[IndexedDelta, None]:
    """Yield the deltas of several streams, each advanced by its own task."""
    arrived: asyncio.Queue[IndexedDelta | Exception] = asyncio.Queue(maxsize=len(streams))

    may_open = asyncio.Semaphore(MAX_OPEN_STREAMS)

    async def pump(index: int, stream: DeltaStream) -> None:
        try:
            async with may_open, aclosing(_indexed(index, stream)) as deltas:
                async for item in deltas:
                    await arrived.put(item)
        except Exception as error:  # passed on to the reader, which raises it
            await arrived.put(error)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item.delta.finish_reason is not None
            yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
