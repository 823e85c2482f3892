"""Schemas of the replies to chat and text completions, as OpenAI and vLLM define them.

`NotRequired` marks fields that only some replies have. All other fields are always there, some of them null.
"""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

described = with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))
"""Decorator of a described object: it has no other fields, and its docstrings are its description."""

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
ReplyTier = Literal["priority", "default", "flex"]

_TIER = "Band in which the request ran: `priority` is interactive, `default` standard, `flex` batch."
_FINGERPRINT = "Name of the configuration on which the output of a seed depends."


@described
class ErrorDetails(TypedDict):
    """Reason of a failure."""

    message: str | None
    type: str
    param: str | None
    """Field or header of the request that caused the error."""
    code: str | None


@described
class ErrorObject(TypedDict):
    """OpenAI's error object, the body of every failed request."""

    error: ErrorDetails


@described
class CachedTokens(TypedDict):
    """Details about prompt tokens."""

    cached_tokens: int
    """Prompt tokens that were found in a KV cache."""


@described
class ReasoningTokens(TypedDict):
    """Details about output tokens."""

    reasoning_tokens: int


@described
class UsageObject(TypedDict):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[ReasoningTokens]
    """Details for chats of models that reason."""


@described
class RequestParts(TypedDict):
    """Parts of a request's time, milliseconds; they add up to `total_ms`."""

    received: float
    """Arrival and parsing of the body."""
    tokenizing: float
    """Chat template, tokenizer and grammar, with the wait for their threads."""
    queued_cold_start: float
    """In the queue while no replica took requests."""
    queued_higher_band: float
    """In the queue while requests of more urgent bands waited."""
    queued_fairness: float
    """In the queue while a request of another tenant of the band was next."""
    queued_capacity: float
    """In the queue while it was the tenant's turn and no replica had room."""
    queued_replica: float
    """In the replica's queue, before the first step that computed the request."""
    prefill: float
    """From that step to the first token."""
    decode: float
    """From the first token to the last one."""
    preempted: float
    """Without a slot after a preemption."""
    migrated: float
    """After the last token of a replica that was lost, and the same tokens again on the next one."""
    delivered: float
    """Way of the first and the last token to the client."""


@described
class PlacementObject(TypedDict):
    """Dispatch to a replica."""

    replica_id: str
    reason: str
    """Reason for the choice, such as `prefix_hit` or `least_loaded`."""
    after_ms: float
    """Time since the request's arrival, milliseconds."""


@described
class RequestMetrics(TypedDict):
    """Parts of a request's time; of several sequences those of the one that ended last."""

    time_to_first_token_ms: float | None
    """From the first step that computed the request to the first token, as in vLLM; null without output."""
    generation_time_ms: float | None
    """From the first token to the last one; null without output."""
    queue_time_ms: float
    """Wait before the first step, all `queued_` parts together."""
    mean_itl_ms: float | None
    """Mean time between two output tokens; null with fewer than two."""
    tokens_per_second: float | None
    """Output tokens per second from the first step to the last token; null without output."""
    total_ms: float
    """From the arrival to the end, or to now."""
    parts_ms: RequestParts
    placements: list[PlacementObject]
    cached_tokens: int
    num_preemptions: int
    num_migrations: int


@described
class TokenObject(TypedDict):
    """Token with its log probability."""

    token: str
    """Text of the token; for a part of a character its bytes, such as `bytes:\\xe2\\x80`."""
    bytes: list[int]
    logprob: float


@described
class PositionObject(TokenObject):
    """Token of the output, and the most probable tokens at its position."""

    top_logprobs: list[TokenObject]


@described
class ChatLogprobs(TypedDict):
    """Log probabilities of a chat choice."""

    content: list[PositionObject]
    refusal: None


@described
class CalledFunctionObject(TypedDict):
    """Function that the model calls."""

    name: str
    arguments: str
    """Text of a JSON object."""


@described
class ToolCallObject(TypedDict):
    """Call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunctionObject


@described
class FunctionDelta(TypedDict):
    """Part of a called function: its name, then pieces of its arguments."""

    name: NotRequired[str]
    arguments: str


@described
class ToolCallDelta(TypedDict):
    """Part of a call: id, type and name come first."""

    index: int
    """Place among the choice's calls."""
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


@described
class AssistantMessage(TypedDict):
    """Turn of the model."""

    role: Literal["assistant"]
    content: str | None
    """Text of the answer; null beside calls without text."""
    refusal: None
    reasoning_content: NotRequired[str]
    """Text that the model thought before its answer."""
    reasoning: NotRequired[str]
    """The same under vLLM's newer name."""
    tool_calls: NotRequired[list[ToolCallObject]]


@described
class ChatChoice(TypedDict):
    """Choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    """Stop string or token id that ended the choice; null: another reason did."""
    token_ids: list[int] | None
    """Output token ids, with `return_token_ids`; null without it."""


@described
class ReplyHeadFields(TypedDict):
    """Fields of every reply and chunk; they are described without docstrings, which subclasses do not inherit."""

    id: str
    created: Annotated[int, Field(description="Arrival of the request, unix seconds.")]
    model: str
    service_tier: Annotated[ReplyTier, Field(description=_TIER)]
    system_fingerprint: Annotated[str, Field(description=_FINGERPRINT)]


@described
class ChatCompletion(ReplyHeadFields):
    """Reply to a chat completion that is not streamed."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_token_ids: list[int] | None
    """Token ids of the prompt, with `return_token_ids`; null without it."""
    warnings: NotRequired[list[str]]
    """Keywords of the request's JSON Schemas that are not enforced."""
    metrics: NotRequired[RequestMetrics]
    """Parts of the request's time, with `include_metrics`."""
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | None
    """Log probabilities of the prompt's tokens, with `prompt_logprobs`: by token id, null for the first token. Null
    without `prompt_logprobs`."""


@described
class ChatDelta(TypedDict):
    """Part of a message; empty in the chunk with the finish reason."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


@described
class ChatChunkChoice(TypedDict):
    """Part of a choice of a chat completion."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


@described
class ChatCompletionChunk(ReplyHeadFields):
    """Event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    """Choices with news; none in the chunk with the usage and the metrics of the whole request."""
    usage: NotRequired[UsageObject | None]
    metrics: NotRequired[RequestMetrics]
    prompt_token_ids: NotRequired[list[int]]


@described
class TextLogprobs(TypedDict):
    """Log probabilities of a text choice; the lists have an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@described
class RankedLogprob(TypedDict):
    """Log probability of a token of the prompt."""

    logprob: float
    rank: int | None
    """Rank among all tokens at the position, from 1; null: it is below those that were asked for."""
    decoded_token: str


@described
class TextChoice(TypedDict):
    """Choice of a text completion; in a stream a part of it."""

    index: int
    """Number of the choice: `n` choices of the first prompt, then those of the next."""
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    """Reason of the end; null in the parts of a stream before the last."""
    stop_reason: NotRequired[int | str | None]
    """Stop string or token id that ended the choice; given with the finish reason."""
    prompt_token_ids: NotRequired[list[int] | None]
    token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[list[dict[str, RankedLogprob] | None] | None]


@described
class TextCompletion(ReplyHeadFields):
    """Reply to a text completion that is not streamed."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: UsageObject
    warnings: NotRequired[list[str]]
    metrics: NotRequired[RequestMetrics]


@described
class TextCompletionChunk(ReplyHeadFields):
    """Event of a streamed text completion."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[UsageObject | None]
    metrics: NotRequired[RequestMetrics]
