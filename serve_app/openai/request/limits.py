"""Checks of the limits that depend on the configuration or the model; each error names field, limit and value."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.errors import InvalidRequest, UnknownModel
from serve_app.errors import shortened
from serve_app.openai.request.schema import GenerationBody
from serve_app.openai.request.settings import RequestLimits


def check_model(model: str | None, served_model_name: str) -> None:
    """Refuse a model that is not served; None is the served model, for bodies that may leave the model out.

    Raises:
        UnknownModel: `model` is not the served model.
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
        message = f"`prompt` has {grouped(num_prompts)} prompts; at most {grouped(limits.max_prompts)} are accepted"
        raise InvalidRequest(message, "prompt")
    if num_prompts * body.n > limits.max_choices:
        raise InvalidRequest(
            f"{grouped(num_prompts)} prompts times `n` = {grouped(body.n)} are {grouped(num_prompts * body.n)} "
            f"choices; at most {grouped(limits.max_choices)} are accepted",
            "n",
        )


def check_at_most(name: str, value: int, limit: int) -> None:
    """Refuse a number above its bound.

    Raises:
        InvalidRequest: naming the field, the limit and the value.
    """
    if value > limit:
        raise InvalidRequest(f"`{name}` is {grouped(value)}; it must be at most {grouped(limit)}", name)


def check_num_tokens(name: str, token_ids: Sequence[int], max_model_len: int) -> None:
    """Refuse more token ids than the model's context holds.

    Raises:
        InvalidRequest: naming the field, the limit and the value.
    """
    if len(token_ids) > max_model_len:
        message = f"`{name}` has {grouped(len(token_ids))} tokens; at most {grouped(max_model_len)} are accepted"
        raise InvalidRequest(message, name, "context_length_exceeded")


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that are not in the model's vocabulary.

    Raises:
        InvalidRequest: naming the field and the first such id.
    """
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return  # min and max loop in C: the check runs in the event loop and there may be millions of ids
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            message = f"`{name}` has the token id {shortened(token_id)}; the model's are 0 to {vocab_size - 1}"
            raise InvalidRequest(message, name)


def prompt_too_long(num_tokens: int, max_model_len: int, param: str, at_least: bool = False) -> InvalidRequest:
    """Return the error for a prompt that leaves no room for an output token."""
    count = f"{'at least ' if at_least else ''}{grouped(num_tokens)}"
    message = f"prompt has {count} tokens; the model accepts {grouped(max_model_len)}, output included"
    return InvalidRequest(message, param, "context_length_exceeded")


def grouped(number: int) -> str:
    """Return a number with spaces between the thousands, such as `9 000`."""
    return f"{number:,}".replace(",", " ")
