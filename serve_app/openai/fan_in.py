"""Several streams of deltas as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType

from replicas.errors import RequestAborted, ServingError
from replicas.protocol import FinishReason, TokenDelta


@dataclass(frozen=True, slots=True)
class IndexedDelta:
    """A delta and the number of the stream it came from."""

    index: int
    delta: TokenDelta


class DeltaFanIn(AsyncIterator[IndexedDelta]):
    """The deltas of several streams in the order they come; ends when every stream has its last delta.

    The first failure of a stream is raised and ends all. Leaving the context closes every stream,
    which aborts the requests that have not finished. A reader that lags holds the streams back,
    so that deltas merge where they wait. Waiting for the next delta may be cancelled without loss.
    """

    def __init__(self, streams: Sequence[AsyncGenerator[TokenDelta, None]]) -> None:
        self._streams = streams
        self._num_open = len(streams)
        self._arrived: asyncio.Queue[IndexedDelta | Exception] = asyncio.Queue(maxsize=len(streams))
        self._pumps: list[asyncio.Task[None]] = []
        self._is_closing = False

    async def __aenter__(self) -> DeltaFanIn:
        self._pumps = [asyncio.create_task(self._pump(index, stream)) for index, stream in enumerate(self._streams)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closing = True
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        # A pump that was cancelled before its first step has not closed its stream.
        await asyncio.gather(*(stream.aclose() for stream in self._streams), return_exceptions=True)

    @property
    def is_exhausted(self) -> bool:
        """Whether the last delta of every stream has been read."""
        return self._num_open == 0

    async def __anext__(self) -> IndexedDelta:
        """The next delta of any stream.

        Raises:
            ServingError: what the first stream to fail raised.
        """
        if self.is_exhausted:
            raise StopAsyncIteration
        arrived = await self._arrived.get()
        if isinstance(arrived, Exception):
            raise arrived
        if arrived.delta.finish_reason is not None:
            self._num_open -= 1
        return arrived

    async def _pump(self, index: int, stream: AsyncGenerator[TokenDelta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    _raise_if_failed(delta)
                    await self._arrived.put(IndexedDelta(index, delta))
                    if delta.finish_reason is not None:
                        return
            raise ServingError("the sequence's stream ended before the sequence did")
        except asyncio.CancelledError:
            if self._is_closing:
                raise
            await self._arrived.put(RequestAborted("the request was cancelled"))
        except Exception as error:  # whatever it is, the reader must hear of it
            await self._arrived.put(error)


def _raise_if_failed(delta: TokenDelta) -> None:
    """A sequence that was aborted by someone else or failed has no answer to show."""
    if delta.error is not None:
        raise delta.error
    if delta.finish_reason is FinishReason.ABORT:
        raise RequestAborted("the request was cancelled")
