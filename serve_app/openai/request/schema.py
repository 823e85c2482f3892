"""Schemas of request bodies, as OpenAI and vLLM define them: names, types and fixed bounds.

Types are strict: "5" is not a number and 5.0 is not a token count. Null means "not given" in every object: nulls are
dropped, so fields with a default do not admit None. `validation` checks the bounds that depend on the model or the
configuration.

A body may hold millions of items, and pydantic holds the GIL while it checks a list. Hence long lists are checked in
Python, which lets other threads run, and only up to the first bad item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from serve_app.openai.request.body import CONFLICT, INVALID, UNSUPPORTED, IgnoredValues, NonEmptyText, StrictBody
from serve_app.openai.request.conversation import Conversation, MessageList
from serve_app.openai.request.formats import ResponseFormat, StructuredOutputs, TextFormat
from serve_app.openai.request.tools import FunctionTool, NamedToolChoice, ToolChoice

MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1

Prompt = str | list[int]
"""Prompt as text or as token ids."""

ServiceTier = Literal["auto", "default", "scale", "flex", "priority", "fast"]

COMMON_IGNORED: IgnoredValues = {
    "store": (False, True),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "logits_processors": ([],),
}

CHAT_IGNORED: IgnoredValues = {
    **COMMON_IGNORED,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
}

COMPLETION_IGNORED: IgnoredValues = {
    **COMMON_IGNORED,
    "parallel_tool_calls": (True, False),
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}

TOKENIZE_IGNORED: IgnoredValues = {"chat_template": ()}


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def as_prompts(value: object) -> list[Prompt]:
    """Return any of OpenAI's four forms of `prompt` as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value) or all(_is_token_ids(item) for item in value):
            return list(value)
    raise PydanticCustomError(
        INVALID, "must be a string, a list of strings, a list of token ids or a list of lists of token ids, not empty"
    )


def _checked_token_ids(value: object, info: ValidationInfo) -> list[int]:
    if not isinstance(value, list):
        raise PydanticCustomError(INVALID, "must be a list of token ids")
    for index, item in enumerate(value):
        if type(item) is not int:
            raise PydanticCustomError(
                INVALID, "has an item that is no token id", {"param": f"{info.field_name}[{index}]"}
            )
    return value


def no_longer_than(limit: int) -> BeforeValidator:
    """Return a validator that checks the number of items before any item is validated."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            message = "has {num_items} items; at most {limit} are accepted"
            raise PydanticCustomError(INVALID, message, {"num_items": len(value), "limit": limit})
        return value

    return BeforeValidator(check)


TokenId = Annotated[int, Field(ge=0)]
PromptInput = (
    NonEmptyText
    | Annotated[list[NonEmptyText], Field(min_length=1)]
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
)
"""OpenAI's four forms of `prompt`."""

StopStrings = Annotated[
    list[NonEmptyText],
    no_longer_than(16),
    BeforeValidator(
        _as_list, json_schema_input_type=NonEmptyText | Annotated[list[NonEmptyText], Field(max_length=16)]
    ),
]
LogitBiases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    no_longer_than(1024),
]
TokenIds = Annotated[list[int], PlainValidator(_checked_token_ids, json_schema_input_type=list[TokenId])]


class StreamOptions(StrictBody):
    """Options for the usage on a stream's chunks."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's option: usage on every chunk, with `include_usage`."""
    include_obfuscation: Literal[False] = False


Metadata = Annotated[dict[str, str], no_longer_than(1024)]


class RequestOptions(StrictBody):
    """Options that every request names alike: the model, urgency and the caller."""

    model: str
    priority: int | None = Field(None, ge=0, le=2)
    """Band of the request: 0 is interactive, 1 standard, 2 batch."""
    service_tier: ServiceTier | None = None
    """OpenAI's name of the band, used without `priority` and its header."""
    deadline_ms: int | None = Field(None, ge=1, le=MAX_INT64)
    """Time after which the reply is useless, milliseconds from the request's arrival."""
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    """Requests of one key prefer one replica."""
    cache_salt: Annotated[NonEmptyText, Field(max_length=512)] | None = None
    """Requests with different salts share no block of the prefix cache, as in vLLM."""
    metadata: Metadata | None = None
    """Metadata of the SDKs, which a stored response shows; nothing else uses them."""


class GenerationOptions(RequestOptions):
    """Options of a generation that every protocol names alike, beside those of every request: its sampling."""

    temperature: float = Field(1.0, ge=0, le=2)
    """Temperature of sampling; 0 takes the most probable token. The model may have another default."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_INT64)
    """Top-k limit; 0 and -1 switch it off, as in vLLM."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Least probability of a token, as a share of the most probable one's."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    """Divisor of the logits of tokens that the prompt or the output has; 1 switches it off."""
    seed: int | None = Field(None, ge=MIN_INT64, le=MAX_INT64)
    """Seed of the sampling; choice i of a prompt uses `seed` + i."""
    min_tokens: int = Field(0, ge=0, le=MAX_INT64)
    """Output tokens before which nothing ends a choice."""
    stop: StopStrings = Field(default_factory=list)
    """Strings before which the text ends."""
    stop_token_ids: Annotated[TokenIds, no_longer_than(1024)] = Field(default_factory=list)
    """Tokens that end a choice."""
    ignore_eos: bool = False
    """True if a choice goes on behind the model's end token."""
    logit_bias: LogitBiases = Field(default_factory=dict)
    """Bias of single tokens, -100 to 100, by token id."""
    allowed_token_ids: Annotated[TokenIds, no_longer_than(65_536)] = Field(default_factory=list)
    """The only tokens that the output may have; empty: all."""
    bad_words: Annotated[list[NonEmptyText], no_longer_than(1024)] = Field(default_factory=list)
    """Words that the output does not have."""
    skip_special_tokens: bool = True
    """True if special tokens have no text."""


