"""Answers that leave a request's body unread: the connection ends, so that nobody goes on receiving it."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MAX_REST_BYTES = 2**18
"""Most bytes of a body that the HTTP server may receive and drop so that the connection can be used again."""
_WAIT_S = 0.5
"""Time between the answer and the end of the connection, seconds. If it ended at once, the system would drop answers
that a client has not read, since the client still sends."""


class UnreadBodyMiddleware:
    """Middleware that ends the connection after an answer that leaves much of the body unread.

    1. Such an answer has `connection: close`. Once it has begun, no more of the body is received.
    2. The answer is sent at once, and the connection ends `_WAIT_S` later.
    3. Where the application has closed the connection itself, as behind another of these, only 1 is done.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(Headers(scope=scope), receive, send)
        await self._app(scope, exchange.receive, exchange.send)
        await exchange.finish()


class _Exchange:
    """Body and answer of one request."""

    def __init__(self, headers: Headers, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        length = headers.get("content-length", "")
        self._num_left = int(length) if length.isdecimal() else None
        self._is_cut = self._is_held = False

    async def receive(self) -> Message:
        if self._is_cut:
            await asyncio.Event().wait()  # Until the request ends, and with it this call.
        message = await self._receive()
        if self._num_left is not None:
            self._num_left -= len(message.get("body", b""))
        self._has_body = self._has_body and bool(message.get("more_body"))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._leaves_much():
            self._is_cut = True
            headers = MutableHeaders(raw=list(message["headers"]))
            self._is_held = headers.get("connection") != "close"
            headers["connection"] = "close"
            message = {**message, "headers": headers.raw}
        elif self._is_held:
            message = {**message, "more_body": True}
        await self._send(message)

    async def finish(self) -> None:
        """End an answer that is held, and with it the connection."""
        if self._is_held:
            await asyncio.sleep(_WAIT_S)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _leaves_much(self) -> bool:
        return self._has_body and (self._num_left is None or self._num_left > _MAX_REST_BYTES)
