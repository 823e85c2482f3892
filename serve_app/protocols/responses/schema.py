"""Schema of the body of POST /v1/responses: names and types as OpenAI defines them, and this server's own fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from serve_app.openai.request.body import INVALID, IgnoredValues, NonEmptyText, StrictBody
from serve_app.openai.request.formats import JsonObjectFormat, JsonSchema, TextFormat
from serve_app.openai.request.schema import MAX_INT64, GenerationOptions, RequestOptions
from serve_app.openai.request.tools import FunctionName
from serve_app.openai.request.unknown_fields import CHAT_LEVEL, Level, level_of
from serve_app.protocols.responses.items import ITEMS, PARTS, Item


class FlatFunction(StrictBody):
    """Function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments; without one they are any object."""
    strict: bool = False
    """True if a keyword of `parameters` that cannot be enforced is an error. Otherwise the answer's header names it."""


class AnyText(StrictBody):
    """Any text."""

    type: Literal["text"]


class InputGrammar(StrictBody):
    """Grammar of a custom tool's input."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: NonEmptyText
    """Regular expression, or a grammar of Lark's whose rules do not refer to themselves."""


class CustomTool(StrictBody):
    """Tool whose input is text."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: Annotated[
        Annotated[AnyText, Tag("<text>")] | Annotated[InputGrammar, Tag("<grammar>")],
        Discriminator(lambda value: "<text>" if _type_of(value) == "text" else "<grammar>"),
    ] = AnyText(type="text")
    """Form of the input; it is enforced."""


class NamespaceTool(StrictBody):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: list[
        Annotated[
            Annotated[FlatFunction, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
            Discriminator(lambda value: "<custom>" if _type_of(value) == "custom" else "<function>"),
        ]
    ]


class ForeignTool(StrictBody):
    """Tool of another type, such as `web_search`, which this server cannot run; the model does not see it."""

    model_config = ConfigDict(extra="allow")

    type: NonEmptyText


def _type_of(value: object) -> object:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _tag(*known: str) -> Any:
    """Return the discriminator of objects of some types, and of all others as `foreign`; modes are texts."""

    def tag(value: object) -> str:
        if isinstance(value, str):
            return "<mode>"
        kind = _type_of(value)
        return f"<{kind}>" if kind in known else "<foreign>"

    return Discriminator(tag)


Tool = Annotated[
    Annotated[FlatFunction, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[ForeignTool, Tag("<foreign>")],
    _tag("function", "custom", "namespace"),
]


class NamedTool(StrictBody):
    """Choice of one tool, which the model must call."""

    type: Literal["function", "custom"]
    name: NonEmptyText
    namespace: NonEmptyText | None = None


class AllowedTools(StrictBody):
    """Choice of some of the tools, which alone the model may call, or must (`required`)."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[
        list[
            Annotated[
                Annotated[NamedTool, Tag("<function>")]
                | Annotated[NamedTool, Tag("<custom>")]
                | Annotated[ForeignTool, Tag("<foreign>")],
                _tag("function", "custom"),
            ]
        ],
        Field(min_length=1),
    ]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<function>")]
    | Annotated[NamedTool, Tag("<custom>")]
    | Annotated[AllowedTools, Tag("<allowed_tools>")]
    | Annotated[ForeignTool, Tag("<foreign>")],
    _tag("function", "custom", "allowed_tools"),
]


