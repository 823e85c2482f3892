"""JSON in text that arrives in pieces."""

from __future__ import annotations

import json
import re
from typing import Any

from serve_app.openai.tools.shapes.calls import Sink
from serve_app.openai.tools.shapes.reader import Reader, Wait

MAX_DEPTH = 100
"""Nesting of a call's arguments; deeper ones are malformed."""

_IN_STRING = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r"[ \t\r\n0-9aeflnrstuE+\-.,:]*")
_LITERAL = re.compile(r"[0-9aeflnrstuE+\-.]*")
_CLOSING = {"{": "}", "[": "]"}


class JsonScanner:
    """Scanner for the end of a JSON object or array whose text arrives in pieces.

    Characters that cannot stand in JSON break it at once. Whether the value is valid is seen at its end.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._open: list[str] = []
        self._in_string = False
        self._is_escaped = False

    def scan(self, text: str, position: int) -> int:
        """Return the place behind the last character that belongs to the value, from `position` on."""
        while position < len(text) and not (self.is_done or self.is_broken):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            piece = (_IN_STRING if self._in_string else _OUTSIDE).match(text, position)
            assert piece is not None
            position = piece.end()
            if position < len(text):
                position += self._take(text[position])
        return position

    def _take(self, char: str) -> int:
        """Take a quote, a backslash or a bracket; return the number of characters that belong to the value."""
        if self._in_string:
            self._is_escaped = char == "\\"
            self._in_string = self._is_escaped
        elif char == '"':
            self._in_string = True
        elif char in _CLOSING and len(self._open) < MAX_DEPTH:
            self._open.append(_CLOSING[char])
        elif self._open and char == self._open[-1]:
            self._open.pop()
            self.is_done = not self._open
        else:
            self.is_broken = True
            return 0
        return 1


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or holds a number that JSON does not have.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None


def is_object(text: str) -> bool:
    """Return True if the text is a JSON object."""
    try:
        return isinstance(parse_json(text), dict)
    except ValueError:
        return False


def read_value(reader: Reader) -> Wait[str | None]:
    """Read a JSON value; return its text, or None if it is broken or the text ends."""
    start = reader.position
    char = yield from reader.peek()
    if char == '"':
        return (yield from _read_string(reader))
    if char not in _CLOSING:
        return (yield from _read_literal(reader))
    scanner = JsonScanner()
    while (yield from reader.has_more()):
        reader.position = scanner.scan(reader.text, reader.position)
        if scanner.is_done:
            return reader.text[start : reader.position]
        if scanner.is_broken:
            return None
    return None


def read_arguments(reader: Reader, sink: Sink) -> Wait[bool]:
    """Read the JSON object behind the cursor as the arguments of the call that has begun, and end the call.

    Returns:
        True if the call was reported.
    """
    scanner, pieces = JsonScanner(), []
    while not (scanner.is_done or scanner.is_broken) and (yield from reader.has_more()):
        end = scanner.scan(reader.text, reader.position)
        piece = reader.text[reader.position : end]
        pieces.append(piece)
        reader.position = end
        if not sink.whole_calls:
            sink.add_arguments(piece)
            reader.settle()
    text = "".join(pieces)
    if sink.whole_calls:
        sink.add_arguments(text)
    is_reported = sink.end(scanner.is_done and is_object(text))
    if is_reported:
        reader.settle()
    return is_reported


def _read_string(reader: Reader) -> Wait[str | None]:
    start = reader.position
    reader.position += 1
    while (yield from reader.has_more()):
        piece = _IN_STRING.match(reader.text, reader.position)
        assert piece is not None
        reader.position = piece.end()
        if reader.position == len(reader.text):
            continue
        reader.position += 1
        if reader.text[reader.position - 1] == '"':
            return reader.text[start : reader.position]
        if not (yield from reader.has_more()):
            return None
        reader.position += 1
    return None


def _read_literal(reader: Reader) -> Wait[str | None]:
    """Read a number, true, false or null."""
    start = reader.position
    while (yield from reader.has_more()):
        piece = _LITERAL.match(reader.text, reader.position)
        assert piece is not None
        reader.position = piece.end()
        if reader.position < len(reader.text):
            break
    return reader.text[start : reader.position] or None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
