"""Responses that stream a generation as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from replicas.errors import ServingError
from serve_app.http.exchange import Exchange, fail
from serve_app.http.streaming import send_body, send_part
from serve_app.openai.reply.fan_in import IndexedDelta
from serve_app.openai.reply.format import JsonObject, event, null_usage
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.service import CompletionService

CONTENT_TYPE = "text/event-stream; charset=utf-8"

DONE = b"data: [DONE]\n\n"
"""Event that ends a complete stream; sent only after success."""

KEEP_ALIVE = b": keep-alive\n\n"
"""Comment of server-sent events, which clients ignore; it resets their read time-outs."""


class EventStream(Response):
    """Response that runs a generation and sends its deltas as events.

    The status is sent with the first delta, at the latest after `header_wait_s`, so that an early failure gets its own
    status. A later failure is sent as the reply's format has it. After `keep_alive_s` without an event a comment is
    sent, or the format's own event. The last events, with `[DONE]` where it has one, are sent only after success.
    A disconnect at any moment aborts the sequences.

    One task waits for deltas without a time limit and writes the events. The response's task waits for that task and
    sends the comments. Invariant: one part is sent at a time.
    """

    def __init__(
        self,
        service: CompletionService,
        prepared: PreparedCompletion,
        exchange: Exchange,
        header_wait_s: float,
        keep_alive_s: float,
    ) -> None:
        super().__init__()
        self._service = service
        self._prepared = prepared
        self._exchange = exchange
        self._header_wait_s = header_wait_s
        self._keep_alive_s = keep_alive_s
        options = prepared.body.stream_options
        self._usage_on_every_chunk = options is not None and options.include_usage and options.continuous_usage_stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as an ASGI application.

        Raises:
            ServingError: the generation failed before the response began.
        """
        own = self._prepared.format.keep_alive
        keep_alive = KEEP_ALIVE if own is None else event(own)
        sender = _Sender(send, self._start_message, self._header_wait_s, self._keep_alive_s, keep_alive)
        try:
            await send_body(self._exchange, receive, send, self._run(sender), sender.keep_alive)
        finally:
            if self._exchange.record is not None:
                self._exchange.record.left()

    async def _run(self, sender: _Sender) -> None:
        try:
            # Leave the generation before the last events are sent: a client that does not read would keep its slot.
            async with self._service.streams(self._prepared) as deltas, self._exchange.cancellation.within():
                async for item in deltas:
                    if self._exchange.record is not None:
                        await self._exchange.record.begun()
                    opening = self._written(self._prepared.format.opening(item.index))
                    self._prepared.progress.add(item)
                    await sender.send(opening + await self._events(item))
            fields, usage = self._service.closing_fields(self._prepared), self._prepared.usage()
            closing = self._prepared.format.closing(fields, usage)
            if self._exchange.record is not None:
                await self._exchange.record.ended(closing[-1]["response"])
            await sender.send(b"".join(map(event, closing)) + (DONE if self._prepared.format.ends_with_done else b""))
        except Exception as error:
            if not sender.has_begun:
                raise
            # The status has been sent, so the error is an event of the stream.
            reply = fail(self._exchange, error)
            body = reply.body_at(self._exchange.path, self._exchange.request_id)
            events = self._prepared.format.failure(body, reply.code, reply.message)
            if self._exchange.record is not None:
                with contextlib.suppress(ServingError):
                    await self._exchange.record.ended(events[-1]["response"])
            await sender.send(b"".join(map(event, events)))

    async def _events(self, item: IndexedDelta) -> bytes:
        if self._usage_on_every_chunk:
            return self._written(await self._service.chunks(self._prepared, item))
        return await self._service.written(self._prepared, item)

    def _written(self, chunks: Sequence[JsonObject]) -> bytes:
        return b"".join(event(self._with_usage(chunk)) for chunk in chunks)

    def _with_usage(self, chunk: JsonObject) -> JsonObject:
        """Add `usage` to a chunk: with `include_usage` null, or the counts with `continuous_usage_stats` too."""
        usage = {"usage": self._prepared.usage()} if self._usage_on_every_chunk else null_usage(self._prepared.body)
        return chunk | usage

    def _start_message(self) -> Message:
        message: Message = {"type": "http.response.start", "status": 200, "headers": []}
        headers = MutableHeaders(scope=message)
        headers["content-type"] = CONTENT_TYPE
        headers["cache-control"] = "no-cache"
        headers["x-accel-buffering"] = "no"
        if self._prepared.progress.replica_id is not None:
            headers["x-model-replica"] = self._prepared.progress.replica_id
        return message


class _Sender:
    """Sender of a stream's parts: it sends the headers before the first part, and a comment after a long silence.

    Invariant: one part is sent at a time, in the order of the calls.
    """

    def __init__(
        self,
        send: Send,
        start_message: Callable[[], Message],
        header_wait_s: float,
        keep_alive_s: float,
        keep_alive: bytes,
    ) -> None:
        """Create the sender; `keep_alive` is what it sends after a long silence."""
        self._send = send
        self._keep_alive = keep_alive
        self._start_message = start_message
        self._keep_alive_s = keep_alive_s
        self._max_silence_s = header_wait_s
        self._now = asyncio.get_running_loop().time
        self._sent_s = self._now()
        self._sending = asyncio.Lock()
        self.has_begun = False

    async def send(self, data: bytes) -> None:
        """Send a part of the body, and the headers before the first part.

        Raises:
            RequestAborted: the client left.
        """
        async with self._sending:
            if not self.has_begun:
                self.has_begun, self._max_silence_s = True, self._keep_alive_s
                await self._send(self._start_message())
            await send_part(self._send, data)
            self._sent_s = self._now()

    async def keep_alive(self) -> float:
        """Send a comment if nothing has been sent for too long; return the seconds until the next check.

        Raises:
            RequestAborted: the client left.
        """
        left_s = self._sent_s + self._max_silence_s - self._now()
        if left_s > 0:
            return min(left_s, self._keep_alive_s)
        # A send that is still blocked on a slow client needs no comment behind it.
        if not self._sending.locked():
            await self.send(self._keep_alive)
        return self._keep_alive_s
