"""Reading of request bodies with bounds on size and time, and parsing of JSON bodies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from replicas.errors import RequestAborted
from serve_app.errors import body_too_large, unsupported_media_type, upload_too_slow
from serve_app.http.exchange import content_length
from serve_app.http.settings import IngressSettings
from serve_app.openai.request.ignored_fields import IgnoredValues
from serve_app.openai.request.parsing import BodyT, parse_body, parse_json
from serve_app.openai.tokenize.workers import WorkerThreads

ResultT = TypeVar("ResultT")

_LARGE_BODY_BYTES = 2**16
"""Size from which a body is parsed in a thread, bytes; parsing a body of this size takes about a millisecond."""


class BodyReader:
    """Reader of request bodies."""

    def __init__(self, settings: IngressSettings, workers: WorkerThreads) -> None:
        self._settings = settings
        self._workers = workers

    async def read(self, request: Request, schema: type[BodyT], ignored: IgnoredValues) -> BodyT:
        """Return the body as a `schema`; a field in `ignored` is accepted with the values listed there.

        Raises:
            HttpError: the body's content type is wrong, or the body is too large or too slow.
            InvalidRequest: the body is not a JSON object, or does not match the schema.
            RequestAborted: the client left before the body was complete.
        """
        return await self.convert(request, lambda fields: parse_body(schema, fields, ignored))

    async def convert(self, request: Request, make: Callable[[dict[str, object]], ResultT]) -> ResultT:
        """Return `make(fields)` for the body's fields; a large body is parsed and converted in a thread.

        Raises:
            HttpError, InvalidRequest, RequestAborted: as `read` does.
        """
        data = await self._read_all(request)
        if len(data) < _LARGE_BODY_BYTES:
            return make(parse_json(data))
        return await self._workers.run(lambda: make(parse_json(data)))

    async def stream(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the body of any type and size in parts, as they arrive.

        Raises:
            HttpError: the client sends more slowly than `max_body_bytes` in `upload_timeout_s`, after a first
                `upload_timeout_s`.
            RequestAborted: the client left before the body was complete.
        """
        limit_s = self._settings.upload_timeout_s
        loop, parts = asyncio.get_running_loop(), request.stream()
        waited_s, num_bytes = 0.0, 0
        while True:
            # Only the wait for the client counts, not the consumer's time between the parts.
            asked_s = loop.time()
            try:
                async with asyncio.timeout(limit_s * (1 + num_bytes / self._settings.max_body_bytes) - waited_s):
                    part = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise upload_too_slow(limit_s) from None
            except ClientDisconnect:
                raise RequestAborted("the client disconnected") from None
            waited_s += loop.time() - asked_s
            num_bytes += len(part)
            yield part

    async def _read_all(self, request: Request) -> bytes:
        max_body_bytes, limit_s = self._settings.max_body_bytes, self._settings.upload_timeout_s
        content_type = request.headers.get("content-type")
        if (content_type or "").partition(";")[0].strip().lower() != "application/json":
            raise unsupported_media_type(content_type)
        if content_length(request.headers) > max_body_bytes:
            raise body_too_large(max_body_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(limit_s):
                async for part in request.stream():
                    body += part
                    if len(body) > max_body_bytes:
                        raise body_too_large(max_body_bytes)
        except TimeoutError:
            raise upload_too_slow(limit_s) from None
        except ClientDisconnect:
            raise RequestAborted("the client disconnected") from None
        return bytes(body)
