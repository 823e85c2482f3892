"""Schemas of the bodies of Anthropic's Messages API: names, types and fixed bounds.

Bounds that chats have, too, such as that of `temperature`, are checked with the chat. `cache_control` may stand where
Anthropic's API has it, and changes nothing: every prompt is cached.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from serve_app.errors import shown
from serve_app.openai.request.body import INVALID, UNSUPPORTED, NonEmptyText, StrictBody
from serve_app.openai.request.tools import FunctionName
from serve_app.openai.request.unknown_fields import level_of

Anything = dict[str, Any]
"""Object of any fields."""

_BLOCKS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
"""Types of the blocks of each role's turns."""


def _as_blocks(content: object) -> object:
    """Return content as blocks; a text is one block of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def _served_block(block: object) -> object:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in _KINDS:
        message = "is a block of type {kind}; only {served} are supported"
        raise PydanticCustomError(UNSUPPORTED, message, {"kind": shown(kind), "served": ", ".join(_KINDS)})
    return block


def _kind_of(block: Any) -> str:
    return f"<{block['type']}>"


def _no_citations(citations: list[Any]) -> list[Any]:
    if citations:
        raise PydanticCustomError(UNSUPPORTED, "are not supported")
    return citations


class Block(StrictBody):
    """Block of content."""

    cache_control: Anything | None = None


class TextBlock(Block):
    """Block of text."""

    type: Literal["text"]
    text: str
    citations: list[Any] = Field(default_factory=list)

    _without_citations = field_validator("citations")(_no_citations)


def _only_text(block: object) -> object:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        message = "is a block of type {kind}; only text is supported here"
        raise PydanticCustomError(UNSUPPORTED, message, {"kind": shown(kind)})
    return block


Texts = Annotated[
    list[Annotated[TextBlock, BeforeValidator(_only_text)]],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]
"""Text, alone or in blocks."""


class ThinkingBlock(Block):
    """Reasoning of an earlier turn; its signature may be any."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Block):
    """Reasoning that only Anthropic's server can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(Block):
    """Call of a tool in an earlier turn."""

    type: Literal["tool_use"]
    id: NonEmptyText
    name: NonEmptyText
    input: Anything = Field(default_factory=dict)
    caller: Anything | None = None
    """Origin of the call; accepted in history and not used."""


class ToolResultBlock(Block):
    """Result of a call."""

    type: Literal["tool_result"]
    tool_use_id: NonEmptyText
    content: Texts = Field(default_factory=list)
    is_error: bool = False
    """True if the tool failed; its text then begins with `Error: ` in the prompt."""


_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")

AnyBlock = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("<text>")]
        | Annotated[ThinkingBlock, Tag("<thinking>")]
        | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
        | Annotated[ToolUseBlock, Tag("<tool_use>")]
        | Annotated[ToolResultBlock, Tag("<tool_result>")],
        Discriminator(_kind_of),
    ],
    BeforeValidator(_served_block),
]
Blocks = Annotated[
    Annotated[list[AnyBlock], Field(fail_fast=True)],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[AnyBlock]),
]
"""Content: a text, or blocks."""


class InputMessage(StrictBody):
    """Turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @field_validator("content")
    @classmethod
    def _fits_the_role(cls, blocks: list[AnyBlock], info: ValidationInfo) -> list[AnyBlock]:
        served = _BLOCKS.get(info.data.get("role", ""), _KINDS)
        for index, block in enumerate(blocks):
            if block.type not in served:
                message = "has a block of type {kind} at {index}; turns of this role have only {served}"
                context = {"index": index, "kind": shown(block.type), "served": ", ".join(served)}
                raise PydanticCustomError(INVALID, message, context)
        return blocks


class DescribedTool(StrictBody):
    """Tool that the client describes and runs."""

    type: Literal["custom"] = "custom"
    name: FunctionName
    description: str | None = None
    input_schema: Anything
    """JSON Schema of the input."""
    strict: bool = False
    """True if a keyword of the schema that cannot be enforced is an error."""
    cache_control: Anything | None = None


class TypedTool(StrictBody):
    """Tool that Anthropic's API describes, such as `bash_20250124`; the client runs it, or only Anthropic's server."""

    model_config = ConfigDict(extra="ignore")

    type: NonEmptyText
    name: NonEmptyText | None = None
    """Name in calls; a toolset has none."""


def _tool_kind(tool: object) -> str:
    return "<custom>" if not isinstance(tool, dict) or tool.get("type") in (None, "custom") else "<typed>"


AnyTool = Annotated[
    Annotated[DescribedTool, Tag("<custom>")] | Annotated[TypedTool, Tag("<typed>")], Discriminator(_tool_kind)
]


class Choice(StrictBody):
    """Choice of tools: the model may call them (`auto`), must call one (`any`) or the named one, or may not."""

    type: Literal["auto", "any", "tool", "none"]
    name: NonEmptyText | None = None
    disable_parallel_tool_use: bool = False
    """True if one answer has one call at most."""


class Thinking(StrictBody):
    """Reasoning of the model; without it there is none, in models that can do without."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    """No effect: `max_tokens` is the only bound."""
    display: Literal["summarized", "omitted"] | None = None
    """No effect: the reasoning is shown as it is."""


class JsonOutput(StrictBody):
    """JSON that meets a schema."""

    type: Literal["json_schema"]
    schema_: Anything = Field(alias="schema")


class OutputConfig(StrictBody):
    """Effort and form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Effort of the reasoning, `high` by default; `max` is `xhigh`."""
    format: JsonOutput | None = None


class Metadata(StrictBody):
    """Metadata of a request."""

    user_id: str | None = None
    """User for fair scheduling, where there are no API keys."""


class PromptBody(StrictBody):
    """Body of POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: Texts = Field(default_factory=list)
    """Instructions before the messages."""
    tools: list[AnyTool] = Field(default_factory=list)
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    cache_control: Anything | None = None
    context_management: Anything | None = None
    """No effect: the prompt is what the client sends."""


class MessagesBody(PromptBody):
    """Body of POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    """Most tokens of the answer. One that the context does not hold beside the prompt is lowered to what it holds."""
    stream: bool = False
    stop_sequences: list[NonEmptyText] = Field(default_factory=list)
    """Texts before which the answer ends."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata = Field(default_factory=Metadata)
    service_tier: Literal["auto", "standard_only"] | None = None
    """No effect: the header `x-headway-priority` names the band."""


_BLOCK_SCHEMAS: tuple[type[Block], ...] = (
    TextBlock,
    ThinkingBlock,
    RedactedThinkingBlock,
    ToolUseBlock,
    ToolResultBlock,
)
_TEXTS = level_of(TextBlock)
MESSAGES_LEVEL = level_of(
    MessagesBody,
    no_effect={"thread": ()},
    without=("context_management", "service_tier"),
    system=_TEXTS,
    messages=level_of(InputMessage, content=level_of(*_BLOCK_SCHEMAS, content=_TEXTS)),
    tools=level_of(DescribedTool, TypedTool),
    tool_choice=level_of(Choice),
    thinking=level_of(Thinking, without=("budget_tokens", "display")),
    output_config=level_of(OutputConfig),
    metadata=level_of(Metadata),
)
"""Fields that have an effect, or are known to have none that a client could miss."""
OPEN_MESSAGES = (
    *_BLOCK_SCHEMAS, MessagesBody, PromptBody, InputMessage, DescribedTool, Choice, Thinking, OutputConfig, Metadata,
)  # fmt: skip
"""Schemas of the objects in which unknown fields are ignored."""
