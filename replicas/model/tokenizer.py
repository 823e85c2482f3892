"""From output tokens to text, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence as Items

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from replicas.engine.interfaces import IncrementalDecoder

# A character is at most four bytes, so valid text waits for three more tokens; only a run of tokens that each also
# begin the next character, or invalid bytes, wait longer.
_MAX_PENDING_TOKENS = 16
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class SilentDecoder:
    """The decoder of a model without a tokenizer: no text."""

    def push(self, token_id: int) -> str:
        """Always empty."""
        return ""


class StreamDecoder:
    """Text of a growing sequence; never half a character.

    A few tokens are decoded at a time: those whose text was given last, as context, since it may depend on them
    whether a token begins with a space, and those still pending. The texts put together are the decoded whole.
    Invalid UTF-8 is given as U+FFFD once `_MAX_PENDING_TOKENS` wait: `DecodeStream` of tokenizers would hold it,
    and all that follows, for ever.
    """

    def __init__(self, tokenizer: Tokenizer, special_token_ids: frozenset[int], prompt: Items[int]) -> None:
        self._tokenizer = tokenizer
        self._special_token_ids = special_token_ids
        self._context = self._end_of_text(prompt)
        self._shown = self._decode(self._context).rstrip(_INCOMPLETE)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete, or for a special token."""
        if not self._has_text(token_id):
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)[len(self._shown) :]
        is_complete = text != "" and not text.endswith(_INCOMPLETE)
        if not is_complete and len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        # Invalid bytes are no context: what follows them could seem to continue them.
        self._context = self._pending if is_complete else []
        self._shown = self._decode(self._context)
        self._pending = []
        return text

    def _end_of_text(self, token_ids: Items[int]) -> list[int]:
        """The last tokens that show text, beginning with a whole character; none where there is no text nearby.

        What follows may complete a character that they end in the middle of.
        """
        end: list[int] = []
        for token_id in reversed(token_ids[-_MAX_PENDING_TOKENS:]):
            if self._has_text(token_id):
                end.insert(0, token_id)
                text = self._decode(end).rstrip(_INCOMPLETE)
                if text and _INCOMPLETE not in text:
                    return end
        # A whole prompt without text may be the space that a first word does not show: the next one does.
        is_whole = len(token_ids) <= _MAX_PENDING_TOKENS
        return end if is_whole and self._decode(end) == "" else []

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._special_token_ids and self._tokenizer.id_to_token(token_id) is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def make_decoder(tokenizer: PreTrainedTokenizerFast | None, prompt_token_ids: Items[int] = ()) -> IncrementalDecoder:
    """A decoder for the output that follows `prompt_token_ids`; silent where there is no tokenizer."""
    if tokenizer is None:
        return SilentDecoder()
    return StreamDecoder(
        tokenizer.backend_tokenizer,
        frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if token.special),
        prompt_token_ids,
    )
