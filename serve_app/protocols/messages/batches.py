"""Schemas of Anthropic's Message Batches: bodies, queries and answers."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from serve_app.openai.reply.schema import described
from serve_app.openai.request.body import INVALID, StrictBody
from serve_app.openai.request.job_schema import Id, Query
from serve_app.openai.request.unknown_fields import level_of
from serve_app.protocols.messages.answers import Message, MessageError

_CUSTOM_ID = re.compile("[A-Za-z0-9_-]{1,64}")


def _custom_id(text: str) -> str:
    if not _CUSTOM_ID.fullmatch(text):
        raise PydanticCustomError(INVALID, "must be 1 to 64 characters: letters, digits, `_` and `-`")
    return text


class BatchedMessage(StrictBody):
    """Request of a batch."""

    custom_id: Annotated[
        str, AfterValidator(_custom_id), Field(json_schema_extra={"pattern": f"^{_CUSTOM_ID.pattern}$"})
    ]
    """Name of the request in the results, unique in its batch."""
    params: dict[str, Any]
    """Body of POST /v1/messages. It is checked when the request runs; an error there fails this request alone."""


class MessageBatchBody(StrictBody):
    """Body of POST /v1/messages/batches."""

    requests: Annotated[list[BatchedMessage], Field(min_length=1)]


MESSAGE_BATCH_LEVEL = level_of(MessageBatchBody, requests=level_of(BatchedMessage))
"""Fields that are known."""
OPEN_MESSAGE_BATCHES = (MessageBatchBody, BatchedMessage)
"""Schemas of the objects in which unknown fields are ignored."""


class MessageBatchQuery(Query):
    """Page of a list of message batches."""

    after_id: Id | None = None
    """Batch before the page's first one."""
    before_id: Id | None = None
    """Batch behind the page's last one."""
    limit: int = Field(20, ge=1, le=1000)


@described
class MessageCounts(TypedDict):
    """Numbers of a batch's requests. Until the batch has ended, all of them count as processing."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


@described
class MessageBatch(TypedDict):
    """Anthropic's message batch. Times are RFC 3339; a time that has not come is null."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None
    results_url: str | None
    """Address of the results; null until the batch has ended."""


@described
class MessageBatchList(TypedDict):
    """Page of a list of message batches, newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


@described
class DeletedMessageBatch(TypedDict):
    """Confirmation of a deletion."""

    id: str
    type: Literal["message_batch_deleted"]


@described
class SucceededMessage(TypedDict):
    """Result of a request that was answered."""

    type: Literal["succeeded"]
    message: Message


@described
class ErroredMessage(TypedDict):
    """Result of a request that failed."""

    type: Literal["errored"]
    error: MessageError


@described
class UndoneMessage(TypedDict):
    """Result of a request that the end of its batch left undone."""

    type: Literal["canceled", "expired"]


@described
class MessageBatchResult(TypedDict):
    """Line of the results."""

    custom_id: str
    result: SucceededMessage | ErroredMessage | UndoneMessage
