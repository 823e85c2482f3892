"""Endpoints of Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from serve_app.endpoints.generation.completions import ANSWER_HEADERS
from serve_app.endpoints.generation.responder import Completions
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import caller_of, exchange_of, json_response
from serve_app.protocols.messages.answers import Message, MessageError, MessageEvent, TokenCount
from serve_app.protocols.messages.conversion import adapted_message, counted_message
from serve_app.protocols.messages.schema import MESSAGES_LEVEL, MessagesBody, PromptBody
from serve_app.reference.operations import (
    BODY_FAILURES,
    COMPLETION_FAILURES,
    LOOKUP_FAILURES,
    URGENCY_HEADERS,
    Access,
    Fields,
    Operation,
)


class MessageEndpoints:
    """Endpoints of messages, streamed or whole; each is a chat, and is treated as one."""

    def __init__(self, bodies: BodyReader, completions: Completions) -> None:
        self._bodies = bodies
        self._completions = completions

    @Operation(
        "POST",
        "/v1/messages",
        "Completion",
        Message,
        access=Access.LIMITED,
        other_answers={"text/event-stream": (MessageEvent,)},
        failures=COMPLETION_FAILURES,
        bodies=(Fields(MessagesBody, {}),),
        headers=URGENCY_HEADERS,
        answer_headers=(*ANSWER_HEADERS, "request-id", "x-headway-ignored-tools"),
        error=MessageError,
    )
    async def create(self, request: Request) -> Response:
        """Answer a conversation in Anthropic's form, whole or as a stream of events."""
        return await self._completions.respond_to_chat(request, self._bodies, adapted_message, MESSAGES_LEVEL)

    @Operation(
        "POST",
        "/v1/messages/count_tokens",
        "Completion",
        TokenCount,
        failures=BODY_FAILURES | LOOKUP_FAILURES,
        bodies=(Fields(PromptBody, {}),),
        answer_headers=("request-id", "x-headway-ignored-tools"),
        error=MessageError,
    )
    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a message's prompt, its tools included."""
        caller = caller_of(request)
        owner = caller.owner_before_parsing
        adapted = await self._bodies.convert(request, counted_message, owner, MESSAGES_LEVEL)
        exchange_of(request).ignored_tools = adapted.ignored_tools
        return json_response({"input_tokens": await adapted.num_prompt_tokens(self._completions.service, caller)})
