"""Schemas of the bodies of /v1/conversations, names and types as OpenAI defines them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from serve_app.openai.request.body import StrictBody
from serve_app.openai.request.schema import Metadata
from serve_app.openai.request.unknown_fields import Level, level_of
from serve_app.protocols.responses.items import ITEMS, PARTS, Item

MAX_NEW_ITEMS = 20
"""Most items of one request, as in OpenAI's API."""


class MetadataBody(StrictBody):
    """Body of POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None
    """Metadata that replace the present ones."""


class ConversationBody(StrictBody):
    """Body of POST /v1/conversations."""

    items: Annotated[list[Item], Field(max_length=MAX_NEW_ITEMS)] | None = None
    """First items of the conversation."""
    metadata: Metadata | None = None


class ItemsBody(StrictBody):
    """Body of POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[list[Item], Field(min_length=1, max_length=MAX_NEW_ITEMS)]
    """Items that follow those of the conversation."""


_PARTS = level_of(*PARTS)
CONVERSATION_LEVEL = Level(
    frozenset({"items", "metadata"}), {}, {"items": level_of(*ITEMS, content=_PARTS, summary=_PARTS, output=_PARTS)}
)
"""Fields that are known."""