class GenerationBody(GenerationOptions):
    """Fields that chat and text completions share."""

    operation: ClassVar[str]
    """Name of the operation in traces (`gen_ai.operation.name`)."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_INT64)
    """Choices for each prompt."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INT64)
    """Tokens of a prompt that are kept; -1 keeps as many as the context holds beside `max_tokens`."""
    truncation_side: Literal["left", "right"] = "left"
    """Side from which `truncate_prompt_tokens` takes the other tokens: the beginning (`left`) or the end."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_INT64)
    """Most probable tokens at each position of the prompt, whose log probabilities are in the reply."""
    return_tokens_as_token_ids: bool = False
    """True if log probabilities name tokens by id, such as `token_id:15`."""
    response_format: ResponseFormat | None = None
    """Form of the output: any text, a JSON object, or JSON of a schema."""
    structured_outputs: StructuredOutputs | None = None
    """Constraint of the output, as in vLLM."""
    return_token_ids: bool = False
    """True if the reply has the token ids of prompt and output."""
    include_metrics: bool = False
    """True if the reply has `metrics`, the parts of the request's time, as in vLLM; in a stream the last chunk."""

    @property
    def has_constraint(self) -> bool:
        """True if not every text is a valid output."""
        return self.structured_outputs is not None or not (
            self.response_format is None or isinstance(self.response_format, TextFormat)
        )

    @model_validator(mode="after")
    def _has_one_constraint(self) -> GenerationBody:
        if self.structured_outputs is not None and self.response_format is not None:
            raise PydanticCustomError(
                CONFLICT, "is given beside `response_format`; send one of them", {"param": "structured_outputs"}
            )
        return self

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationBody:
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError(CONFLICT, "is not available in streams", {"param": "prompt_logprobs"})
        if self.truncate_prompt_tokens == 0:
            raise PydanticCustomError(
                CONFLICT, "is 0; it must be at least 1, or -1", {"param": "truncate_prompt_tokens"}
            )
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(CONFLICT, "is only for requests with `stream` true", {"param": "stream_options"})
        return self

    @property
    def input_messages(self) -> list[dict[str, Any]]:
        """Messages of the prompt as traces have them (`gen_ai.input.messages`)."""
        raise NotImplementedError


class ChatBody(GenerationBody, Conversation):
    """Body of POST /v1/chat/completions."""

    operation: ClassVar[str] = "chat"

    messages: MessageList
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT64)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT64)
    """Most output tokens of a choice; without it, the rest of the context. `max_tokens` is its old name."""
    tool_choice: ToolChoice | None = None
    """Choice of functions: the model may call them (`auto`, the default with `tools`), must (`required`, or a named
    one), or may not (`none`)."""
    parallel_tool_calls: bool = True
    """True if one answer may have several calls."""
    include_reasoning: bool = True
    """True if the reply has the reasoning."""
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_INT64)

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        self._check_tool_choice()
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(CONFLICT, "is only for requests with `logprobs` true", {"param": "top_logprobs"})
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError(
                CONFLICT,
                "is {new} but `max_tokens`, its old name, is {old}; send one of them",
                {"new": self.max_completion_tokens, "old": self.max_tokens, "param": "max_completion_tokens"},
            )
        return self

    def _check_tool_choice(self) -> None:
        if self.tool_choice in (None, "none", "auto"):
            return
        if not self.tools:
            raise PydanticCustomError(CONFLICT, "is only for requests with `tools`", {"param": "tool_choice"})
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            if name not in [tool.function.name for tool in self.tools]:
                raise PydanticCustomError(
                    CONFLICT,
                    "is {name}, which is none of `tools`",
                    {"name": name, "param": "tool_choice.function.name"},
                )

    @property
    def offered_tools(self) -> list[FunctionTool]:
        """Tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def input_messages(self) -> list[dict[str, Any]]:
        """Messages as traces have them."""
        return [traced_message(message.role, message.content) for message in self.messages]


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    operation: ClassVar[str] = "text_completion"

    prompt: Annotated[list[Prompt], PlainValidator(as_prompts, json_schema_input_type=PromptInput)]
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT64)
    logprobs: int | None = Field(None, ge=0, le=MAX_INT64)
    echo: bool = False
    """True if the text begins with the prompt."""
    best_of: int | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.n:
            raise PydanticCustomError(UNSUPPORTED, "is not supported, unless it equals `n`", {"param": "best_of"})
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError(
                CONFLICT, "is 0; it must be at least 1 unless `echo` is true", {"param": "max_tokens"}
            )
        return self

    @property
    def input_messages(self) -> list[dict[str, Any]]:
        """Prompts as traces have them."""
        return [traced_message("user", prompt) for prompt in self.prompt]


def traced_message(role: str, content: object) -> dict[str, Any]:
    """Return a message as traces have it."""
    return {"role": role, "parts": [{"type": "text", "content": content}]}


class TokenizeBody(Conversation):
    """Body of POST /tokenize, as in vLLM."""

    model: str | None = None
    prompt: str | None = None
    messages: MessageList | None = None
    add_special_tokens: bool | None = None
    """None: true for a prompt, false for messages, whose template writes the special tokens itself."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError(CONFLICT, "or `messages` must be given, and not both", {"param": "prompt"})
        return self


class DetokenizeBody(StrictBody):
    """Body of POST /detokenize, as in vLLM."""

    model: str | None = None
    tokens: TokenIds


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Prompt as token ids, with its text if known."""

    token_ids: tuple[int, ...]
    text: str | None
    """Text of the prompt: the client's, or that of the rendered messages; None if the client sent token ids."""
