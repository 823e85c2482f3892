"""Calls with a tag for each argument and for each value within it: MiniMax M3."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
from serve_app.openai.tools.shapes.values import admitted_types, json_of, typed_value

_ITEM = "item"
"""Tag of an array's item."""
_NAME = "/[a-zA-Z0-9_.-]+/"
"""Name of a tag that the schema leaves open. Begin and end are not compared, since no grammar can."""


@dataclass(frozen=True, slots=True)
class NestedCalls:
    """Shape of calls with nested tags, each behind a marker; a call is reported when it is complete.

    A string stands between its tags as it is, an object as the tags of its values, an array as tags named `item`. The
    tool's schema says what a text without tags is.
    """

    marker: str
    """Text before each tag, which no value contains."""
    other_begins: Sequence[str] = ()

    @property
    def begin(self) -> str:
        """Tag that opens a block of calls."""
        return f"{self.marker}<tool_call>"

    @property
    def block_separator(self) -> None:
        """None: an answer has one block."""
        return

    @property
    def holds_several(self) -> bool:
        """True: a block holds any number of calls."""
        return True

    @property
    def openings(self) -> Sequence[str]:
        """Nothing: every block has a marker."""
        return ()

    def read(self, reader: Reader, sink: Sink) -> Wait[bool]:
        """Read a block behind its marker."""
        num_calls = 0
        while (yield from reader.accept_words(f'{self.marker}<invoke name="')):
            if not (yield from self._read_call(reader, sink)):
                sink.refuse()
                return False
            num_calls += 1
        reader.rewind()
        if not num_calls:
            sink.refuse()
            return False
        if not (yield from reader.accept_words(f"{self.marker}</tool_call>")):
            reader.rewind()
        return True

    def write(self, calls: Sequence[Call]) -> str:
        """Return the text of calls."""
        texts = [
            f'{self.marker}<invoke name="{call.name}">{self._tags(call.arguments)}{self.marker}</invoke>\n'
            for call in calls
        ]
        return f"{self.begin}\n{''.join(texts)}{self.marker}</tool_call>"

    def bind(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        """Return the Lark expression of a block behind its marker."""
        values = _BoundValues(lark, self.marker)
        call = lark.any_of([values.of_call(tool) for tool in tools])
        calls = f"{call}+" if several else call
        return f"{lark.text(chr(10))} {calls} {lark.text(self.marker)} {lark.text('</tool_call>')}"

    def unenforced(self, tool: Tool) -> tuple[str, ...]:
        """Return pointers to the keywords that have no expression in tags."""
        return tuple(unenforced_keywords(tool.parameters or {}, {"object"}, ""))

    def _tags(self, values: JsonObject) -> str:
        return "".join(self._tag(name, value) for name, value in values.items())

    def _tag(self, name: str, value: Any) -> str:
        if isinstance(value, dict):
            text = self._tags(value)
        elif isinstance(value, list):
            text = "".join(self._tag(_ITEM, item) for item in value)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
        return f"{self.marker}<{name}>{text}{self.marker}</{name}>"

    def _read_call(self, reader: Reader, sink: Sink) -> Wait[bool]:
        """Read a call from its name on; return True if it was a call, which is settled."""
        name = yield from reader.read_name()
        body = None
        if name and (yield from reader.accept_words('">')):
            body = yield from reader.read_until(f"{self.marker}</invoke>")
        if body is None:
            return False
        schema = (sink.tools[name].parameters if name in sink.tools else None) or {}
        try:
            elements = _elements(body, self.marker)
            arguments = {one.name: _value(one, _part(schema, one.name)) for one in elements}
            sink.add_call(name, json_of(arguments))
        except ValueError:
            return False
        reader.settle()
        return True


@dataclass(slots=True)
class _Element:
    """Tag with what is in it."""

    name: str
    text: str
    inner: list[_Element] = field(default_factory=list)


def _elements(text: str, marker: str) -> list[_Element]:
    """Return the tags of a text.

    Raises:
        ValueError: they are not nested as they should be, or too deeply, or text stands beside them.
    """
    root = _Element("", "")
    opened = [root]
    before, *pieces = text.split(marker)
    for piece in pieces:
        tag, closing, behind = piece.removeprefix("<").partition(">")
        if not piece.startswith("<") or not closing or len(opened) > MAX_DEPTH:
            raise ValueError("a marker is no part of a tag, or tags are nested too deeply")
        if tag.startswith("/"):
            opened.pop()
            if not opened or behind.strip():
                raise ValueError("a tag ends that has not begun, or text stands behind it")
        else:
            opened.append(_Element(tag, behind))
            opened[-2].inner.append(opened[-1])
    if len(opened) > 1 or before.strip():
        raise ValueError("a tag has no end, or text stands before the first one")
    return root.inner


def _value(element: _Element, schema: JsonObject) -> Any:
    """Return the value between an element's tags, as its schema says."""
    if element.inner and element.text.strip():
        raise ValueError("text stands beside tags")
    types = admitted_types(schema)
    if element.inner and "object" not in types and all(inner.name == _ITEM for inner in element.inner):
        return [_value(inner, items_of(schema)) for inner in element.inner]
    if element.inner:
        return {inner.name: _value(inner, _part(schema, inner.name)) for inner in element.inner}
    if not element.text.strip() and "string" not in types and types & {"array", "object"}:
        return [] if "array" in types else {}
    return typed_value(element.text, schema)


def _part(schema: JsonObject, name: str) -> JsonObject:
    """Return the schema of a property."""
    part = Tool("", schema).properties.get(name, schema.get("additionalProperties"))
    return part if isinstance(part, dict) else {}


class _BoundValues:
    """Lark expressions of values between tags."""

    def __init__(self, lark: Lark, marker: str) -> None:
        self._lark = lark
        self._marker = lark.text(marker)
        self._text = lark.text_until(marker)
        """Any text up to the next marker, which it includes."""
        # The begin of a text and a marker that is plain text cannot be told apart, so that tags within tags of any name
        # need a marker that is a token.
        nests = lark.has_special(marker)
        self._any_tag = lark.recursive(
            lambda tag: (
                f'{self._marker} "<" {_NAME} ">" {self._any_value(tag) if nests else self._text} "</" {_NAME} ">"'
            )
        )
        any_value = self._any_value(self._any_tag) if nests else self._text
        self._forms = ValueForms(
            choices=self._of_choices,
            string=self._text,
            any_value=lambda: any_value,
            of_object=lambda tool: f"{self._of_object(tool)} {self._marker}",
            of_array=lambda schema: f"{self._of_items(schema)} {self._marker}",
            of_scalar=lambda schema: f"{lark.json(schema)} {self._marker}",
        )

    def of_call(self, tool: Tool) -> str:
        """Return the expression of a call from its first tag to its last."""
        begin, end = self._lark.text(f'<invoke name="{tool.name}">'), self._lark.text("</invoke>\n")
        return self._lark.rule(f"{self._marker} {begin} {self._of_object(tool)} {self._marker} {end}")

    def _any_value(self, tag: str) -> str:
        return f"({self._text} | {tag}+ {self._marker})"

    def _of_object(self, tool: Tool) -> str:
        if tool.properties:
            return bound_properties(self._lark, tool, lambda name: self._of_tag(name, property_schema(tool, name)), "")
        others = (tool.parameters or {}).get("additionalProperties")
        if others is False:
            return '""'
        if not isinstance(others, dict):
            return f"{self._any_tag}*"
        tag = self._lark.rule(f'{self._marker} "<" {_NAME} ">" {self._of_value(others)} "</" {_NAME} ">"')
        return f"{tag}*"

    def _of_tag(self, name: str, schema: JsonObject) -> str:
        return f"{self._marker} {self._lark.text(f'<{name}>')} {self._of_value(schema)} {self._lark.text(f'</{name}>')}"

    def _of_value(self, schema: JsonObject) -> str:
        """Return the expression of a value, as far as its schema can be followed here, and of the marker behind it."""
        return bound_value(self._lark, schema, self._forms)

    def _of_choices(self, values: Sequence[Any]) -> str | None:
        if any(isinstance(value, dict | list) for value in values):
            return None
        texts = [self._lark.text(value if isinstance(value, str) else json.dumps(value)) or '""' for value in values]
        return f"({' | '.join(texts)}) {self._marker}"

    def _of_items(self, schema: JsonObject) -> str:
        least, most = num_items(schema, "minItems"), num_items(schema, "maxItems")
        item = self._lark.rule(self._of_tag(_ITEM, items_of(schema)))
        return f"{item}{{{least or 0},{'' if most is None else most}}}"
