"""Sizes of a body, bounded before it is parsed, validated, rendered or tokenized.

Parsing holds the GIL, and its time grows with the number of values, not with the bytes of texts. The counting leaves
the GIL to others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from replicas.errors import InvalidRequest
from serve_app.openai.request.validation import RequestLimits, too_many_prompts

_SLICE_BYTES = 2**16
"""Bytes that one call counts, in some 0.1 ms: it holds the GIL throughout."""
_PUNCTUATION = (b",", b":", b"[", b"{")
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


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

    def fits(self, limits: RequestLimits) -> bool:
        """Return True if the size is within the limits."""
        return self.num_values <= limits.max_body_values and self.num_objects <= limits.max_body_objects


def check_json(data: bytes, limits: RequestLimits) -> None:
    """Refuse a body with more values than are accepted, before it is parsed.

    Raises:
        InvalidRequest: naming the limit and the value.
    """
    if JsonSize.at_most(data, limits).fits(limits):
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
    messages, prompts = fields.get("messages"), fields.get("prompt")
    if isinstance(messages, list) and len(messages) > limits.max_messages:
        message = f"`messages` has {len(messages)} messages; at most {limits.max_messages} are accepted"
        raise InvalidRequest(message, "messages")
    # A list of numbers is one prompt.
    if isinstance(prompts, list) and len(prompts) > limits.max_prompts and type(prompts[0]) is not int:
        raise too_many_prompts(len(prompts), limits.max_prompts)


def _everywhere(data: bytes) -> Iterator[JsonSize]:
    """Yield the size of the text slice by slice, from its punctuation, also that within strings."""
    for start in range(0, len(data), _SLICE_BYTES):
        yield JsonSize.from_counts(*(data.count(char, start, start + _SLICE_BYTES) for char in _PUNCTUATION))


def _outside_strings(data: bytes) -> Iterator[JsonSize]:
    """Yield the size of the text slice by slice, from its punctuation outside of strings."""
    is_inside, last = False, -1  # State at the slice's begin; place of the last character that is no backslash.
    for start in range(0, len(data), _SLICE_BYTES):
        chars = np.frombuffer(data, np.uint8, min(_SLICE_BYTES, len(data) - start), start)
        places = np.flatnonzero(chars != _BACKSLASH)
        if not places.size:
            continue
        # An odd number of backslashes before a quote escapes it.
        distances = np.diff(places, prepend=last - start)
        text = chars[places]
        inside = np.logical_xor.accumulate((text == _QUOTE) & (distances % 2 == 1)) ^ is_inside
        counts = np.bincount(text[~inside], minlength=256)
        is_inside, last = bool(inside[-1]), start + int(places[-1])
        yield JsonSize.from_counts(*(int(counts[ord(char)]) for char in _PUNCTUATION))
