"""Sizes of a body, bounded before it is parsed, validated, rendered or tokenized.

Parsing holds the GIL, and its time grows with the number of values, not with the bytes of texts. The counting leaves
the GIL to others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replicas.errors import InvalidRequest
from serve_app.openai.request.validation import RequestLimits, too_many_prompts

_SLICE_BYTES = 2**16
"""Bytes that are counted at a time: their arrays fit into the processor's cache."""
_PUNCTUATION = tuple(b",:[{")
_QUOTE, _BACKSLASH = ord('"'), ord("\\")

Chars = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class JsonSize:
    """Size of a JSON text, counted from its punctuation outside of strings."""

    num_values: int
    """Items of all lists and fields of all objects: at least as many as there are."""
    num_objects: int
    """Objects, lists and names of fields, each of which takes several times as long as a number."""

    @classmethod
    def of(cls, data: bytes, limits: RequestLimits | None = None) -> JsonSize:
        """Return the size of a valid JSON text; the counting ends early with a size beyond the limits."""
        return cls._sum(_outside_strings(data), limits)

    @classmethod
    def at_most(cls, data: bytes, limits: RequestLimits | None = None) -> JsonSize:
        """Return a size that the text does not exceed, in a fraction of the time; beyond the limits it ends early."""
        return cls._sum(_everywhere(data), limits)

    @classmethod
    def _sum(cls, parts: Iterable[JsonSize], limits: RequestLimits | None) -> JsonSize:
        size = cls(0, 0)
        for part in parts:
            size = size.plus(part)
            if limits is not None and not size.fits(limits):
                break
        return size

    @classmethod
    def from_counts(cls, commas: int, colons: int, lists: int, objects: int) -> JsonSize:
        """Return the size of a text with so much punctuation outside of strings."""
        return cls(commas + lists + objects, lists + objects + colons)

    def plus(self, other: JsonSize) -> JsonSize:
        """Return the size of two parts of a text together."""
        return JsonSize(self.num_values + other.num_values, self.num_objects + other.num_objects)

    def fits(self, limits: RequestLimits, times: int = 1) -> bool:
        """Return True if the size is within so many times the limits."""
        max_values, max_objects = times * limits.max_body_values, times * limits.max_body_objects
        return self.num_values <= max_values and self.num_objects <= max_objects


def check_json(data: bytes, limits: RequestLimits) -> None:
    """Refuse a body with more values than are accepted, before it is parsed.

    Raises:
        InvalidRequest: naming the limit and the value.
    """
    # A value has at least one character.
    if len(data) <= min(limits.max_body_values, limits.max_body_objects) or JsonSize.at_most(data, limits).fits(limits):
        return
    size = JsonSize.of(data, limits)
    if size.num_values > limits.max_body_values:
        message = f"the JSON body has at least {size.num_values} values"
        raise InvalidRequest(f"{message}; at most {limits.max_body_values} are accepted")
    if size.num_objects > limits.max_body_objects:
        message = f"the JSON body has at least {size.num_objects} objects, lists and names of fields"
        raise InvalidRequest(f"{message}; at most {limits.max_body_objects} are accepted")


def check_fields(fields: Mapping[str, object], limits: RequestLimits) -> None:
    """Refuse lists of more items than are accepted, before their items are validated.

    Raises:
        InvalidRequest: naming the field, the limit and the value.
    """
    for name, kind in (("messages", "messages"), ("input", "items")):
        turns = fields.get(name)
        if isinstance(turns, list) and len(turns) > limits.max_messages:
            message = f"`{name}` has {len(turns)} {kind}; at most {limits.max_messages} are accepted"
            raise InvalidRequest(message, name)
    prompts = fields.get("prompt")
    # A list of numbers is one prompt.
    if isinstance(prompts, list) and len(prompts) > limits.max_prompts and type(prompts[0]) is not int:
        raise too_many_prompts(len(prompts), limits.max_prompts)


def _everywhere(data: bytes) -> Iterator[JsonSize]:
    """Yield the size of the text slice by slice, from its punctuation, also that within strings."""
    for chars in _slices(data):
        yield JsonSize.from_counts(*(int(np.count_nonzero(chars == char)) for char in _PUNCTUATION))


def _outside_strings(data: bytes) -> Iterator[JsonSize]:
    """Yield the size of the text slice by slice, from its punctuation outside of strings."""
    is_inside, num_backslashes = False, 0  # State at the slice's begin: a string is open; backslashes just before.
    for chars in _slices(data):
        quotes = chars == _QUOTE
        num_backslashes = _remove_escaped(quotes, chars == _BACKSLASH, num_backslashes)
        parities = np.bitwise_xor.accumulate(quotes.view(np.uint8))
        outside = parities == is_inside
        is_inside ^= bool(parities[-1])
        yield JsonSize.from_counts(*(int(np.count_nonzero((chars == char) & outside)) for char in _PUNCTUATION))


def _slices(data: bytes) -> Iterator[Chars]:
    chars = np.frombuffer(data, np.uint8)
    return (chars[start : start + _SLICE_BYTES] for start in range(0, len(data), _SLICE_BYTES))


def _remove_escaped(quotes: npt.NDArray[np.bool_], backslashes: npt.NDArray[np.bool_], num_before: int) -> int:
    """Unmark the quotes after an odd number of backslashes, of which `num_before` end the slice before.

    Returns:
        The number of backslashes at the slice's end.
    """
    follow = np.append(num_before > 0, backslashes[:-1]) & quotes
    if not (follow.any() or backslashes[-1]):
        return 0
    others = np.append(-1 - num_before, np.flatnonzero(~backslashes))
    places = np.flatnonzero(follow)
    before = others[np.searchsorted(others, places) - 1]
    quotes[places[(places - before) % 2 == 0]] = False
    return len(quotes) - 1 - int(others[-1])