class FlatJsonSchemaFormat(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


class TextOptions(StrictBody):
    """Form of the answer's text."""

    format: Annotated[
        Annotated[TextFormat, Tag("<text>")]
        | Annotated[JsonObjectFormat, Tag("<json_object>")]
        | Annotated[FlatJsonSchemaFormat, Tag("<json_schema>")],
        Discriminator(
            lambda value: f"<{_type_of(value)}>",
            custom_error_type=INVALID,
            custom_error_message="must be an object whose `type` is text, json_object or json_schema",
        ),
    ] = TextFormat(type="text")


class ReasoningOptions(StrictBody):
    """Options of the reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Effort, for chat templates that know it; `none` switches the reasoning off, `max` is `xhigh`."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """With any value the reasoning is its own summary, and the item has no `content`: nothing is summarized."""


LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""Values of `include` that have an effect."""
StoredId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class ItemReference(StrictBody):
    """Stored item of the tenant, by its id."""

    type: Literal["item_reference"]
    id: StoredId


InputItem = Annotated[
    Annotated[Item, Tag("<item>")] | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(lambda value: "<item_reference>" if _type_of(value) == "item_reference" else "<item>"),
]


class ConversationReference(StrictBody):
    """Conversation, by its id."""

    id: StoredId


class CompactionOptions(StrictBody):
    """Compaction of the conversation within the request."""

    type: Literal["compaction"]
    compact_threshold: int | None = Field(None, ge=1, le=MAX_INT64)
    """Most tokens of a prompt that is not compacted; without it, what the context holds."""


Input = Annotated[
    Annotated[NonEmptyText, Tag("<text>")]
    | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("<items>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<items>"),
]


class CompactBody(RequestOptions):
    """Body of POST /v1/responses/compact."""

    input: Input | None = None
    """Items of the conversation, or the text of the user: all of it, or what follows the stored part, if anything."""
    previous_response_id: StoredId | None = None
    """Stored response whose conversation, its output included, comes before the input."""
    instructions: str | None = None
    """System message before the input."""


class ResponsesBody(GenerationOptions):
    """Body of POST /v1/responses."""

    input: Input
    """Items of the conversation, or the text of the user: all of it, or what follows the stored part."""
    previous_response_id: StoredId | None = None
    """Stored response whose conversation, its output included, comes before the input; its instructions do not."""
    conversation: (
        Annotated[
            Annotated[StoredId, Tag("<id>")] | Annotated[ConversationReference, Tag("<object>")],
            Discriminator(lambda value: "<id>" if isinstance(value, str) else "<object>"),
        ]
        | None
    ) = None
    """Conversation whose items come before the input. The input and the output are added to it at the end."""
    context_management: Annotated[list[CompactionOptions], Field(max_length=1)] = Field(default_factory=list)
    """Compaction: a prompt beyond the threshold is replaced by a summary of the conversation, which the output has."""
    store: bool = True
    """True if the response can be retrieved, continued and deleted later; it is kept for `keep_responses_s`."""
    background: bool = False
    """True if the response is made without the client, also when processes die; it needs `store`."""
    instructions: str | None = None
    """System message before the input."""
    stream: bool = False
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT64)
    """Most output tokens, reasoning included; without it, the rest of the context."""
    max_tool_calls: int | None = Field(None, ge=1, le=MAX_INT64)
    """Most calls of tools that the server runs: it runs none."""
    tools: list[Tool] = Field(default_factory=list)
    """Tools that the model may call."""
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    """True if one answer may have several calls."""
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: list[str] = Field(default_factory=list)
    """Parts of the answer: `message.output_text.logprobs`, and `reasoning.encrypted_content`, which is the reasoning
    for clients that send nothing else of it back. Other values are about tools that the server does not run."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """With `auto`, the first messages of an input that exceeds the context are dropped, each of the user with what
    follows it, and at last calls with their outputs. Instructions and the user's last message stay."""
    top_logprobs: int = Field(0, ge=0, le=MAX_INT64)
    """Most probable tokens at each position of the text, whose log probabilities are in the answer."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""

    @property
    def has_encrypted(self) -> bool:
        """True if the input has encrypted contents, or the output may."""
        items = () if isinstance(self.input, str) else self.input
        return bool(
            ENCRYPTED in self.include
            or self.context_management
            or any(getattr(item, "encrypted_content", None) for item in items)
        )


_STREAM_OPTIONS = ("include_obfuscation", "include_usage")
RESPONSES_IGNORED: IgnoredValues = {
    "stream_options": ({}, *({name: value} for name in _STREAM_OPTIONS for value in (False, True))),
}
"""Fields that are accepted with these values, and have no effect."""

REFUSED: Mapping[str, str] = {
    "prompt": "no prompts are stored; send `instructions` and `input`",
    "messages": "send `input`",
    "max_tokens": "send `max_output_tokens`",
    "max_completion_tokens": "send `max_output_tokens`",
    "response_format": "send `text.format`",
    "reasoning_effort": "send `reasoning.effort`",
}
"""Fields of other requests, with what to do."""
REFUSED_WITHOUT_STORE: Mapping[str, str] = {
    "previous_response_id": "nothing is stored here; send the whole conversation as `input`",
    "conversation": "nothing is stored here; send the whole conversation as `input`",
    "background": "use POST /v1/jobs or POST /v1/batches, or `stream`",
    "context_management": "send an `input` that fits the context, or `truncation`",
}
"""Fields that need stored responses, with what to do where there are none."""

_TOOLS = level_of(FlatFunction, CustomTool, NamespaceTool, tools=level_of(FlatFunction, CustomTool))
_ITEMS = level_of(*ITEMS, ItemReference, content=level_of(*PARTS), summary=level_of(*PARTS), output=level_of(*PARTS))
RESPONSES_LEVEL = Level(
    CHAT_LEVEL.names.union(ResponsesBody.model_fields, RESPONSES_IGNORED, REFUSED),
    RESPONSES_IGNORED,
    {
        "tools": _TOOLS,
        "input": _ITEMS,
        "text": level_of(TextOptions),
        "reasoning": level_of(ReasoningOptions),
        "tool_choice": level_of(NamedTool, AllowedTools),
        "conversation": level_of(ConversationReference),
        "context_management": level_of(CompactionOptions),
    },
)
"""Fields that are known, if only to be refused."""
COMPACT_LEVEL = level_of(CompactBody, input=_ITEMS)
OPEN_RESPONSES = (
    *ITEMS, *PARTS, ItemReference, ResponsesBody, FlatFunction, CustomTool, NamespaceTool, ForeignTool, TextOptions,
    ReasoningOptions, NamedTool, AllowedTools, ConversationReference, CompactionOptions, CompactBody,
)  # fmt: skip
"""Schemas of the objects in which unknown fields are ignored."""
