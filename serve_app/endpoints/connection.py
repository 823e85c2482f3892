"""Work that ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from replicas.errors import RequestAborted

ResultT = TypeVar("ResultT")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`, which is cancelled, and waited for, when the client leaves before it is done.

    The request's body must have been read.

    Raises:
        RequestAborted: the client left.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_client_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
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
