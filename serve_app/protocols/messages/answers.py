"""Schemas of the answers of Anthropic's API: messages, the events of their streams, counts, models and errors."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from serve_app.openai.reply.format import JsonObject
from serve_app.openai.reply.schema import described

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


@described
class Text(TypedDict):
    """Text of an answer."""

    type: Literal["text"]
    text: str


@described
class Thought(TypedDict):
    """Reasoning before an answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """Name of the block; it signs nothing."""


@described
class ToolUse(TypedDict):
    """Call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@described
class ThinkingTokens(TypedDict):
    """Details about output tokens."""

    thinking_tokens: int


@described
class MessageUsage(TypedDict):
    """Token counts of a message; the prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    """Prompt tokens that were computed."""
    cache_creation_input_tokens: Literal[0]
    """Always 0: every prompt is cached, without being asked."""
    cache_read_input_tokens: int
    """Prompt tokens that were found in a KV cache."""
    output_tokens: int
    output_tokens_details: ThinkingTokens
    service_tier: Literal["standard"]


@described
class Message(TypedDict):
    """Answer of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Text | Thought | ToolUse]
    stop_reason: StopReason | None
    """Reason of the end; `model_context_window_exceeded` where the context ends before `max_tokens`."""
    stop_sequence: str | None
    usage: MessageUsage
    warnings: NotRequired[list[str]]
    """Fields, tools and keywords of schemas without effect, in whole answers."""


class MessageEvent(TypedDict):
    """Event of a stream, whose name is its `type`; `message_stop` or `error` is the last one."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "ping", "error",
    ]  # fmt: skip
    index: NotRequired[int]
    """Index of the block."""
    message: NotRequired[Message]
    content_block: NotRequired[Text | Thought | ToolUse]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessageUsage]
    error: NotRequired[dict[str, Any]]


@described
class MessageErrorCode(TypedDict):
    """Details of a failure."""

    error_code: str | None
    """Code that the failure has in OpenAI's error object."""


@described
class MessageErrorDetails(TypedDict):
    """Reason of a failure, by Anthropic's type."""

    type: str
    message: str
    details: MessageErrorCode


@described
class MessageError(TypedDict):
    """Anthropic's error object, the body of every failed request below /v1/messages."""

    type: Literal["error"]
    error: MessageErrorDetails
    request_id: NotRequired[str]


@described
class TokenCount(TypedDict):
    """Number of tokens of a prompt."""

    input_tokens: int


@described
class ModelInfo(TypedDict):
    """Served model as Anthropic's API describes one."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    """Start of the process that answers, RFC 3339."""
    lifecycle: Literal["active"]
    max_input_tokens: int
    """Most tokens of a prompt."""
    max_tokens: int
    """Most tokens of an answer, less those of its prompt."""


@described
class ModelInfoList(TypedDict):
    """List of the served models as Anthropic's API has it."""

    data: list[ModelInfo]
    has_more: Literal[False]
    first_id: str
    last_id: str


def model_info(name: str, created_unix_s: float, max_model_len: int) -> JsonObject:
    """Return a model's description in Anthropic's form."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(created_unix_s), UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }
