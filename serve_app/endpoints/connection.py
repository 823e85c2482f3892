"""The client's connection: work that ends when the client leaves, and parts of a body that are sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Send

from replicas.errors import RequestAborted

ResultT = TypeVar("ResultT")


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, ResultT], keep_alive: Callable[[], Awaitable[float]] | None = None
) -> ResultT:
    """The result of `work`, which is cancelled, and waited for, when the client leaves before it is done.

    The request's body must have been read. While `work` goes on, `keep_alive` is called, first at once, and again
    after as many seconds as it returned; what it raises ends `work` too.

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


async def send_part(send: Send, data: bytes) -> None:
    """Send a part of a body; nothing where there is no data.

    Raises:
        RequestAborted: the client left.
    """
    if not data:
        return
    try:
        await send({"type": "http.response.body", "body": data, "more_body": True})
    except OSError:
        raise RequestAborted("the client disconnected") from None


async def end_body(send: Send) -> None:
    """End a body, after `while_connected`: a server may report the end of a response like a client that left."""
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
