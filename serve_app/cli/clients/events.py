"""Reader of streamed answers: server-sent events whose data are JSON objects, with `[DONE]` at the end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from httpx_sse import EventSource, ServerSentEvent

JsonObject = dict[str, Any]

_DONE = "[DONE]"


class StreamCut(httpx.RemoteProtocolError):
    """End of a stream before `[DONE]`."""


def read_events(response: httpx.Response) -> Iterator[JsonObject]:
    """Yield the objects of a response, comments left out.

    Raises:
        StreamCut: the stream ended before `[DONE]`.
        httpx_sse.SSEError: the response is no stream of events.
        json.JSONDecodeError: an event is not an object.
    """
    is_done = False
    for event in EventSource(response).iter_sse():
        is_done = is_done or event.data == _DONE
        if event.data and not is_done:
            yield _object(event)
    _check_end(is_done)


async def aread_events(response: httpx.Response) -> AsyncIterator[JsonObject]:
    """Yield the objects of a response as `read_events` does."""
    is_done = False
    async for event in EventSource(response).aiter_sse():
        is_done = is_done or event.data == _DONE
        if event.data and not is_done:
            yield _object(event)
    _check_end(is_done)


def _object(event: ServerSentEvent) -> JsonObject:
    value = event.json()
    if not isinstance(value, dict):
        raise json.JSONDecodeError("not an object", event.data, 0)
    return value


def _check_end(is_done: bool) -> None:
    if not is_done:
        raise StreamCut("the stream has ended before [DONE]")
