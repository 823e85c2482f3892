"""Incremental decoders: text of output tokens, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from replicas.engine.batch import IncrementalDecoder
from replicas.protocol import SamplingParams

# A character has at most four bytes, so valid text waits for at most three more tokens. Invalid bytes, and runs of
# tokens that each also begin the next character, wait longer.
_MAX_PENDING_TOKENS = 16
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class SilentDecoder:
    """Decoder for a model without a tokenizer. It gives no text."""

    def push(self, token_id: int) -> str:
        """Return the empty string."""
        return ""

    def finish(self) -> str:
        """Return the empty string."""
        return ""


class TokenTexts(dict[int, str | None]):
    """Texts of the tokens of one tokenizer, decoded when they are asked for first; at most one for each token.

    With a byte-level decoder, the bytes of tokens are concatenated before they become text. So a token of whole
    characters has the same text behind any whole character. All other tokens have None.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._has_bytes = isinstance(tokenizer.decoder, ByteLevel)

    def __missing__(self, token_id: int) -> str | None:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False) if self._has_bytes else ""
        self[token_id] = text if text and _INCOMPLETE not in text else None
        return self[token_id]


class StreamDecoder:
    """Incremental decoder of one sequence, which never gives part of a character.

    Each push decodes two groups of tokens: the context, whose text was given last, and the pending ones. The context
    is needed because the token before may decide whether a token begins with a space. The concatenated texts equal
    the text of the whole output.

    Behind a whole character, the text of a token is that of `TokenTexts` if it is known there.

    Once `_MAX_PENDING_TOKENS` tokens are pending, their text is given with U+FFFD for invalid bytes. Only a U+FFFD at
    its end is held back, since it may be an incomplete character. `DecodeStream` of the tokenizers package would hold
    back invalid bytes and all later text for ever.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_token_ids: frozenset[int],
        prompt: Items[int],
        texts: TokenTexts | None = None,
    ) -> None:
        """Make a decoder for the output behind `prompt`; `special_token_ids` are the tokens without text.

        `texts` are those of the tokenizer; None: new ones.
        """
        self._tokenizer = tokenizer
        self._special_token_ids = special_token_ids
        self._texts = TokenTexts(tokenizer) if texts is None else texts
        self._context = self._end_of_text(prompt)
        text = self._decode(self._context)
        self._shown = text.rstrip(_INCOMPLETE)
        self._is_whole = text == self._shown
        """True if the context ends with a whole character, and no token is pending."""
        self._pending: list[int] = []
        self._held = ""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty for a special token or an incomplete character."""
        if self._is_whole and token_id not in self._special_token_ids:
            whole_text = self._texts[token_id]
            if whole_text is not None:
                self._context, self._shown = [token_id], whole_text
                return whole_text
        if not self._has_text(token_id):
            return ""
        self._pending.append(token_id)
        self._is_whole = False
        text = self._decode(self._context + self._pending)[len(self._shown) :]
        is_complete = text != "" and not text.endswith(_INCOMPLETE)
        if not is_complete and len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        # A character that is incomplete has at most three bytes, so at most three tokens.
        self._context = self._pending if is_complete else self._pending[-3:]
        self._shown = self._decode(self._context)
        self._held, self._pending, self._is_whole = "", [], is_complete
        if text.endswith(_INCOMPLETE):
            text, self._held = text[:-1], _INCOMPLETE
            self._shown = self._shown.removesuffix(_INCOMPLETE)
        return text

    def finish(self) -> str:
        """Return the text of an incomplete character at the end."""
        return self._decode(self._context + self._pending)[len(self._shown) :] if self._pending else self._held

    def _end_of_text(self, token_ids: Items[int]) -> list[int]:
        """Return the fewest last tokens with text that begin with a whole character; empty if no text is near the end.

        They may end in the middle of a character, which the output then completes.
        """
        end: list[int] = []
        for token_id in reversed(token_ids[-_MAX_PENDING_TOKENS:]):
            if self._has_text(token_id):
                end.insert(0, token_id)
                text = self._decode(end).rstrip(_INCOMPLETE)
                if text and _INCOMPLETE not in text:
                    return end
        # Keep a whole prompt without text: it may be a leading space, which the decoder drops from a text's first word.
        is_whole = len(token_ids) <= _MAX_PENDING_TOKENS
        return end if is_whole and self._decode(end) == "" else []

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._special_token_ids and self._tokenizer.id_to_token(token_id) is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def make_decoder(
    tokenizer: PreTrainedTokenizerFast | None, prompt_token_ids: Items[int] = (), params: SamplingParams | None = None
) -> IncrementalDecoder:
    """Return a decoder for the output after `prompt_token_ids`; without a tokenizer, one that gives no text.

    `params` say which special tokens have text; None: none has.
    """
    if tokenizer is None:
        return SilentDecoder()
    without_text = _special_token_ids(tokenizer)
    if params is not None:
        without_text = without_text.difference(params.visible_special_token_ids)
        without_text = without_text if params.skip_special_tokens else frozenset()
    return StreamDecoder(tokenizer.backend_tokenizer, without_text, prompt_token_ids, _token_texts(tokenizer))


@lru_cache(maxsize=8)
def _token_texts(tokenizer: PreTrainedTokenizerFast) -> TokenTexts:
    return TokenTexts(tokenizer.backend_tokenizer)


@lru_cache(maxsize=8)
def _special_token_ids(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Return the ids of special tokens. Asking the tokenizer takes milliseconds where it has thousands."""
    return frozenset(token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
