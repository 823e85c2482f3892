"""Validation of a body and its encoded prompts into requests that are valid for the model."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from replicas.errors import InvalidRequest
from replicas.protocol import GenerateRequest, LogitBias, ModelCard, SamplingParams
from serve_app.auth import ANONYMOUS, Principal
from serve_app.errors import shortened
from serve_app.openai.request.limits import check_token_ids, grouped, prompt_too_long
from serve_app.openai.request.priority import ClientHints, band_of, deadline_of
from serve_app.openai.request.schema import MIN_INT64, ChatBody, CompletionBody, EncodedPrompt, GenerationBody, Prompt

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for text completions."""

_TOKEN_ID = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of a request, with the arrival time and the hints in the headers."""

    request_id: str
    """Id that no other running request has; the ids of the sequences start with it."""
    arrival_unix_s: float
    principal: Principal
    hints: ClientHints


def chat_requests(
    body: ChatBody, prompt: EncodedPrompt, caller: Caller, card: ModelCard, rng: random.Random
) -> tuple[GenerateRequest, ...]:
    """Return the sequences of a chat completion; without `max_tokens` each may use the rest of the context."""
    field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    given = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    num_free = card.max_model_len - len(prompt.token_ids)
    if num_free < 1:
        raise prompt_too_long(len(prompt.token_ids), card.max_model_len, "messages")
    _check_room(field, given, prompt, card)
    params = replace(
        _sampling_params(body, card, max_tokens=num_free if given is None else given),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return _requests(body, [prompt], [params], caller, rng)


def completion_requests(
    body: CompletionBody, prompts: Sequence[EncodedPrompt], caller: Caller, card: ModelCard, rng: random.Random
) -> tuple[GenerateRequest, ...]:
    """Return the sequences of a text completion, in order of prompts.

    The default of `max_tokens` is lowered to the room that a prompt leaves; a given value must fit.
    """
    params = []
    for prompt in prompts:
        if not prompt.token_ids:
            raise InvalidRequest("`prompt` is empty; it must have at least one token", "prompt")
        num_free = card.max_model_len - len(prompt.token_ids)
        if num_free < (0 if body.max_tokens == 0 else 1):
            raise prompt_too_long(len(prompt.token_ids), card.max_model_len, "prompt")
        _check_room("max_tokens", body.max_tokens, prompt, card)
        max_tokens = min(COMPLETION_MAX_TOKENS, num_free) if body.max_tokens is None else body.max_tokens
        # With `max_tokens` 0 the engine only accepts a request that asks for the prompt's log probabilities.
        prompt_logprobs = (body.logprobs or 0) if body.echo and (body.logprobs is not None or not max_tokens) else None
        params.append(
            replace(
                _sampling_params(body, card, max_tokens=max_tokens),
                logprobs=body.logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        )
    return _requests(body, prompts, params, caller, rng)


def refuse_unusable_prompts(prompts: Sequence[Prompt], card: ModelCard) -> None:
    """Refuse invalid prompts as far as this needs no tokenizer.

    Raises:
        InvalidRequest: a prompt is empty, or its token ids are too many or not in the vocabulary.
    """
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest("`prompt` is empty; it must have at least one token", "prompt")
        if not isinstance(prompt, str) and len(prompt) > card.max_model_len:
            raise prompt_too_long(len(prompt), card.max_model_len, "prompt")
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_token_ids("prompt", prompt, card.vocab_size)


def _sampling_params(body: GenerationBody, card: ModelCard, max_tokens: int) -> SamplingParams:
    """Return the sampling parameters of a body; the model's generation_config has no influence on them."""
    if body.min_tokens > max_tokens:
        message = f"`min_tokens` is {grouped(body.min_tokens)}; at most {grouped(max_tokens)} tokens can be generated"
        raise InvalidRequest(message, "min_tokens")
    check_token_ids("stop_token_ids", body.stop_token_ids, card.vocab_size)
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
        logit_bias=_logit_bias(body, card),
    )


def _logit_bias(body: GenerationBody, card: ModelCard) -> tuple[LogitBias, ...]:
    biases = []
    for key, bias in body.logit_bias.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(f"`logit_bias` has the key `{shortened(key)}`; keys are token ids", "logit_bias")
        check_token_ids("logit_bias", [int(key)], card.vocab_size)
        biases.append(LogitBias(int(key), bias))
    return tuple(biases)


def _requests(
    body: GenerationBody,
    prompts: Sequence[EncodedPrompt],
    params: Sequence[SamplingParams],
    caller: Caller,
    rng: random.Random,
) -> tuple[GenerateRequest, ...]:
    """Return `n` sequences of each prompt; sample i has the seed `seed` + i, or a random one if no seed is given."""
    band = band_of(body, caller.hints, caller.principal)
    deadline_unix_s = deadline_of(body, caller.hints, caller.arrival_unix_s)
    tenant = _tenant(body, caller.principal)
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
                )
            )
    return tuple(requests)


def _tenant(body: GenerationBody, principal: Principal) -> str:
    """Return the tenant for fair scheduling: the key's owner, or the user that an anonymous client names.

    A key's owner cannot enlarge its share by naming users.
    """
    if principal is not ANONYMOUS:  # identity, not equality: a key's tenant may be called "anonymous" too
        return principal.tenant
    return body.user or body.safety_identifier or principal.tenant


def _check_room(field: str, max_tokens: int | None, prompt: EncodedPrompt, card: ModelCard) -> None:
    num_tokens = len(prompt.token_ids)
    if max_tokens is not None and num_tokens + max_tokens > card.max_model_len:
        raise InvalidRequest(
            f"prompt has {grouped(num_tokens)} tokens and `{field}` is {grouped(max_tokens)}; "
            f"the model accepts {grouped(card.max_model_len)} in all",
            field,
            "context_length_exceeded",
        )


def _int64(value: int) -> int:
    """Return `value` wrapped around to the range of a seed, a signed 64-bit integer."""
    return (value - MIN_INT64) % 2**64 + MIN_INT64
