"""Validation of a body and its encoded prompts into requests that are valid for the model.

The limits depend on the configuration or the model; each error names the field, the limit and the value.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from replicas.errors import InvalidRequest, UnknownModel
from replicas.protocol import GenerateRequest, LogitBias, ModelCard, SamplingParams
from replicas.settings import check_bounds, setting
from replicas.shared_rules.token_ids import PROMPT, UnknownToken, first_outside, unknown_token
from serve_app.errors import shortened
from serve_app.openai.request.caller import Caller
from serve_app.openai.request.pooled_schema import AnyBody, PooledBody
from serve_app.openai.request.schema import MIN_INT64, ChatBody, CompletionBody, EncodedPrompt, GenerationBody, Prompt

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for text completions."""

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_UNSTREAMED_INTERVAL_S = 0.5
"""Seconds between two deltas of a request that is not streamed. If its replica dies, the tokens since the last one are
generated again."""


class ContextExceeded(InvalidRequest):
    """Error of a request whose prompt, or prompt and output, exceed the model's context."""

    def __init__(self, message: str, param: str, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(message, param, "context_length_exceeded")
        self.args = (message, param, num_prompt_tokens, max_model_len)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits and defaults of one HTTP request."""

    max_prompts: int = setting(128, ge=1)
    """Most prompts in one completions request."""
    max_texts: int = setting(2048, ge=1)
    """Most texts in one request for embeddings or scores; a pair of texts counts once."""
    max_choices: int = 128
    """Most choices in one request: `n` times the number of prompts."""
    max_messages: int = 2048
    """Most messages of one conversation."""
    max_body_values: int = setting(131_072, ge=1)
    """Most values in a JSON body: items of lists, such as token ids, and fields of objects. At most a quarter as many
    objects, lists and names of fields: each takes longer to read than a number or a text."""
    max_echo_logprobs: int = 131_072
    """Most log probabilities of prompt tokens in one reply (`echo` with `logprobs`, `prompt_logprobs`): the tokens of
    all prompts, times `n`, times one more than the alternatives per position."""
    max_logprobs: int = setting(20, ge=0)
    """Most alternatives per position (`logprobs`, `top_logprobs`) that a request may ask for."""
    generation_config: str = setting("auto")
    """Source of temperature, top_p, top_k, min_p and repetition_penalty where a request does not give them. auto: the
    model's generation_config.json, and the API's defaults for what is missing there; vllm: the API's defaults; a
    folder: its generation_config.json in place of the model's."""

    unknown_fields: Literal["ignore", "refuse"] = setting("ignore")
    """Treatment of a body's fields that no API of this server has, such as `cache_control`. ignore: they change
    nothing, and the answer's header `x-headway-ignored` names them; refuse: the request gets 400."""
    prefix_cache_scope: Literal["tenant", "shared"] = setting("tenant")
    """Requests that share the prefix cache. tenant: those of one tenant, so that neither TTFT nor `cached_tokens`
    tells a tenant what another one asked; shared: all. A request's `cache_salt` divides them further."""

    def __post_init__(self) -> None:
        check_bounds(self)

    def cache_salt(self, tenant: str, own: str | None) -> str | None:
        """Return the salt of the prefix cache: the tenant, if caches are apart by tenant, and the client's own."""
        scope = tenant if self.prefix_cache_scope == "tenant" else None
        return None if scope is None and own is None else json.dumps([scope, own])

    @property
    def max_body_objects(self) -> int:
        """Most objects, lists and names of fields in a JSON body."""
        return self.max_body_values // 4


@dataclass(frozen=True, slots=True)
class BodyChecks:
    """Checks of a body that need neither rendering nor tokenizing."""

    names: tuple[str, ...]
    """Names of the served model."""
    limits: RequestLimits

    def check_chat(self, body: ChatBody) -> None:
        """Check a chat body.

        Raises:
            InvalidRequest, UnknownModel: the body cannot be served.
        """
        check_model(body.model, self.names)
        check_counts(body, 1, self.limits)
        check_at_most("top_logprobs", body.top_logprobs or 0, self.limits.max_logprobs)
        check_at_most("prompt_logprobs", body.prompt_logprobs or 0, self.limits.max_logprobs)

    def check_completion(self, body: CompletionBody) -> None:
        """Check the body of a text completion.

        Raises:
            InvalidRequest, UnknownModel: the body cannot be served.
        """
        check_model(body.model, self.names)
        check_counts(body, len(body.prompt), self.limits)
        check_at_most("logprobs", body.logprobs or 0, self.limits.max_logprobs)
        check_at_most("prompt_logprobs", body.prompt_logprobs or 0, self.limits.max_logprobs)

    def check_pooled(self, body: PooledBody) -> None:
        """Check a body whose outputs are pooled.

        Raises:
            InvalidRequest, UnknownModel: the body cannot be served.
        """
        check_model(body.model, self.names)
        if body.num_texts > self.limits.max_texts:
            field = body.texts_field
            message = f"`{field}` has {body.num_texts} texts; at most {self.limits.max_texts} are accepted"
            raise InvalidRequest(message, field)


def chat_requests(
    body: ChatBody, prompt: EncodedPrompt, caller: Caller, card: ModelCard, rng: random.Random, cache_salt: str | None
) -> tuple[GenerateRequest, ...]:
    """Return the sequences of a chat completion.

    Without `max_tokens` each may use the rest of the context, or what the API key's limit allows.
    """
    field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    given = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    _check_room("messages", prompt, field, given, card)
    num_free = card.max_model_len - len(prompt.token_ids)
    default = _default_max_tokens(num_free, field, given, caller)
    params = _sampling_params(
        body,
        card,
        max_tokens=default if given is None else given,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    return sequence_requests(body, [prompt], [params], caller, rng, cache_salt)


def with_lowered_max_tokens(body: ChatBody, prompt: EncodedPrompt, caller: Caller, card: ModelCard) -> ChatBody:
    """Return a chat whose `max_tokens` is at most the API key's limit; None where the context ends before it."""
    counts = (body.max_tokens, caller.principal.limits.max_tokens)
    max_tokens = min((count for count in counts if count is not None), default=card.max_model_len)
    is_whole = len(prompt.token_ids) + max_tokens <= card.max_model_len
    return body.model_copy(update={"max_tokens": max_tokens if is_whole else None})


def completion_requests(
    body: CompletionBody,
    prompts: Sequence[EncodedPrompt],
    caller: Caller,
    card: ModelCard,
    rng: random.Random,
    cache_salt: str | None,
) -> tuple[GenerateRequest, ...]:
    """Return the sequences of a text completion, in order of prompts.

    The default of `max_tokens` is lowered to the room that a prompt leaves and to the API key's limit; a given value
    must fit.
    """
    params = []
    default = _default_max_tokens(COMPLETION_MAX_TOKENS, "max_tokens", body.max_tokens, caller)
    for prompt in prompts:
        if not prompt.token_ids:
            raise InvalidRequest("`prompt` is empty; it must have at least one token", "prompt")
        _check_room("prompt", prompt, "max_tokens", body.max_tokens, card)
        num_free = card.max_model_len - len(prompt.token_ids)
        max_tokens = min(default, num_free) if body.max_tokens is None else body.max_tokens
        # With `max_tokens` 0 the engine only accepts a request that asks for the prompt's log probabilities.
        counts = [] if body.prompt_logprobs is None else [body.prompt_logprobs]
        if body.echo and (body.logprobs is not None or max_tokens == 0):
            counts.append(body.logprobs or 0)
        params.append(
            _sampling_params(body, card, max_tokens, logprobs=body.logprobs, prompt_logprobs=max(counts, default=None))
        )
    return sequence_requests(body, prompts, params, caller, rng, cache_salt)


def refuse_unusable_prompts(prompts: Sequence[Prompt], card: ModelCard, keeps_end: bool = False) -> None:
    """Refuse invalid prompts as far as this needs no tokenizer. With `keeps_end` a long prompt is truncated later.

    Raises:
        InvalidRequest: a prompt is empty, or its token ids are too many.
    """
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest("`prompt` is empty; it must have at least one token", "prompt")
        if not (isinstance(prompt, str) or keeps_end) and len(prompt) > card.max_model_len:
            raise prompt_too_long(len(prompt), card.max_model_len, "prompt")


@dataclass(frozen=True, slots=True)
class Truncation:
    """Tokens that are kept of a longer prompt."""

    num_tokens: int
    keeps_end: bool
    keeps_special: bool = False
    """True if the special tokens around a text count and stay."""

    def kept(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the token ids that are kept."""
        if len(token_ids) <= self.num_tokens:
            return token_ids
        return token_ids[-self.num_tokens :] if self.keeps_end else token_ids[: self.num_tokens]


def truncation_of(body: GenerationBody, max_tokens: int | None, card: ModelCard) -> Truncation | None:
    """Return the tokens that a body keeps of a longer prompt; None: such a prompt is refused.

    Raises:
        InvalidRequest: the body keeps more tokens than the context holds.
    """
    limit = body.truncate_prompt_tokens
    if limit is None:
        return None
    check_at_most("truncate_prompt_tokens", limit, card.max_model_len)
    num_tokens = max(1, card.max_model_len - (max_tokens or 1)) if limit == -1 else limit
    return Truncation(num_tokens, keeps_end=body.truncation_side != "right")


def check_model(model: str | None, names: Sequence[str]) -> None:
    """Refuse a model that is not served; None is the served model, for bodies that may leave the model out.

    Raises:
        UnknownModel: `model` is none of the served model's names.
    """
    if model is not None and model not in names:
        raise UnknownModel(f"model `{shortened(model)}` is not served here; `{names[0]}` is")


def check_counts(body: GenerationBody, num_prompts: int, limits: RequestLimits) -> None:
    """Refuse more prompts or choices than a request may ask for.

    Raises:
        InvalidRequest: naming the field, the limit and the value.
    """
    check_at_most("n", body.n, limits.max_choices)
    if num_prompts > limits.max_prompts:
        raise too_many_prompts(num_prompts, limits.max_prompts)
    if num_prompts * body.n > limits.max_choices:
        raise InvalidRequest(
            f"{num_prompts} prompts times `n` = {body.n} are {num_prompts * body.n} "
            f"choices; at most {limits.max_choices} are accepted",
            "n",
        )


def too_many_prompts(num_prompts: int, max_prompts: int) -> InvalidRequest:
    """Return the error for a request with too many prompts."""
    return InvalidRequest(f"`prompt` has {num_prompts} prompts; at most {max_prompts} are accepted", "prompt")


def check_echo(body: GenerationBody, num_tokens: int, limits: RequestLimits) -> None:
    """Refuse more log probabilities of prompt tokens than one reply may have; the prompts have `num_tokens` at least.

    Raises:
        InvalidRequest: naming the field, the limit and the value.
    """
    name, counts = "prompt_logprobs", [] if body.prompt_logprobs is None else [body.prompt_logprobs]
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        name, counts = "logprobs", [*counts, body.logprobs]
    num_logprobs = num_tokens * body.n * (max(counts) + 1) if counts else 0
    if num_logprobs > limits.max_echo_logprobs:
        message = f"{num_tokens} prompt tokens, times `n` = {body.n}, times `{name}` + 1 = {max(counts) + 1}"
        raise InvalidRequest(
            f"{message}, are {num_logprobs} log probabilities; at most {limits.max_echo_logprobs} are accepted", name
        )


def check_at_most(name: str, value: int, limit: int) -> None:
    """Refuse a number above its bound.

    Raises:
        InvalidRequest: naming the field, the limit and the value.
    """
    if value > limit:
        raise InvalidRequest(f"`{name}` is {value}; it must be at most {limit}", name)


def check_num_tokens(name: str, token_ids: Sequence[int], max_model_len: int) -> None:
    """Refuse more token ids than the model's context holds.

    Raises:
        InvalidRequest: naming the field, the limit and the value.
    """
    if len(token_ids) > max_model_len:
        message = f"`{name}` has {len(token_ids)} tokens; at most {max_model_len} are accepted"
        raise InvalidRequest(message, name, "context_length_exceeded")


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that are not in the model's vocabulary.

    Raises:
        InvalidRequest: naming the field and the first such id.
    """
    token_id = first_outside(token_ids, vocab_size)
    if token_id is not None:
        raise UnknownToken(name, token_id).error(vocab_size)


def check_tokens(
    requests: Sequence[GenerateRequest], card: ModelCard, prompt_field: str, text_of: Callable[[int], str | None]
) -> None:
    """Refuse requests with a token id that the model has no row for, whether the client or the tokenizer chose it.

    `prompt_field` is the client's name of the prompt, `text_of` gives a token's text.

    Raises:
        InvalidRequest: naming the field, the token and the limit.
    """
    for request in requests:
        unknown = unknown_token(request, card.vocab_size)
        if unknown is not None:
            field = prompt_field if unknown.field == PROMPT else unknown.field
            text = text_of(unknown.token_id) if unknown.token_id >= card.vocab_size else None
            raise unknown.error(card.vocab_size, field, text and shortened(text))


def prompt_too_long(num_tokens: int, max_model_len: int, param: str, at_least: bool = False) -> InvalidRequest:
    """Return the error for a prompt that alone exceeds the model's context, in OpenAI's words."""
    count = f"{'at least ' if at_least else ''}{num_tokens}"
    message = f"your {param} resulted in {count} tokens. Please reduce the length of the {param}."
    return ContextExceeded(_of_context(max_model_len, message), param, num_tokens, max_model_len)


def _sampling_params(
    body: GenerationBody, card: ModelCard, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters of a body."""
    if body.min_tokens > max_tokens:
        message = f"`min_tokens` is {body.min_tokens}; at most {max_tokens} tokens can be generated"
        raise InvalidRequest(message, "min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k if body.top_k > 0 else None,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        min_tokens=body.min_tokens,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logit_bias=_logit_bias(body),
        allowed_token_ids=tuple(body.allowed_token_ids),
        skip_special_tokens=body.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _logit_bias(body: GenerationBody) -> tuple[LogitBias, ...]:
    biases = []
    for key, bias in body.logit_bias.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(f"`logit_bias` has the key `{shortened(key)}`; keys are token ids", "logit_bias")
        biases.append(LogitBias(int(key), bias))
    return tuple(biases)


def sequence_requests(
    body: AnyBody,
    prompts: Sequence[EncodedPrompt],
    params: Sequence[SamplingParams],
    caller: Caller,
    rng: random.Random,
    cache_salt: str | None,
) -> tuple[GenerateRequest, ...]:
    """Return `n` sequences of each prompt; sample i has the seed `seed` + i, or a random one if no seed is given."""
    band, deadline_unix_s, tenant = caller.band_of(body), caller.deadline_of(body), caller.tenant_of(body)
    requests: list[GenerateRequest] = []
    for prompt, prompt_params in zip(prompts, params, strict=True):
        for sample in range(body.n):
            seed = rng.getrandbits(63) if body.seed is None else _int64(body.seed + sample)
            requests.append(
                GenerateRequest(
                    request_id=f"{caller.request_id}-{len(requests)}",
                    prompt_token_ids=prompt.token_ids,
                    params=replace(prompt_params, seed=seed),
                    band=band,
                    tenant=tenant,
                    arrival_unix_s=caller.arrival_unix_s,
                    deadline_unix_s=deadline_unix_s,
                    affinity_key=body.prompt_cache_key,
                    cache_salt=cache_salt,
                    delta_interval_s=None if body.stream else _UNSTREAMED_INTERVAL_S,
                )
            )
    return tuple(requests)


def _check_room(part: str, prompt: EncodedPrompt, field: str, max_tokens: int | None, card: ModelCard) -> None:
    """Refuse a prompt and an output, at least one token if `max_tokens` is not given, that exceed the context.

    `part` is the field with the prompt, `field` the one with `max_tokens`. The error names `field` if a lower value
    would help.
    """
    num_prompt, num_output = len(prompt.token_ids), 1 if max_tokens is None else max_tokens
    num_tokens = num_prompt + num_output
    if num_tokens <= card.max_model_len:
        return
    could_fit = num_prompt + min(1, num_output) <= card.max_model_len
    message = (
        f"you requested {num_tokens} tokens ({num_prompt} in the {part}, {num_output} in the completion). "
        f"Please reduce the length of the {part} or completion."
    )
    message = _of_context(card.max_model_len, message)
    raise ContextExceeded(message, field if could_fit else part, num_prompt, card.max_model_len)


def _of_context(max_model_len: int, message: str) -> str:
    """Return the message for a request above the context, in OpenAI's words, which agents and proxies recognise."""
    return f"This model's maximum context length is {max_model_len} tokens. However, {message}"


def _default_max_tokens(default: int, field: str, given: int | None, caller: Caller) -> int:
    """Return the default of `max_tokens`, lowered to the API key's limit; `given` is the value that the request names.

    Raises:
        InvalidRequest: the value exceeds the limit.
    """
    limit = caller.principal.limits.max_tokens
    if limit is None:
        return default
    if given is not None and given > limit:
        message = f"`{field}` is {given}; the max_tokens of this API key is {limit}"
        raise InvalidRequest(message, field)
    return min(default, limit)


def _int64(value: int) -> int:
    """Return `value` wrapped around to the range of a seed, a signed 64-bit integer."""
    return (value - MIN_INT64) % 2**64 + MIN_INT64
