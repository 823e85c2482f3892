"""What a client sends and when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from replicas.errors import RequestAborted
from serve_app.endpoints.settings import IngressSettings
from serve_app.errors import body_too_large, unsupported_media_type, upload_too_slow

ResultT = TypeVar("ResultT")


async def read_body(request: Request, settings: IngressSettings) -> bytes:
    """The body of a JSON request.

    Raises:
        HttpError: it is of another type, too large, or too slow to arrive.
        RequestAborted: the client left before it was sent.
    """
    content_type = request.headers.get("content-type")
    if (content_type or "").partition(";")[0].strip().lower() != "application/json":
        raise unsupported_media_type(content_type)
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > settings.max_body_bytes:
        raise body_too_large(settings.max_body_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.upload_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > settings.max_body_bytes:
                    raise body_too_large(settings.max_body_bytes)
    except TimeoutError:
        raise upload_too_slow(settings.upload_timeout_s) from None
    except ClientDisconnect:
        raise RequestAborted("the client disconnected") from None
    return bytes(body)


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
