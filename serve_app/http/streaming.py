"""Responses that send their body part by part, and work that the client's disconnect cancels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from replicas.errors import RequestAborted
from serve_app.http.exchange import CLIENT_CLOSED, Exchange

ResultT = TypeVar("ResultT")


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, ResultT], keep_alive: Callable[[], Awaitable[float]] | None = None
) -> ResultT:
    """Return the result of `work`; if the client leaves first, cancel `work` and wait for its end.

    The request's body must have been read. While `work` runs, `keep_alive` is called at once and then again after the
    number of seconds that it returned. An error of `keep_alive` cancels `work` and is raised.

    Raises:
        RequestAborted: the client left.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_client_left(receive))
    try:
        while not (working.done() or leaving.done()):
            wait_s = None if keep_alive is None else await keep_alive()
            await asyncio.wait((working, leaving), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        leaving.result()
        raise RequestAborted("the client disconnected")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_part(send: Send, data: bytes) -> None:
    """Send a part of a body; empty data sends nothing.

    Raises:
        RequestAborted: the client left.
    """
    if not data:
        return
    try:
        await send({"type": "http.response.body", "body": data, "more_body": True})
    except OSError:
        raise RequestAborted("the client disconnected") from None


async def send_body(
    exchange: Exchange,
    receive: Receive,
    send: Send,
    work: Coroutine[Any, Any, None],
    keep_alive: Callable[[], Awaitable[float]] | None = None,
) -> None:
    """Run `work`, which sends a response's start and body, while the client is connected; then end the body.

    Raises:
        RequestAborted: the client left before the response began. If it leaves later, only the exchange notes it.
    """
    try:
        await while_connected(receive, work, keep_alive)
        # After `while_connected`: a server may report a response's end as a disconnect.
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    except RequestAborted:
        if not exchange.status:
            raise
        exchange.status = CLIENT_CLOSED


class ByteStream(Response):
    """Response that sends the parts of a generator on arrival, and closes the generator when the client leaves.

    The status is sent with the first part, so that an earlier failure gets its own status. A later failure cuts the
    connection, so that the client does not take a partial answer for a whole one. For HEAD nothing is read beyond the
    first part.
    """

    def __init__(
        self, parts: AsyncGenerator[bytes, None], exchange: Exchange, media_type: str, headers: dict[str, str]
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        if "content-length" not in headers:
            del self.headers["content-length"]
        self._parts = parts
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as an ASGI application."""
        await send_body(self._exchange, receive, send, self._run(send))

    async def _run(self, send: Send) -> None:
        async with aclosing(self._parts) as parts:
            first = await anext(parts, b"")
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self._exchange.method == "HEAD":
                return
            await send_part(send, first)
            async for part in parts:
                await send_part(send, part)
