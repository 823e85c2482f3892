"""Answers that leave a request's body unread: the rest is dropped slowly, and the connection ends."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MAX_REST_BYTES = 2**18
"""Most bytes of a body that are received and dropped so that the connection can be used again."""
_MAX_REST_S = 0.05
"""Longest time in which a rest of unknown length may prove to be short, seconds."""
_LINGER_S = 5.0
"""Most time between the answer and the end of the connection, seconds. Many clients read an answer only after they have
sent the whole body, and the system drops an answer that is not read when a connection ends with bytes unread."""
PAUSE_S = 0.005
"""Pause after each piece of the rest, seconds. It bounds what a client that goes on sending costs the event loop."""


class UnreadBodyMiddleware:
    """Middleware that ends the connection after an answer that leaves much of the body unread.

    1. Such an answer has `connection: close` and is sent at once.
    2. The rest of the body is received slowly and dropped. The connection ends after the rest, and after `_LINGER_S` at
       the latest (a lingering close, RFC 9112, section 9.6).
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
    """Body and answer of one request. A body that cannot be received counts as a client that has left."""

    def __init__(self, headers: Headers, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        length = headers.get("content-length", "0")
        self._has_body = "transfer-encoding" in headers or length != "0"
        self._num_left = int(length) if self._has_body and length.isdecimal() and length != "0" else None
        self._is_held = False

    async def receive(self) -> Message:
        try:
            message = await self._receive()
        except Exception:  # Serve's raises any, as when Serve cancels the call. The answer does not depend on it.
            message = {"type": "http.disconnect"}
        if self._num_left is not None:
            self._num_left -= len(message.get("body", b""))
        self._has_body = self._has_body and bool(message.get("more_body"))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and await self._leaves_much():
            self._is_held = True
            headers = MutableHeaders(raw=list(message["headers"]))
            headers["connection"] = "close"
            message = {**message, "headers": headers.raw}
        elif self._is_held:
            message = {**message, "more_body": True}
        await self._send(message)

    async def finish(self) -> None:
        """End an answer that is held, and with it the connection."""
        if self._is_held:
            await self._drop_rest()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _leaves_much(self) -> bool:
        if self._has_body and self._num_left is None:
            await self._receive_short_rest()
        return self._has_body and (self._num_left is None or self._num_left > _MAX_REST_BYTES)

    async def _receive_short_rest(self) -> None:
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_REST_S):
                while self._has_body and num_bytes <= _MAX_REST_BYTES:
                    num_bytes += len((await self.receive()).get("body", b""))

    async def _drop_rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while self._has_body:
                    await self.receive()
                    await asyncio.sleep(PAUSE_S)
