"""Compaction of conversations: POST /v1/responses/compact, and within the creation of a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from serve_app.endpoints.generation.completions import ANSWER_HEADERS
from serve_app.endpoints.generation.responder import Completions
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import caller_of, exchange_of, tenant_of
from serve_app.jobs.api.responses import ItemReference, ResponsesService
from serve_app.jobs.response_client import StoredResponses
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.request.caller import Caller
from serve_app.openai.request.validation import ContextExceeded
from serve_app.protocols.adapted_chat import AdaptedChat
from serve_app.protocols.responses.answers import CompactedResponse
from serve_app.protocols.responses.compaction import (
    ContinuedRequest,
    can_be_compacted,
    compact_request,
    compacted_content,
    most_summary_tokens,
)
from serve_app.protocols.responses.conversion import ResponseRequest
from serve_app.protocols.responses.encrypted_content import ContentCipher
from serve_app.protocols.responses.schema import COMPACT_LEVEL, CompactBody
from serve_app.protocols.responses.stored import parsed_items, response_id_of
from serve_app.reference.operations import COMPLETION_FAILURES, URGENCY_HEADERS, Access, Fields, Operation


class CompactionEndpoints:
    """Endpoint that compacts a conversation, and the compaction of one that a response continues.

    The summary is one completion of the same caller, in the same band and within the same limits.
    """

    def __init__(self, bodies: BodyReader, completions: Completions, stored: StoredResponses) -> None:
        self._bodies = bodies
        self._completions = completions
        self._stored = stored

    @Operation(
        "POST",
        "/v1/responses/compact",
        "Completions",
        CompactedResponse,
        access=Access.LIMITED,
        failures=COMPLETION_FAILURES,
        bodies=(Fields(CompactBody, {}),),
        headers=URGENCY_HEADERS,
        answer_headers=ANSWER_HEADERS,
    )
    async def compact(self, request: Request) -> Response:
        """Compact a conversation: the user's messages, and a summary that only this server can read."""
        owner = caller_of(request).owner_before_parsing
        asked = await self._bodies.convert(request, compact_request, owner, COMPACT_LEVEL)
        asked = await self.with_items(request, asked)
        continued = await self.continued(request, asked)
        summary = await self._summary(request, continued, await self.adapted(request, continued))
        return await self._completions.respond_to_adapted(request, summary)

    async def with_items(self, request: Request, asked: ResponseRequest) -> ResponseRequest:
        """Return a request with the stored items to which it refers.

        Raises:
            UnknownItem: one of them is not stored.
            InvalidRequest: the conversation cannot be served.
        """
        if not asked.referenced_ids:
            return asked
        references = [ItemReference(item_id, response_id_of(item_id)) for item_id in asked.referenced_ids]
        items = await self._stored.call(ResponsesService.find_items, tenant_of(request), references)
        owner = caller_of(request).owner_before_parsing
        return await self._bodies.run_by_size(partial(_referring, asked, items), owner, sum(map(len, items)))

    async def continued(self, request: Request, asked: ResponseRequest) -> ContinuedRequest:
        """Return a request with what is stored of its conversation, and the cipher of its tenant.

        Raises:
            UnknownResponse, UnknownConversation: the conversation is not stored.
        """
        tenant, previous_id = tenant_of(request), asked.body.previous_response_id
        history: tuple[str, ...] = ()
        if previous_id is not None or asked.conversation_id is not None:
            history = await self._stored.call(ResponsesService.history, tenant, previous_id, asked.conversation_id)
        return ContinuedRequest(asked, history, ContentCipher(await self._stored.content_key(), tenant))

    async def adapted(
        self, request: Request, continued: ContinuedRequest, compaction: str | None = None
    ) -> AdaptedChat:
        """Return the chat of a request, behind the encrypted summary `compaction` if there is one.

        Raises:
            InvalidRequest: the conversation cannot be served.
        """
        owner = caller_of(request).owner_before_parsing
        num_bytes = continued.num_chars + exchange_of(request).request_bytes
        return await self._bodies.run_by_size(partial(continued.adapted, compaction), owner, num_bytes)

    async def prepare(
        self, request: Request, continued: ContinuedRequest, adapted: AdaptedChat, caller: Caller
    ) -> PreparedCompletion:
        """Prepare the completion of a response, and compact its conversation if that is beyond the threshold.

        A conversation of instructions, a summary and one message of the user is not compacted, nor one whose answer
        the context cannot hold.

        Raises:
            ServingError: the request cannot be served, or its summary failed.
        """
        service, threshold = self._completions.service, continued.threshold
        try:
            prepared = await replace(adapted, droppable=()).prepare(service, caller)
        except ContextExceeded as error:
            has_no_room = (continued.asked.body.max_output_tokens or 0) >= error.max_model_len
            if has_no_room or not can_be_compacted(adapted):
                return await adapted.prepare(service, caller)
        else:
            is_below = threshold is None or prepared.progress.prompt_tokens <= threshold
            if is_below or not can_be_compacted(adapted):
                return prepared
        content = await self._compacted(request, continued, adapted, caller)
        return await (await self.adapted(request, continued, content)).prepare(service, caller)

    async def _compacted(
        self, request: Request, continued: ContinuedRequest, adapted: AdaptedChat, caller: Caller
    ) -> str:
        """Return the encrypted summary of a conversation; its tokens count for the API key."""
        service, use = self._completions.service, exchange_of(request).key_use
        summary = await self._summary(request, continued, adapted)
        prepared = await summary.prepare(service, replace(caller, request_id=f"{caller.request_id}-compaction"))
        try:
            return compacted_content(await service.answer(prepared))
        finally:
            if use is not None:
                use.charge(prepared.progress.prompt_tokens + prepared.progress.completion_tokens)

    async def _summary(self, request: Request, continued: ContinuedRequest, adapted: AdaptedChat) -> AdaptedChat:
        """Return the chat that asks for a conversation's summary."""
        num_tokens = most_summary_tokens(await self._completions.service.max_model_len(), continued.threshold)
        owner = caller_of(request).owner_before_parsing
        make = partial(continued.summary, adapted, num_tokens)
        return await self._bodies.run_by_size(make, owner, adapted.chat.messages.num_bytes)


def _referring(asked: ResponseRequest, items: Sequence[str]) -> ResponseRequest:
    return asked.with_items(parsed_items(items))
