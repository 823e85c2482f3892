"""Endpoints that make responses: POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from serve_app.endpoints.generation.compaction import CompactionEndpoints
from serve_app.endpoints.generation.completions import ANSWER_HEADERS
from serve_app.endpoints.generation.responder import Completions
from serve_app.endpoints.generation.stored_reply import StoredReply
from serve_app.endpoints.generation.stored_responses import StoredResponseEndpoints
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import caller_of, exchange_of, json_response, tenant_of
from serve_app.http.streaming import while_connected
from serve_app.jobs.api.responses import NewResponse, ResponseRun
from serve_app.jobs.response_client import StoredResponses
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.reply.stored_run import StoredRun, packed
from serve_app.protocols.adapted_chat import AdaptedChat
from serve_app.protocols.responses.answers import InputTokens, ResponseEvent, ResponseObject
from serve_app.protocols.responses.conversion import ResponseRequest, adapted_response
from serve_app.protocols.responses.reply import ResponseFormat
from serve_app.protocols.responses.schema import RESPONSES_IGNORED, RESPONSES_LEVEL, ResponsesBody
from serve_app.protocols.responses.stored import stored_items
from serve_app.reference.operations import (
    BODY_FAILURES,
    COMPLETION_FAILURES,
    LOOKUP_FAILURES,
    URGENCY_HEADERS,
    Access,
    Created,
    Fields,
    Operation,
)

Preparing = Coroutine[Any, Any, PreparedCompletion]

_IGNORED_TOOLS = "x-headway-ignored-tools"
_ANSWER_HEADERS = (*ANSWER_HEADERS, _IGNORED_TOOLS)


@dataclass(frozen=True, slots=True)
class ResponseStore:
    """Stored responses, and the endpoints that read and compact them."""

    stored: StoredResponses
    reading: StoredResponseEndpoints
    compaction: CompactionEndpoints


class ResponseEndpoints:
    """Endpoints of responses, streamed or whole; each is a chat, and is treated as one."""

    def __init__(self, bodies: BodyReader, completions: Completions, store: ResponseStore | None) -> None:
        """Create the endpoints; without a store nothing is stored, continued or made in the background."""
        self._bodies = bodies
        self._completions = completions
        self._store = store

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
        answer_headers=_ANSWER_HEADERS,
        created=Created("/v1/responses/{response_id}"),
    )
    async def create(self, request: Request) -> Response:
        """Answer a conversation of items, whole or as a stream of events."""
        if self._store is None:
            return await self._completions.respond_to_chat(request, self._bodies, adapted_response, RESPONSES_LEVEL)
        compaction = self._store.compaction
        owner = caller_of(request).owner_before_parsing
        asked = await self._bodies.convert(request, ResponseRequest.of, owner, RESPONSES_LEVEL)
        asked = await compaction.with_items(request, asked)
        caller = caller_of(request)
        if asked.body.background:
            caller = replace(caller, sdk_timeout_s=None)  # The client does not wait.
        if asked.adapted is None:
            continued = await compaction.continued(request, asked)
            adapted = await compaction.adapted(request, continued)
        else:
            continued, adapted = None, asked.adapted
        exchange_of(request).ignored_tools = adapted.ignored_tools
        if continued is not None and asked.body.context_management:
            preparing = compaction.prepare(request, continued, adapted, caller)
        else:
            preparing = adapted.prepare(self._completions.service, caller)
        if asked.body.background:
            return await self._begin_background(request, asked, preparing, self._store)
        record = partial(_record, tenant_of(request), asked, self._store.stored) if asked.body.store else None
        return await self._completions.respond(request, caller, adapted.chat, preparing, record)

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
        make = partial(ResponseRequest.of if self._store else _unstored, default_model=service.checks.names[0])
        asked = await self._bodies.convert(request, make, caller.owner_before_parsing, RESPONSES_LEVEL)
        adapted = await self._adapted(request, asked)
        exchange_of(request).ignored_tools = adapted.ignored_tools
        num_tokens = await adapted.num_prompt_tokens(service, caller)
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def _adapted(self, request: Request, asked: ResponseRequest) -> AdaptedChat:
        """Return the chat of a request, with the stored part of its conversation.

        Raises:
            InvalidRequest: the conversation cannot be served.
            UnknownResponse, UnknownConversation, UnknownItem: it is not stored.
        """
        if self._store is not None:
            asked = await self._store.compaction.with_items(request, asked)
        if asked.adapted is not None:
            return asked.adapted
        assert self._store is not None
        return await self._store.compaction.adapted(request, await self._store.compaction.continued(request, asked))

    async def _begin_background(
        self, request: Request, asked: ResponseRequest, preparing: Preparing, store: ResponseStore
    ) -> Response:
        """Store a response that a jobs worker is to make; show its state, or follow its events."""
        exchange = exchange_of(request)
        prepared = await while_connected(request.receive, preparing)
        if exchange.key_use is not None:
            exchange.key_use.charge(prepared.progress.prompt_tokens)
        assert isinstance(prepared.format, ResponseFormat)
        fields = {**asked.fields, "input": None}
        run = StoredRun.of(fields, prepared.format.head, prepared, prepared.format.compaction)
        prompt = packed(prepared.requests[0].prompt_token_ids)
        tenant = tenant_of(request)
        new = _new_response(tenant, asked, prepared, "queued", ResponseRun(run.to_json(), prompt))
        await store.stored.begin(new)
        exchange.details |= {"response_id": new.id, "tenant": tenant}
        if asked.body.stream:
            return await store.reading.follow(request, new.id, -1)
        return json_response(prepared.format.begun("queued"))


def _unstored(fields: dict[str, object], default_model: str | None = None) -> ResponseRequest:
    """Return a request where nothing is stored."""
    adapted = adapted_response(fields, default_model)
    return replace(ResponseRequest.of(fields, default_model), adapted=adapted)


def _record(tenant: str, asked: ResponseRequest, stored: StoredResponses, prepared: PreparedCompletion) -> StoredReply:
    return StoredReply(stored, _new_response(tenant, asked, prepared, "in_progress", None))


def _new_response(
    tenant: str, asked: ResponseRequest, prepared: PreparedCompletion, status: str, run: ResponseRun | None
) -> NewResponse:
    assert isinstance(prepared.format, ResponseFormat)
    return NewResponse(
        id=prepared.id,
        tenant=tenant,
        response=to_json(prepared.format.begun(status)).decode(),
        items=stored_items(asked.fields["input"], prepared.id),
        previous_id=asked.body.previous_response_id,
        conversation_id=asked.conversation_id,
        run=run,
    )
