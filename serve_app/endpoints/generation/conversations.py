"""Endpoints of /v1/conversations: conversations, and the items in them."""

from __future__ import annotations

import time
from typing import Any

from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from serve_app.endpoints.generation.item_pages import item_list, item_page_of
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import caller_of, json_response, tenant_of
from serve_app.jobs.access import stored_id_of
from serve_app.jobs.api.records import new_id
from serve_app.jobs.api.responses import ConversationRecord, ItemPage, ResponsesService
from serve_app.jobs.response_client import StoredResponses
from serve_app.openai.request.job_schema import ItemListQuery
from serve_app.openai.request.parsing import parse_body
from serve_app.protocols.responses.answers import ConversationObject, DeletedConversation, StoredItemList
from serve_app.protocols.responses.conversations import (
    CONVERSATION_LEVEL,
    ConversationBody,
    ItemsBody,
    MetadataBody,
)
from serve_app.protocols.responses.stored import stored_items
from serve_app.reference.operations import BODY_FAILURES, LOOKUP_FAILURES, Created, Fields, Operation

_ROOT = "/v1/conversations"
_PATH = f"{_ROOT}/{{conversation_id}}"
_ITEM = f"{_PATH}/items/{{item_id}}"
_CHANGE_FAILURES = BODY_FAILURES | LOOKUP_FAILURES | {429}


class ConversationEndpoints:
    """Endpoints that create, show, change and delete conversations; a tenant sees only its own."""

    def __init__(self, bodies: BodyReader, stored: StoredResponses) -> None:
        self._bodies = bodies
        self._stored = stored

    @Operation(
        "POST",
        _ROOT,
        "Conversations",
        ConversationObject,
        failures=_CHANGE_FAILURES,
        bodies=(Fields(ConversationBody, {}),),
        created=Created(_PATH),
    )
    async def create(self, request: Request) -> Response:
        """Create a conversation, with its first items or without."""
        fields = await self._read(request, ConversationBody)
        metadata = to_json(fields.get("metadata") or {}).decode()
        conversation = ConversationRecord(new_id("conv"), time.time(), metadata)
        items = stored_items(fields.get("items") or [], conversation.id)
        await self._stored.call(ResponsesService.create_conversation, tenant_of(request), conversation, items)
        return _shown(conversation)

    @Operation("GET", _PATH, "Conversations", ConversationObject, failures=LOOKUP_FAILURES)
    async def show(self, request: Request) -> Response:
        """Show a conversation without its items."""
        return _shown(
            await self._stored.call(ResponsesService.conversation, tenant_of(request), _conversation_id(request))
        )

    @Operation(
        "POST",
        _PATH,
        "Conversations",
        ConversationObject,
        failures=_CHANGE_FAILURES,
        bodies=(Fields(MetadataBody, {}),),
    )
    async def change(self, request: Request) -> Response:
        """Replace the metadata of a conversation."""
        fields, conversation_id = await self._read(request, MetadataBody), _conversation_id(request)
        metadata = to_json(fields["metadata"] or {}).decode()
        return _shown(
            await self._stored.call(ResponsesService.change_conversation, tenant_of(request), conversation_id, metadata)
        )

    @Operation("DELETE", _PATH, "Conversations", DeletedConversation, failures=LOOKUP_FAILURES)
    async def delete(self, request: Request) -> Response:
        """Delete a conversation and its items."""
        conversation_id = _conversation_id(request)
        await self._stored.call(ResponsesService.delete_conversation, tenant_of(request), conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    @Operation(
        "POST",
        f"{_PATH}/items",
        "Conversations",
        StoredItemList,
        failures=_CHANGE_FAILURES,
        bodies=(Fields(ItemsBody, {}),),
    )
    async def add_items(self, request: Request) -> Response:
        """Add items to the end of a conversation."""
        fields, conversation_id = await self._read(request, ItemsBody), _conversation_id(request)
        items = stored_items(fields["items"], new_id("conv"))
        await self._stored.call(ResponsesService.add_items, tenant_of(request), conversation_id, items)
        return item_list(ItemPage(items, has_more=False))

    @Operation(
        "GET",
        f"{_PATH}/items",
        "Conversations",
        StoredItemList,
        failures=LOOKUP_FAILURES | {400},
        query=ItemListQuery,
    )
    async def items(self, request: Request) -> Response:
        """List the items of a conversation, newest first."""
        page, conversation_id = item_page_of(request), _conversation_id(request)
        return item_list(
            await self._stored.call(ResponsesService.conversation_items, tenant_of(request), conversation_id, page)
        )

    @Operation("GET", _ITEM, "Conversations", dict[str, Any], failures=LOOKUP_FAILURES)
    async def item(self, request: Request) -> Response:
        """Show an item of a conversation."""
        ids = _conversation_id(request), stored_id_of(request.path_params["item_id"])
        item = await self._stored.call(ResponsesService.conversation_item, tenant_of(request), *ids)
        return Response(item, media_type="application/json")

    @Operation("DELETE", _ITEM, "Conversations", ConversationObject, failures=LOOKUP_FAILURES)
    async def delete_item(self, request: Request) -> Response:
        """Delete an item of a conversation; show the conversation."""
        ids = _conversation_id(request), stored_id_of(request.path_params["item_id"])
        return _shown(await self._stored.call(ResponsesService.delete_item, tenant_of(request), *ids))

    async def _read(
        self, request: Request, schema: type[ConversationBody | MetadataBody | ItemsBody]
    ) -> dict[str, Any]:
        """Return the fields of a body that matches a schema, as they were sent."""
        owner, level = caller_of(request).owner_before_parsing, CONVERSATION_LEVEL
        return await self._bodies.convert(request, _Checked(schema), owner, level)


class _Checked:
    """Check of a body's fields against a schema."""

    def __init__(self, schema: type[ConversationBody | MetadataBody | ItemsBody]) -> None:
        self._schema = schema

    def __call__(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields.

        Raises:
            InvalidRequest: they do not match.
        """
        parse_body(self._schema, fields, {})
        return fields


def _conversation_id(request: Request) -> str:
    return stored_id_of(request.path_params["conversation_id"])


def _shown(conversation: ConversationRecord) -> Response:
    return json_response(
        {
            "id": conversation.id,
            "object": "conversation",
            "created_at": int(conversation.created_unix_s),
            "metadata": from_json(conversation.metadata),
        }
    )
