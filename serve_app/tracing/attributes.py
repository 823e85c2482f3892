"""Attributes of spans and resources as OTLP messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute | None]
"""Attributes by name; those that are None are left out."""

_MAX_TEXT_CHARS = 65_536
"""Longest text of an attribute; the rest is cut off."""


class KeyValues(Protocol):
    """List of attributes within a message."""

    def add(self, *, key: str) -> KeyValue:
        """Add an attribute and return it."""


def add_attributes(message: KeyValues, attributes: Attributes) -> None:
    """Add attributes to a message."""
    for key, value in attributes.items():
        if value is not None:
            _set(message.add(key=key).value, value)


def _set(message: AnyValue, value: Attribute) -> None:
    if isinstance(value, str):
        message.string_value = _text(value)
    elif isinstance(value, bool):  # A bool is an int too.
        message.bool_value = value
    elif isinstance(value, int):
        message.int_value = value
    elif isinstance(value, float):
        message.double_value = value
    else:
        message.array_value.values.extend(AnyValue(string_value=_text(each)) for each in value)


def _text(text: str) -> str:
    """Return a text that a message can hold: of bounded length, without half of a surrogate pair."""
    text = text[:_MAX_TEXT_CHARS]
    return text if text.isascii() else text.encode(errors="replace").decode()
