"""Calls with arguments in braces, whose keys stand bare and whose strings stand between markers: Gemma 4."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from serve_app.openai.tools.shapes.calls import Call, JsonObject, Sink, Tool
from serve_app.openai.tools.shapes.json_text import MAX_DEPTH
from serve_app.openai.tools.shapes.reader import Reader, Wait
from serve_app.openai.tools.shapes.schemas import (
    ValueForms,
    bound_properties,
    bound_value,
    items_of,
    num_items,
    property_schema,
    unenforced_keywords,
)
from serve_app.openai.tools.shapes.shape import Lark
from serve_app.openai.tools.shapes.values import json_of, literal

T = TypeVar("T")

_BARE = re.compile(r"[A-Za-z0-9_.\-]+")
_SPACE = re.compile(r"\s*")
_LITERAL = re.compile(r"[^,\]}]*")
_NESTING = {"{": 1, "[": 1, "}": -1, "]": -1}


@dataclass(frozen=True, slots=True)
class BracedCalls:
    """Shape of calls as `call:get_weather{city:"Oslo",days:2}` with a marker of its own in place of the quote.

    A call is reported when it is complete.
    """

    begin: str
    end: str
    call_begin: str
    quote: str
    block_separator: str = ""
    other_begins: Sequence[str] = ()

    @property
    def holds_several(self) -> bool:
        """False: a block is one call."""
        return False

    @property
    def openings(self) -> Sequence[str]:
        """Nothing: every block has a marker."""
        return ()

    def read(self, reader: Reader, sink: Sink) -> Wait[bool]:
        """Read a call behind its marker."""
        is_call = yield from reader.accept_words(self.call_begin)
        name = (yield from reader.read_name()) if is_call else ""
        text = (yield from self._read_braces(reader)) if name else None
        try:
            sink.add_call(name, json_of(_BracedText(text or "", self.quote).arguments()))
        except ValueError:
            sink.refuse()
            return False
        reader.settle()
        if not (yield from reader.accept_words(self.end)):
            reader.rewind()
        return True

    def write(self, calls: Sequence[Call]) -> str:
        """Return the text of calls."""
        return self.block_separator.join(
            f"{self.begin}{self.call_begin}{call.name}{self._written(call.arguments)}{self.end}" for call in calls
        )

    def bind(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        """Return the Lark expression of a call behind its marker."""
        values = _BoundValues(lark, self.quote, self._written)
        calls = [f"{lark.text(self.call_begin + tool.name)} {values.of_object(tool)}" for tool in tools]
        return f"{lark.any_of(calls)} {lark.text(self.end)}"

    def unenforced(self, tool: Tool) -> tuple[str, ...]:
        """Return pointers to the keywords that have no expression in braces."""
        return tuple(unenforced_keywords(tool.parameters or {}, {"object"}, ""))

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{self._key(key)}:{self._written(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._written, value)) + "]"
        return json.dumps(value)

    def _key(self, key: str) -> str:
        return key if _BARE.fullmatch(key) else f"{self.quote}{key}{self.quote}"

    def _read_braces(self, reader: Reader) -> Wait[str | None]:
        """Read up to the brace that closes the one behind the cursor; return both with what is between them."""
        start, depth = reader.position, 0
        while (yield from reader.has_more()):
            if (yield from reader.accept((self.quote,))):
                if (yield from reader.read_until(self.quote)) is None:
                    return None
                continue
            if not (yield from reader.has_more()):
                return None
            depth += _NESTING.get(reader.text[reader.position], 0)
            reader.position += 1
            if depth == 0:
                return reader.text[start : reader.position]
        return None


class _BracedText:
    """Text of arguments in braces, read from its begin to its end."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._position = 0

    def arguments(self) -> JsonObject:
        """Return the arguments.

        Raises:
            ValueError: the text is something else, or nested too deeply.
        """
        value = self._value(0)
        if not isinstance(value, dict) or self._position < len(self._text):
            raise ValueError("the text is no object in braces")
        return value

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("an argument is nested too deeply")
        if self._takes(self._quote):
            return self._until(self._quote)
        if self._takes("{"):
            return dict(self._items("}", lambda: self._pair(depth + 1)))
        if self._takes("["):
            return list(self._items("]", lambda: self._value(depth + 1)))
        piece = _LITERAL.match(self._text, self._position)
        assert piece is not None
        self._position = piece.end()
        if not piece[0].strip():
            raise ValueError("a value is missing")
        return literal(piece[0].strip())

    def _items(self, closing: str, read: Callable[[], T]) -> Iterator[T]:
        if self._takes(closing):
            return
        yield read()
        while not self._takes(closing):
            if not self._takes(","):
                raise ValueError("a comma is missing")
            yield read()

    def _pair(self, depth: int) -> tuple[str, Any]:
        if self._takes(self._quote):
            key = self._until(self._quote)
            self._until(":")
        else:
            key = self._until(":").strip()
        return key, self._value(depth)

    def _takes(self, literal: str) -> bool:
        """Move behind the literal, and white space before it, if the text goes on with it."""
        space = _SPACE.match(self._text, self._position)
        assert space is not None
        begin = space.end()
        is_next = self._text.startswith(literal, begin)
        if is_next:
            self._position = begin + len(literal)
        return is_next

    def _until(self, literal: str) -> str:
        """Move behind the next occurrence of the literal; return the text before it."""
        end = self._text.find(literal, self._position)
        if end < 0:
            raise ValueError(f"{literal} is missing")
        text = self._text[self._position : end]
        self._position = end + len(literal)
        return text


