"""Endpoints POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from serve_app.endpoints.event_stream import EventStream
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import caller_of, exchange_of
from serve_app.http.request_registry import RequestRegistry
from serve_app.http.settings import IngressSettings
from serve_app.http.streaming import while_connected
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.reply.schema import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorObject,
    TextCompletion,
    TextCompletionChunk,
)
from serve_app.openai.request.caller import Caller
from serve_app.openai.request.schema import CHAT_IGNORED, COMPLETION_IGNORED, ChatBody, CompletionBody
from serve_app.openai.service import CompletionService
from serve_app.reference.operations import COMPLETION_FAILURES, URGENCY_HEADERS, Access, Fields, Operation

_MIN_WAIT_S = 0.5
"""Shortest interval of a stream's comments that a client's read time-out can set, seconds; comments cost work."""
_ANSWER_HEADERS = ("x-model-replica", "x-headway-toy-model", "x-headway-not-enforced", "x-ratelimit")


def _stream(chunk: Any) -> Mapping[str, tuple[Any, ...]]:
    return {"text/event-stream": (chunk, ErrorObject, Literal["[DONE]"])}


class CompletionEndpoints:
    """Endpoints of chat and text completions, streamed or whole; a client's disconnect aborts its sequences."""

    def __init__(
        self, settings: IngressSettings, bodies: BodyReader, service: CompletionService, registry: RequestRegistry
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._bodies = bodies
        self._service = service

    @Operation(
        "POST",
        "/v1/chat/completions",
        "Completions",
        ChatCompletion,
        _stream(ChatCompletionChunk),
        access=Access.LIMITED,
        failures=COMPLETION_FAILURES,
        bodies=(Fields(ChatBody, CHAT_IGNORED),),
        headers=URGENCY_HEADERS,
        answer_headers=_ANSWER_HEADERS,
    )
    async def chat(self, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        caller = caller_of(request)
        body = await self._bodies.read(request, ChatBody, CHAT_IGNORED)
        self._registry.begin(exchange_of(request), body, caller.owner_of(body))
        return await self._respond(request, caller, self._service.chat(body, caller))

    @Operation(
        "POST",
        "/v1/completions",
        "Completions",
        TextCompletion,
        _stream(TextCompletionChunk),
        access=Access.LIMITED,
        failures=COMPLETION_FAILURES,
        bodies=(Fields(CompletionBody, COMPLETION_IGNORED),),
        headers=URGENCY_HEADERS,
        answer_headers=_ANSWER_HEADERS,
    )
    async def completion(self, request: Request) -> Response:
        """Continue one or several prompts, whole or as a stream of events."""
        caller = caller_of(request)
        body = await self._bodies.read(request, CompletionBody, COMPLETION_IGNORED)
        self._registry.begin(exchange_of(request), body, caller.owner_of(body))
        return await self._respond(request, caller, self._service.completion(body, caller))

    async def _respond(
        self, request: Request, caller: Caller, preparing: Coroutine[Any, Any, PreparedCompletion]
    ) -> Response:
        exchange = exchange_of(request)
        async with exchange.cancellation.within():
            exchange.prepared = prepared = await while_connected(request.receive, preparing)
        exchange.headroom = partial(self._service.headroom, prepared)
        if exchange.key_use is not None:
            exchange.key_use.charge(prepared.progress.prompt_tokens)
        if prepared.body.stream:
            # Half the client's read time-out, so that a byte arrives before the client gives up.
            wait_s = max(_MIN_WAIT_S, (caller.sdk_timeout_s or float("inf")) / 2)
            header_wait_s = min(self._settings.max_header_wait_s, wait_s)
            keep_alive_s = min(self._settings.keep_alive_s, wait_s)
            return EventStream(self._service, prepared, exchange, header_wait_s, keep_alive_s)
        async with exchange.cancellation.within():
            reply = await while_connected(request.receive, self._service.answer_json(prepared))
        replica_id = prepared.progress.replica_id
        headers = {} if replica_id is None else {"x-model-replica": replica_id}
        return Response(reply, headers=headers, media_type="application/json")
