"""Response that sends its body part by part while the parts are produced."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from replicas.errors import RequestAborted
from serve_app.http.connection import end_body, send_part, while_connected
from serve_app.http.exchange import CLIENT_CLOSED, Exchange


class ByteStream(Response):
    """Response that sends the parts of a generator on arrival, and closes the generator when the client leaves.

    The status is sent with the first part, so that an earlier failure gets its own status. A later failure cuts the
    connection, so that the client does not take a partial answer for a whole one.
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
        try:
            await while_connected(receive, self._run(send))
            await end_body(send)
        except RequestAborted:
            if not self._exchange.status:
                raise
            self._exchange.status = CLIENT_CLOSED

    async def _run(self, send: Send) -> None:
        async with aclosing(self._parts) as parts:
            first = await anext(parts, b"")
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send_part(send, first)
            async for part in parts:
                await send_part(send, part)
