"""Client connection: work that a disconnect cancels, and the sending of body parts."""

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


async def end_body(send: Send) -> None:
    """End a body. Call it after `while_connected`: a server may report a response's end as a disconnect."""
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
