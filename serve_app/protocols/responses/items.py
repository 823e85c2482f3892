"""Schemas of a response's input: items of a conversation, as clients send them and as answers had them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from serve_app.errors import shown
from serve_app.openai.request.body import INVALID, UNSUPPORTED, NonEmptyText, StrictBody

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(StrictBody):
    """Text of the client."""

    type: Literal["input_text"]
    text: str


class OutputText(StrictBody):
    """Text of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    """Notes on the text; accepted in history and not used."""
    logprobs: list[Any] = Field(default_factory=list)
    """Log probabilities; accepted in history and not used."""


class Refusal(StrictBody):
    """Refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str


class SummaryText(StrictBody):
    """Part of a summary of the reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(StrictBody):
    """Part of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


def _joined(*kinds: str) -> Callable[[object], object]:
    """Return the function that joins the texts of a list of parts by newlines, as chats have it."""

    def joined(content: object) -> object:
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in kinds:
                message = "has a part of type {kind}; only parts of the types {kinds} are supported"
                raise PydanticCustomError(UNSUPPORTED, message, {"kind": shown(kind), "kinds": ", ".join(kinds)})
            text = part.get("refusal" if kind == "refusal" else "text")
            if not isinstance(text, str):
                raise PydanticCustomError(INVALID, "has a part without a text")
            texts.append(text)
        return "\n".join(texts)

    return joined


MessageText = Annotated[
    str,
    BeforeValidator(
        _joined("input_text", "output_text", "text", "refusal"),
        json_schema_input_type=str | list[InputText | OutputText | Refusal],
    ),
]
OutputOfTool = Annotated[str, BeforeValidator(_joined("input_text"), json_schema_input_type=str | list[InputText])]


class ItemMessage(StrictBody):
    """Turn of a conversation."""

    type: Literal["message"] = "message"
    id: str | None = None
    status: ItemStatus | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageText


class FunctionCall(StrictBody):
    """Call of a function in an earlier answer."""

    type: Literal["function_call"]
    id: str | None = None
    status: ItemStatus | None = None
    call_id: NonEmptyText
    name: NonEmptyText
    namespace: NonEmptyText | None = None
    """Namespace of the function among the request's tools."""
    arguments: str
    """Text of a JSON object."""


class FunctionCallOutput(StrictBody):
    """Result of a function's call, or of a function that the client has run by itself."""

    type: Literal["function_call_output"]
    id: str | None = None
    status: ItemStatus | None = None
    call_id: NonEmptyText | None = None
    """Call in an earlier item. Without one the output is a message of the user, after the function's name."""
    name: NonEmptyText | None = None
    namespace: NonEmptyText | None = None
    output: OutputOfTool

    @model_validator(mode="after")
    def _has_an_origin(self) -> FunctionCallOutput:
        if self.call_id is None and self.name is None:
            raise PydanticCustomError(INVALID, "has neither `call_id` nor `name`")
        return self


class CustomToolCall(StrictBody):
    """Call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    id: str | None = None
    status: ItemStatus | None = None
    call_id: NonEmptyText
    name: NonEmptyText
    namespace: NonEmptyText | None = None
    """Namespace of the tool among the request's tools."""
    input: str


class CustomToolCallOutput(StrictBody):
    """Result of a custom tool's call."""

    type: Literal["custom_tool_call_output"]
    id: str | None = None
    status: ItemStatus | None = None
    call_id: NonEmptyText
    output: OutputOfTool


class Reasoning(StrictBody):
    """Reasoning of an earlier answer, for chat templates that show it."""

    type: Literal["reasoning"]
    id: str | None = None
    status: ItemStatus | None = None
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] = Field(default_factory=list)
    encrypted_content: str | None = None
    """Text that this server encrypted for the tenant, read where the item has no other."""


class Compaction(StrictBody):
    """Summary of all items before it, which the model sees in their place."""

    type: Literal["compaction"]
    id: str | None = None
    status: ItemStatus | None = None
    encrypted_content: NonEmptyText
    """Summary that this server encrypted for the tenant."""


ITEMS = (ItemMessage, FunctionCall, FunctionCallOutput, CustomToolCall, CustomToolCallOutput, Reasoning, Compaction)
PARTS = (InputText, OutputText, Refusal, SummaryText, ReasoningText)


def _kind(value: object) -> str | None:
    """Return the tag of an item, in brackets; None: its type is none of `ITEMS`."""
    kind = value.get("type", "message") if isinstance(value, dict) else None
    return f"<{kind}>" if isinstance(kind, str) else None


Item = Annotated[
    Annotated[ItemMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[CustomToolCall, Tag("<custom_tool_call>")]
    | Annotated[CustomToolCallOutput, Tag("<custom_tool_call_output>")]
    | Annotated[Reasoning, Tag("<reasoning>")]
    | Annotated[Compaction, Tag("<compaction>")],
    Discriminator(
        _kind,
        custom_error_type=UNSUPPORTED,
        custom_error_message="must be an object whose `type` is message, function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output, reasoning or compaction",
    ),
]
