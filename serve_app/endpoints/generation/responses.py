"""Endpoints of OpenAI's Responses API: POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from functools import partial
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from serve_app.endpoints.generation.completions import ANSWER_HEADERS
from serve_app.endpoints.generation.responder import Completions
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import caller_of, exchange_of, json_response
from serve_app.protocols.responses.answers import InputTokens, ResponseEvent, ResponseObject
from serve_app.protocols.responses.conversion import adapted_response
from serve_app.protocols.responses.schema import RESPONSES_IGNORED, RESPONSES_LEVEL, ResponsesBody
from serve_app.reference.operations import (
    BODY_FAILURES,
    COMPLETION_FAILURES,
    LOOKUP_FAILURES,
    URGENCY_HEADERS,
    Access,
    Fields,
    Operation,
)

_IGNORED_TOOLS = "x-headway-ignored-tools"


class ResponseEndpoints:
    """Endpoints of responses, streamed or whole; each is a chat, and is treated as one."""

    def __init__(self, bodies: BodyReader, completions: Completions) -> None:
        self._bodies = bodies
        self._completions = completions

    @Operation(
        "POST",
        "/v1/responses",
        "Completions",
        ResponseObject,
        {"text/event-stream": (ResponseEvent, Literal["[DONE]"])},
        access=Access.LIMITED,
        failures=COMPLETION_FAILURES,
        bodies=(Fields(ResponsesBody, RESPONSES_IGNORED),),
        headers=URGENCY_HEADERS,
        answer_headers=(*ANSWER_HEADERS, _IGNORED_TOOLS),
    )
    async def create(self, request: Request) -> Response:
        """Answer a conversation of items, whole or as a stream of events."""
        return await self._completions.respond_to_chat(request, self._bodies, adapted_response, RESPONSES_LEVEL)

    @Operation(
        "POST",
        "/v1/responses/input_tokens",
        "Completions",
        InputTokens,
        failures=BODY_FAILURES | LOOKUP_FAILURES,
        bodies=(Fields(ResponsesBody, RESPONSES_IGNORED, title="InputTokensBody", optional=("model",)),),
        answer_headers=(_IGNORED_TOOLS,),
    )
    async def count_input_tokens(self, request: Request) -> Response:
        """Count the tokens of a response's prompt, its tools included."""
        caller, service = caller_of(request), self._completions.service
        make = partial(adapted_response, default_model=service.checks.names[0])
        adapted = await self._bodies.convert(request, make, caller.owner_before_parsing, RESPONSES_LEVEL)
        exchange_of(request).ignored_tools = adapted.ignored_tools
        num_tokens = await adapted.num_prompt_tokens(service, caller)
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})
