"""JSON of large replies, written in pieces: one call for the whole would hold the GIL from its begin to its end."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic_core import to_json

_NUM_ITEMS = 256


def json_in_pieces(value: object) -> bytes:
    """Return a value as JSON; other threads may run between its pieces."""
    return b"".join(_pieces(value))


def _pieces(value: object) -> Iterator[bytes]:
    if isinstance(value, dict) and value:
        for index, (name, item) in enumerate(value.items()):
            yield (b"," if index else b"{") + to_json(name) + b":"
            yield from _pieces(item)
        yield b"}"
    elif isinstance(value, list) and len(value) > _NUM_ITEMS:
        for start in range(0, len(value), _NUM_ITEMS):
            yield (b"," if start else b"[") + to_json(value[start : start + _NUM_ITEMS])[1:-1]
        yield b"]"
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from _pieces(item)
        yield b"]"
    else:
        yield to_json(value)
