"""Merging of the delta streams of one request's sequences into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from replicas.errors import RequestAborted, ServingError
from replicas.protocol import FinishReason, TokenDelta

DeltaStream = AsyncGenerator[TokenDelta, None]


@dataclass(frozen=True, slots=True)
class IndexedDelta:
    """Delta with the index of its stream."""

    index: int
    delta: TokenDelta


class Deltas(Protocol):
    """Deltas of all streams of a request, in order of arrival; they end when every stream has given its last delta.

    The first failure of a stream is raised and ends the iteration. Leaving the context closes every stream, which
    aborts the unfinished requests. A slow reader holds the streams back, so that waiting deltas merge in the mailboxes.
    """

    async def __aenter__(self) -> Self:
        """Start reading."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close every stream."""
        ...

    def __aiter__(self) -> AsyncIterator[IndexedDelta]:
        """Return the iterator over the deltas."""
        ...

    async def __anext__(self) -> IndexedDelta:
        """Return the next delta of any stream.

        Raises:
            ServingError: a stream failed.
        """
        ...


def read_together(streams: Sequence[DeltaStream]) -> Deltas:
    """Return the merged deltas: one stream is read in the reader's own task, several streams in one task each."""
    return SingleStream(streams[0]) if len(streams) == 1 else MergedStreams(streams)


class SingleStream(AsyncIterator[IndexedDelta]):
    """Deltas of one stream, which the reader's own task advances; see `Deltas`."""

    def __init__(self, stream: DeltaStream) -> None:
        self._stream = stream
        self._is_exhausted = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stream.aclose()

    async def __anext__(self) -> IndexedDelta:
        if self._is_exhausted:
            raise StopAsyncIteration
        try:
            delta = await anext(self._stream)
        except StopAsyncIteration:
            raise _ended_early() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RequestAborted("the request was cancelled") from None
        _raise_if_failed(delta)
        if delta.finish_reason is not None:
            self._is_exhausted = True
            # Close now: the request's slot is free before the client has read the last delta.
            await self._stream.aclose()
        return IndexedDelta(0, delta)


class MergedStreams(AsyncIterator[IndexedDelta]):
    """Deltas of several streams, each advanced by its own task; see `Deltas`."""

    def __init__(self, streams: Sequence[DeltaStream]) -> None:
        self._streams = streams
        self._num_open = len(streams)
        self._arrived: asyncio.Queue[IndexedDelta | Exception] = asyncio.Queue(maxsize=len(streams))
        self._pumps: list[asyncio.Task[None]] = []
        self._is_closing = False

    async def __aenter__(self) -> Self:
        self._pumps = [asyncio.create_task(self._pump(index, stream)) for index, stream in enumerate(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closing = True
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        # A pump task that was cancelled before its first step has not closed its stream.
        await asyncio.gather(*(stream.aclose() for stream in self._streams), return_exceptions=True)

    async def __anext__(self) -> IndexedDelta:
        if self._num_open == 0:
            raise StopAsyncIteration
        arrived = await self._arrived.get()
        if isinstance(arrived, Exception):
            raise arrived
        if arrived.delta.finish_reason is not None:
            self._num_open -= 1
        return arrived

    async def _pump(self, index: int, stream: DeltaStream) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    _raise_if_failed(delta)
                    await self._arrived.put(IndexedDelta(index, delta))
                    if delta.finish_reason is not None:
                        return
            raise _ended_early()
        except asyncio.CancelledError:
            if self._is_closing:
                raise
            await self._arrived.put(RequestAborted("the request was cancelled"))
        except Exception as error:  # passed on to the reader, which raises it
            await self._arrived.put(error)


def _ended_early() -> ServingError:
    return ServingError("the sequence's stream ended before the sequence did")


def _raise_if_failed(delta: TokenDelta) -> None:
    """Raise if the sequence failed or was aborted from elsewhere: such a sequence has no result."""
    if delta.error is not None:
        raise delta.error
    if delta.finish_reason is FinishReason.ABORT:
        raise RequestAborted("the request was cancelled")