class _BoundValues:
    """Lark expressions of values in braces."""

    def __init__(self, lark: Lark, quote: str, written: Callable[[Any], str]) -> None:
        self._lark = lark
        self._written = written
        self._string = f"{lark.text(quote)} {lark.text_until(quote)}"
        self._any: str | None = None
        self._forms = ValueForms(
            choices=lambda values: f"({' | '.join(lark.text(written(value)) for value in values)})",
            string=self._string,
            any_value=self._any_value,
            of_object=self.of_object,
            of_array=lambda schema: self._list(self.of(items_of(schema)), schema),
            of_scalar=lark.json,
        )

    def of_object(self, tool: Tool) -> str:
        """Return the expression of an object with the properties of a tool, or of any keys if it names none."""
        if not tool.properties:
            others = (tool.parameters or {}).get("additionalProperties", {})
            return '"{" "}"' if others is False else self._mapping(self.of(others if isinstance(others, dict) else {}))

        def bound(name: str) -> str:
            key = name if _BARE.fullmatch(name) else self._written(name)
            return f"{self._lark.text(key + ':')} {self.of(property_schema(tool, name))}"

        return f'"{{" {bound_properties(self._lark, tool, bound, self._lark.text(","))} "}}"'

    def of(self, schema: JsonObject) -> str:
        """Return the expression of a value, as far as its schema can be followed here."""
        return bound_value(self._lark, schema, self._forms)

    def _any_value(self) -> str:
        self._any = self._any or self._lark.recursive(self._value_of_any)
        return self._any

    def _value_of_any(self, name: str) -> str:
        scalar = self._lark.json({"type": ["boolean", "null", "number"]})
        return " | ".join([self._string, scalar, self._mapping(name), self._list(name, {})])

    def _list(self, item: str, schema: JsonObject) -> str:
        least, most = num_items(schema, "minItems"), num_items(schema, "maxItems")
        if most == 0:
            return '"[" "]"'
        further = f'("," {item}){{{max(least or 0, 1) - 1},{"" if most is None else most - 1}}}'
        return f'"[" {item} {further} "]"' if least else f'"[" ({item} {further})? "]"'

    def _mapping(self, value: str) -> str:
        pair = f'/{_BARE.pattern}/ ":" {value}'
        return f'"{{" ({pair} ("," {pair})*)? "}}"'
