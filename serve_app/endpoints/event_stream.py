"""A generation as a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from replicas.errors import RequestAborted
from serve_app.endpoints.connection import while_connected
from serve_app.endpoints.exchange import CLIENT_CLOSED, Exchange, fail
from serve_app.openai.fan_in import DeltaFanIn, IndexedDelta
from serve_app.openai.reply import JsonObject
from serve_app.openai.service import CompletionService, Generation
from serve_app.openai.sse import CONTENT_TYPE, DONE, KEEP_ALIVE, event


class EventStream(Response):
    """Runs a generation while its client listens.

    The status waits for the first delta, at most `header_wait_s`, so that what fails early has a status
    of its own; what fails later is one error event. `[DONE]` is sent only after success. When the client
    leaves, at whatever moment, the sequences are aborted.
    """

    def __init__(
        self,
        service: CompletionService,
        generation: Generation,
        exchange: Exchange,
        header_wait_s: float,
        keep_alive_s: float,
    ) -> None:
        super().__init__()
        self._service = service
        self._generation = generation
        self._exchange = exchange
        self._header_wait_s = header_wait_s
        self._keep_alive_s = keep_alive_s
        options = generation.body.stream_options
        self._include_usage = options is not None and options.include_usage
        self._usage_on_every_chunk = options is not None and options.continuous_usage_stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI application.

        Raises:
            ServingError: the generation failed before the response began.
        """
        try:
            await while_connected(receive, self._run(send))
            # Only now, since a server may report the end of a complete response like a client that left.
            await _send_part(send, b"", is_last=True)
        except RequestAborted:
            if not self._exchange.status:
                raise
            self._exchange.status = CLIENT_CLOSED

    async def _run(self, send: Send) -> None:
        async with self._service.start(self._generation) as deltas:
            first = await self._next_within(deltas, self._header_wait_s)
            await send(self._start_message())
            try:
                async for data in self._events(deltas, first):
                    await _send_part(send, data)
            except Exception as error:
                # The status has been sent, so whatever went wrong must be told in the stream.
                await _send_part(send, event(fail(self._exchange, error).body))

    async def _events(self, deltas: DeltaFanIn, first: IndexedDelta | None) -> AsyncIterator[bytes]:
        """Everything after the headers, in the parts in which it is sent."""
        item = first
        while True:
            yield KEEP_ALIVE if item is None else self._written(item)
            if deltas.is_exhausted:
                break
            item = await self._next_within(deltas, self._keep_alive_s)
        if self._include_usage:
            yield event(self._generation.format.usage_chunk(self._generation.progress.usage()))
        yield DONE

    async def _next_within(self, deltas: DeltaFanIn, limit_s: float) -> IndexedDelta | None:
        """The next delta; None: none came in time, which loses nothing."""
        try:
            async with asyncio.timeout(limit_s) as limit:
                item = await anext(deltas)
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        self._generation.progress.add(item)
        return item

    def _written(self, item: IndexedDelta) -> bytes:
        return b"".join(event(self._with_usage(chunk)) for chunk in self._generation.format.chunk(item))

    def _with_usage(self, chunk: JsonObject) -> JsonObject:
        """With `include_usage` every chunk has the field, but only the last one says it, unless asked to."""
        if self._usage_on_every_chunk:
            chunk["usage"] = self._generation.progress.usage()
        elif self._include_usage:
            chunk["usage"] = None
        return chunk

    def _start_message(self) -> Message:
        message: Message = {"type": "http.response.start", "status": 200, "headers": []}
        headers = MutableHeaders(scope=message)
        headers["content-type"] = CONTENT_TYPE
        headers["cache-control"] = "no-cache"
        headers["x-accel-buffering"] = "no"
        if self._generation.progress.replica_id is not None:
            headers["x-model-replica"] = self._generation.progress.replica_id
        return message


async def _send_part(send: Send, data: bytes, is_last: bool = False) -> None:
    if not (data or is_last):
        return
    try:
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
    except OSError:
        raise RequestAborted("the client disconnected") from None
