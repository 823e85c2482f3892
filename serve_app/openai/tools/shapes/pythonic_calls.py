"""Calls as a Python list of function calls: Llama 4, Llama 3.2's pythonic form, LFM2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.openai.tools.shapes.calls import Call, JsonObject, Sink, Tool
from serve_app.openai.tools.shapes.reader import Reader, Wait
from serve_app.openai.tools.shapes.schemas import bound_properties, property_schema
from serve_app.openai.tools.shapes.shape import Lark
from serve_app.openai.tools.shapes.values import admitted_types, json_of, python_calls

_CONSTANTS = {"boolean": (True, False), "null": (None,)}
_BRACKETS = {"[": 1, "(": 1, "{": 1, "]": -1, ")": -1, "}": -1}


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    """Shape of calls as `[get_weather(city="Oslo", days=2)]`; they are reported when the list is complete."""

    begin: str = ""
    end: str = ""
    other_begins: Sequence[str] = ()

    @property
    def holds_several(self) -> bool:
        """True: a list holds any number of calls."""
        return True

    @property
    def block_separator(self) -> None:
        """None: an answer has one list."""
        return

    @property
    def openings(self) -> Sequence[str]:
        """Bracket that begins a block, if blocks have no marker."""
        return () if self.begin else ("[",)

    def read(self, reader: Reader, sink: Sink) -> Wait[bool]:
        """Read a block behind its marker."""
        text = (yield from _read_list(reader)) if (yield from reader.skip_space()) == "[" else None
        try:
            calls = [(name, json_of(arguments)) for name, arguments in python_calls(text or "")]
        except (ValueError, RecursionError):
            calls = []
        if not calls or (not self.begin and any(name not in sink.tools for name, _ in calls)):
            if self.begin:
                sink.refuse()
            return False
        for name, arguments in calls:
            sink.add_call(name, arguments)
        reader.settle()
        if not (self.end and (yield from reader.accept_words(self.end))):
            reader.rewind()
        return True

    def write(self, calls: Sequence[Call]) -> str:
        """Return the text of calls."""
        texts = [f"{call.name}({', '.join(f'{k}={_python(v)}' for k, v in call.arguments.items())})" for call in calls]
        return f"{self.begin}[{', '.join(texts)}]{self.end}"

    def bind(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        """Return the Lark expression of a block behind its marker.

        Raises:
            ValueError: a tool's or an argument's name is not a Python name.
        """
        call = lark.any_of([self._bound(lark, tool) for tool in tools])
        calls = lark.rule(f'{call} (", " {call})*') if several else call
        return f'"[" {calls} "]" {lark.text(self.end)}'

    def unenforced(self, tool: Tool) -> tuple[str, ...]:
        """Return nothing: each argument is bound by its whole schema."""
        return ()

    def _bound(self, lark: Lark, tool: Tool) -> str:
        for name in (*tool.name.split("."), *tool.properties):
            if not name.isidentifier():
                raise ValueError(f"calls of this model are written in Python, where `{name}` is no name")
        if tool.parameters is None:
            argument = lark.rule(f'/[a-zA-Z_][a-zA-Z0-9_]*/ "=" {lark.json({})}')
            return f'{lark.text(tool.name + "(")} ({argument} (", " {argument})*)? ")"'

        def bound(name: str) -> str:
            return f"{lark.text(name + '=')} {_bound_value(lark, property_schema(tool, name))}"

        arguments = bound_properties(lark, tool, bound, lark.text(", "))
        return f'{lark.text(tool.name + "(")} {arguments} ")"'


def _bound_value(lark: Lark, schema: JsonObject) -> str:
    """Return the expression of a value: JSON, with Python's names of constants where the value is one."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices:
        return f"({' | '.join(lark.text(_python(choice)) for choice in choices)})"
    types = admitted_types(schema)
    constants = [_python(value) for kind, values in _CONSTANTS.items() if kind in types for value in values]
    others = [] if types and types <= _CONSTANTS.keys() else [lark.json(schema)]
    return f"({' | '.join([*map(lark.text, constants), *others])})"


def _read_list(reader: Reader) -> Wait[str | None]:
    """Read up to the bracket that closes the list; return the list, or None if the text ends before.

    Line breaks within strings come back escaped, as Python wants them; some templates and models do not escape them.
    """
    start, depth, quote = reader.position, 0, ""
    breaks: list[int] = []
    while (yield from reader.has_more()):
        char = reader.text[reader.position]
        reader.position += 1
        if quote:
            if char == "\\" and (yield from reader.has_more()):
                reader.position += 1
            elif char == "\n":
                breaks.append(reader.position - 1 - start)
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            depth += _BRACKETS.get(char, 0)
            if depth == 0:
                return _escaped(reader.text[start : reader.position], breaks)
    return None


def _escaped(text: str, breaks: Sequence[int]) -> str:
    """Return the text with the line breaks at these places escaped."""
    parts, begin = [], 0
    for place in breaks:
        parts.append(text[begin:place])
        begin = place + 1
    return "\\n".join([*parts, text[begin:]])


def _python(value: Any) -> str:
    """Return a value as a Python literal, its strings as JSON's, which Python reads alike."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(key)}: {_python(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
