"""Tokenization of rendered conversations by segments, whose token ids are cached.

Between two turns of an agent's conversation only its end changes. A segment begins with the special token that begins
the template's turns. Tokenizers split a text at such tokens before anything else, so that the segments' token ids, one
after another, are those of the whole text.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

from tokenizers import AddedToken, Tokenizer

from serve_app.openai.tokenize.bounded_cache import BoundedCache

_MAX_BYTES = 2**25
"""Most bytes of the cached segments, their texts included, in one process."""
_ENTRY_BYTES = 256
"""Bytes of an entry in addition to its text and its token ids."""
_MIN_CHARS = 1024
"""Characters of the shortest segment that is cached: shorter ones are encoded in tens of microseconds."""


def turn_marker(text: str, added: Mapping[int, AddedToken]) -> str | None:
    """Return the special token that begins most segments of a rendered conversation; None: there is none.

    A token that takes in what is around it, or that another token may overlap from the left, is none.
    """
    contents = [token.content for token in added.values()]
    plain = (token for token in added.values() if token.special and not _is_open(token))
    markers = [token.content for token in plain if not any(_overlaps(other, token.content) for other in contents)]
    found = [marker for marker in markers if marker in text]
    return max(found, key=lambda marker: (text.count(marker), marker), default=None)


def _is_open(token: AddedToken) -> bool:
    return token.lstrip or token.rstrip or token.single_word or token.normalized


def _overlaps(other: str, marker: str) -> bool:
    """Return True if a text may have a token in which, but not at whose beginning, the marker begins."""
    ends = (other[place:] for place in range(1, len(other)))
    return any(marker.startswith(end) or end.startswith(marker) for end in ends)


class SegmentEncoder:
    """Encoder of texts by segments, with a cache of each tenant's long ones."""

    def __init__(
        self, tokenizer: Tokenizer, marker: str, max_bytes: int = _MAX_BYTES, min_chars: int = _MIN_CHARS
    ) -> None:
        """Create the encoder; `marker` begins the segments, of which those of `min_chars` or more are cached."""
        self._tokenizer = tokenizer
        self._marker = marker
        self._min_chars = min_chars
        self.cache: BoundedCache[tuple[str, str], array[int]] = BoundedCache(max_bytes)

    def encode(self, text: str, tenant: str) -> Sequence[int]:
        """Return the token ids of a text, without special tokens around it."""
        token_ids: array[int] = array("I")
        between: list[str] = []
        for segment in self._segments(text):
            if len(segment) < self._min_chars:
                between.append(segment)
                continue
            token_ids += self._encode("".join(between))
            between.clear()
            token_ids += self._cached(segment, tenant)
        return token_ids + self._encode("".join(between))

    def _cached(self, segment: str, tenant: str) -> array[int]:
        token_ids = self.cache.get((tenant, segment))
        if token_ids is None:
            token_ids = self._encode(segment)
            num_bytes = sys.getsizeof(segment) + sys.getsizeof(token_ids) + _ENTRY_BYTES
            self.cache.put((tenant, segment), token_ids, num_bytes)
        return token_ids

    def _encode(self, text: str) -> array[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return array("I", encoding.ids)

    def _segments(self, text: str) -> Iterator[str]:
        first, *others = text.split(self._marker)
        if first:
            yield first
        for other in others:
            yield self._marker + other


def segment_encoder(tokenizer: Tokenizer, render: Callable[[], str]) -> SegmentEncoder | None:
    """Return the encoder for a tokenizer and its chat template; None: no special token begins the turns.

    `render` returns a conversation of several turns, or raises anything.
    """
    try:
        text = render()
    except Exception:  # A template is a program of the model: it may raise anything.
        return None
    marker = turn_marker(text, tokenizer.get_added_tokens_decoder())
    return None if marker is None else SegmentEncoder(tokenizer, marker)
