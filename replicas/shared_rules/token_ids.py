"""Token ids of requests: the one check of them all against the model's vocabulary.

Ids enter an engine from many places: clients send them, the ingress makes them with a tokenizer (prompts, chat
templates, bad words, markers of tool calls), another replica has sampled them before a request is resumed. A tokenizer
may know tokens for which the model has no row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from replicas.errors import InvalidRequest
from replicas.protocol import GenerateRequest

PROMPT = "prompt"
_MAX_DIGITS = 20


@dataclass(frozen=True, slots=True)
class UnknownToken:
    """Token id of a request that is not in the vocabulary, and the field of the request that has it."""

    field: str
    token_id: int

    def error(self, vocab_size: int, field: str | None = None, text: str | None = None) -> InvalidRequest:
        """Return the error of the request; `field` is the client's name of the field, `text` is the token's text."""
        name = self.field if field is None else field
        shown = str(self.token_id)
        shown = shown if len(shown) <= _MAX_DIGITS else f"{shown[:_MAX_DIGITS]}..."
        token = f"the token id {shown}" if text is None else f"the token `{text}` (id {shown})"
        return InvalidRequest(
            f"`{name}` has {token}, which is out of vocabulary: the model has {vocab_size} tokens, from 0", name
        )


def first_outside(token_ids: Iterable[int], vocab_size: int) -> int | None:
    """Return the first id that is not in [0, vocab_size); None: there is none."""
    known = tuple(token_ids)
    if not known or 0 <= min(known) <= max(known) < vocab_size:
        return None  # min and max loop in C: there may be a million ids.
    return next(token_id for token_id in known if not 0 <= token_id < vocab_size)


def unknown_token(request: GenerateRequest, vocab_size: int) -> UnknownToken | None:
    """Return the first token of a request that is not in the vocabulary; None: all are."""
    for field, token_ids in _fields(request):
        outside = first_outside(token_ids, vocab_size)
        if outside is not None:
            return UnknownToken(field, outside)
    return None


def _fields(request: GenerateRequest) -> Iterator[tuple[str, Iterable[int]]]:
    """Yield all token ids that a request has, by field."""
    params = request.params
    yield PROMPT, request.prompt_token_ids
    yield "output_token_ids", request.output_token_ids
    yield "stop_token_ids", params.stop_token_ids
    yield "allowed_token_ids", params.allowed_token_ids
    yield "logit_bias", [bias.token_id for bias in params.logit_bias]
    yield "bad_words", chain.from_iterable(params.bad_words)
    yield "visible_special_token_ids", params.visible_special_token_ids
