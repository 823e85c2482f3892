"""Bounds that depend on configuration or on the model; each refusal names field, limit and value."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.errors import InvalidRequest, UnknownModel
from serve_app.errors import shortened
from serve_app.openai.chat import spaced
from serve_app.openai.schema import GenerationBody
from serve_app.openai.settings import RequestLimits


def check_model(model: str | None, served_model_name: str) -> None:
    """Refuse a model that is not served; None, where a body may leave it out, is the one that is.

    Raises:
        UnknownModel: it is another.
    """
    if model is not None and model != served_model_name:
        raise UnknownModel(f"model `{shortened(model)}` is not served here; `{served_model_name}` is")


def check_counts(body: GenerationBody, num_prompts: int, limits: RequestLimits) -> None:
    """Refuse more prompts or choices than a request may ask for.

    Raises:
        InvalidRequest: naming the field, the limit and the value.
    """
    check_at_most("n", body.n, limits.max_choices)
    if num_prompts > limits.max_prompts:
        message = f"`prompt` has {spaced(num_prompts)} prompts; at most {spaced(limits.max_prompts)} are accepted"
        raise InvalidRequest(message, "prompt")
    if num_prompts * body.n > limits.max_choices:
        raise InvalidRequest(
            f"{spaced(num_prompts)} prompts times `n` = {spaced(body.n)} are {spaced(num_prompts * body.n)} "
            f"choices; at most {spaced(limits.max_choices)} are accepted",
            "n",
        )


def check_at_most(name: str, value: int, limit: int) -> None:
    """Refuse a number above its bound.

    Raises:
        InvalidRequest: naming the field, the limit and the value.
    """
    if value > limit:
        raise InvalidRequest(f"`{name}` is {spaced(value)}; it must be at most {spaced(limit)}", name)


def check_num_tokens(name: str, token_ids: Sequence[int], max_model_len: int) -> None:
    """Refuse more ids than the model takes in one sequence.

    Raises:
        InvalidRequest: naming the field, the limit and the value.
    """
    if len(token_ids) > max_model_len:
        message = f"`{name}` has {spaced(len(token_ids))} tokens; at most {spaced(max_model_len)} are accepted"
        raise InvalidRequest(message, name, "context_length_exceeded")


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that are no tokens of the model.

    Raises:
        InvalidRequest: naming the field and the first such id.
    """
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return  # without a loop of ours, as this runs in the event loop and there may be millions
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            message = f"`{name}` has the token id {shortened(token_id)}; the model's are 0 to {vocab_size - 1}"
            raise InvalidRequest(message, name)
