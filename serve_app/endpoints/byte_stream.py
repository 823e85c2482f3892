"""A response whose body is sent while it is made."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from replicas.errors import RequestAborted
from serve_app.endpoints.connection import end_body, send_part, while_connected
from serve_app.endpoints.exchange import CLIENT_CLOSED, Exchange


class ByteStream(Response):
    """Sends parts as they come, and closes their source when the client leaves.

    The status waits for the first part, so that what fails before it has a status of its own. What fails
    later cuts the connection: half an answer must not look whole.
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
        """Answer as an ASGI application."""
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
