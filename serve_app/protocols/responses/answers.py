"""Schemas of the answers of OpenAI's Responses API: responses with their items, the events of streams, and counts."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from serve_app.openai.reply.schema import (
    CachedTokens,
    PositionObject,
    ReasoningTokens,
    ReplyTier,
    described,
)
from serve_app.protocols.responses.items import ItemStatus


@described
class OutputTextPart(TypedDict):
    """Text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    """Always empty."""
    logprobs: list[PositionObject]
    """Log probabilities of the text's tokens, if the request asks for them."""


@described
class ReasoningTextPart(TypedDict):
    """Text of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


@described
class SummaryTextPart(TypedDict):
    """Text of a reasoning, as its own summary."""

    type: Literal["summary_text"]
    text: str


@described
class MessageItem(TypedDict):
    """Answer to the user."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputTextPart]


@described
class ReasoningItem(TypedDict):
    """Reasoning before an answer."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[SummaryTextPart]
    content: NotRequired[list[ReasoningTextPart]]
    encrypted_content: NotRequired[str]
    """Reasoning for the next request, if this one asks for it; only this server can read it, for the same tenant."""


@described
class FunctionCallItem(TypedDict):
    """Call of a function."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


@described
class CustomToolCallItem(TypedDict):
    """Call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


@described
class CompactionItem(TypedDict):
    """Summary of the conversation before it."""

    id: str
    type: Literal["compaction"]
    status: NotRequired[ItemStatus]
    encrypted_content: str
    """Summary that only this server can read, for the same tenant."""


OutputItemObject = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem | CompactionItem


@described
class InputTokenDetails(CachedTokens):
    """Details about the prompt's tokens."""

    cache_write_tokens: Literal[0]
    """Always 0: every prompt is cached, without being asked."""


@described
class ResponseUsage(TypedDict):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


@described
class ResponseFailure(TypedDict):
    """Reason why a response failed in its stream."""

    code: Literal["server_error"]
    type: str | None
    """Code that the failure has in OpenAI's error object."""
    message: str


@described
class IncompleteDetails(TypedDict):
    """Reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


@described
class ConversationId(TypedDict):
    """Conversation that a response continues."""

    id: str


@described
class ResponseObject(TypedDict):
    """Response, with the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItemObject]
    usage: ResponseUsage | None
    service_tier: ReplyTier
    """Band in which the request ran: `priority` is interactive, `default` standard, `flex` batch."""
    instructions: str | None
    previous_response_id: str | None
    conversation: NotRequired[ConversationId]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    max_tool_calls: int | None
    max_output_tokens: int | None
    truncation: Literal["auto", "disabled"]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    store: bool
    """True if the response is stored."""
    background: bool
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    warnings: NotRequired[list[str]]
    """Fields, tools and keywords of schemas without effect, in whole answers."""


@described
class ResponseEvent(TypedDict):
    """Event of a stream, whose name is its `type`; the last one has the whole response."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed",
        "response.cancelled",
        "response.output_item.added", "response.output_item.done", "response.content_part.added",
        "response.content_part.done", "response.output_text.delta", "response.output_text.done",
        "response.reasoning_text.delta", "response.reasoning_text.done", "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done", "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ]  # fmt: skip
    sequence_number: int
    response: NotRequired[ResponseObject]
    output_index: NotRequired[int]
    item: NotRequired[OutputItemObject]
    item_id: NotRequired[str]
    content_index: NotRequired[Literal[0]]
    summary_index: NotRequired[Literal[0]]
    part: NotRequired[OutputTextPart | ReasoningTextPart | SummaryTextPart]
    delta: NotRequired[str]
    text: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]
    logprobs: NotRequired[list[PositionObject]]


@described
class CompactedResponse(TypedDict):
    """Compacted conversation, to be sent as the begin of the next input."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    """Instructions and messages of the user, and at last the compaction."""
    usage: ResponseUsage
    """Token counts of the summary."""
    warnings: NotRequired[list[str]]
    """Fields without effect."""


@described
class InputTokens(TypedDict):
    """Number of tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


@described
class DeletedResponse(TypedDict):
    """Response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


@described
class StoredItemList(TypedDict):
    """Page of the items of a response's input or of a conversation, as they were sent or made."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@described
class ConversationObject(TypedDict):
    """Conversation, without its items."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


@described
class DeletedConversation(TypedDict):
    """Conversation that was deleted."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]
