"""Endpoints POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from serve_app.endpoints.generation.responder import Completions
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import caller_of
from serve_app.openai.reply.schema import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorObject,
    TextCompletion,
    TextCompletionChunk,
)
from serve_app.openai.request.schema import CHAT_IGNORED, COMPLETION_IGNORED, ChatBody, CompletionBody
from serve_app.reference.operations import COMPLETION_FAILURES, URGENCY_HEADERS, Access, Fields, Operation

ANSWER_HEADERS = ("x-model-replica", "x-headway-toy-model", "x-headway-not-enforced", "x-ratelimit")


def _stream(chunk: Any) -> Mapping[str, tuple[Any, ...]]:
    return {"text/event-stream": (chunk, ErrorObject, Literal["[DONE]"])}


class CompletionEndpoints:
    """Endpoints of chat and text completions, streamed or whole; a client's disconnect aborts its sequences."""

    def __init__(self, bodies: BodyReader, completions: Completions) -> None:
        self._bodies = bodies
        self._completions = completions

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
        answer_headers=ANSWER_HEADERS,
    )
    async def chat(self, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        caller = caller_of(request)
        body = await self._bodies.read(request, ChatBody, CHAT_IGNORED)
        preparing = self._completions.service.chat(body, caller)
        return await self._completions.respond(request, caller, body, preparing)

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
        answer_headers=ANSWER_HEADERS,
    )
    async def completion(self, request: Request) -> Response:
        """Continue one or several prompts, whole or as a stream of events."""
        caller = caller_of(request)
        body = await self._bodies.read(request, CompletionBody, COMPLETION_IGNORED)
        preparing = self._completions.service.completion(body, caller)
        return await self._completions.respond(request, caller, body, preparing)
