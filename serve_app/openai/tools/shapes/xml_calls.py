"""Calls with a tag for each argument: Qwen3-Coder, GLM, MiniMax, Seed, DeepSeek V3.2."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.openai.tools.shapes.calls import Call, JsonObject, Sink, Tool
from serve_app.openai.tools.shapes.reader import Reader, Wait
from serve_app.openai.tools.shapes.schemas import bound_properties, pointer_part, property_schema
from serve_app.openai.tools.shapes.shape import Lark, joined_blocks
from serve_app.openai.tools.shapes.values import admitted_types, is_text, json_of, literal, typed_value


@dataclass(frozen=True, slots=True)
class _Key:
    """Key of an argument, with what its tag says of the value."""

    name: str
    is_json: bool


_ENFORCED_OF_TEXT = {"type", "enum", "const", "title", "description", "default", "examples", "$comment"}


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """Shape of calls with a tag for each argument; a call is reported when it is complete.

    A string stands between the tags as it is, any other value as JSON. The tool's schema says what a value is, and so
    does its tag where there is a `json_key_end`.
    """

    begin: str
    key_begin: str
    key_end: str
    value_end: str
    call_end: str
    call_begin: str = ""
    """Text between `begin` and a call's name."""
    name_end: str = ""
    end: str = ""
    json_key_end: str = ""
    """Text behind the key of a value that is no string; empty: `key_end`, as behind any other."""
    separator: str | None = None
    """Text between two calls of a block; None if a block holds one."""
    block_separator: str | None = None
    other_begins: Sequence[str] = ()

    @property
    def holds_several(self) -> bool:
        """True if a block may hold several calls."""
        return self.separator is not None

    @property
    def openings(self) -> Sequence[str]:
        """Nothing: every block has a marker."""
        return ()

    def read(self, reader: Reader, sink: Sink) -> Wait[bool]:
        """Read a block behind its marker."""
        while (yield from reader.accept_words(self.call_begin)):
            if not (yield from self._read_call(reader, sink)):
                break
            if not (self.holds_several and self.call_begin):
                return (yield from self._read_end(reader))
            if (yield from self._is_at_end(reader)):
                return (yield from self._read_end(reader))
        sink.refuse()
        return False

    def write(self, calls: Sequence[Call]) -> str:
        """Return the text of calls."""
        texts = [self._text(call) for call in calls]
        return joined_blocks(texts, self.begin, self.end, self.separator, self.block_separator)

    def bind(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        """Return the Lark expression of a block behind its marker."""
        call = lark.any_of([self._bound(lark, tool) for tool in tools])
        return f"{lark.series(call, self.separator if several else None)} {lark.text(self.end)}"

    def unenforced(self, tool: Tool) -> tuple[str, ...]:
        """Return pointers to keywords of strings: a string between tags is any text, or one of an enumeration."""
        return tuple(
            f"/properties/{pointer_part(name)}/{keyword}"
            for name, schema in tool.properties.items()
            if isinstance(schema, dict) and is_text(schema)
            for keyword in sorted(schema.keys() - _ENFORCED_OF_TEXT)
        )

    def _text(self, call: Call) -> str:
        arguments = [
            f"{self.key_begin}{key}{self._key_end_of(value)}{_written(value)}{self.value_end}"
            for key, value in call.arguments.items()
        ]
        return f"{self.call_begin}{call.name}{self.name_end}{''.join(arguments)}{self.call_end}"

    def _bound(self, lark: Lark, tool: Tool) -> str:
        head, tail = lark.text(self.call_begin + tool.name + self.name_end), lark.text(self.call_end)
        if tool.parameters is None:
            key = f"{lark.text(self.key_begin)} /[a-zA-Z0-9_.-]+/"
            return f"{head} ({lark.rule(f'{key} {self._value(lark, {})}')})* {tail}"

        def bound(name: str) -> str:
            return f"{lark.text(self.key_begin + name)} {self._value(lark, property_schema(tool, name))}"

        return f"{head} {bound_properties(lark, tool, bound, '')} {tail}"

    def _value(self, lark: Lark, schema: JsonObject) -> str:
        """Return the expression of a value, with the end of the tag before it and the tag behind it."""
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices:
            texts = [lark.text(self._key_end_of(choice) + _written(choice)) for choice in choices]
            return f"({' | '.join(texts)}) {lark.text(self.value_end)}"
        values = []
        if is_text(schema):
            values.append(f"{lark.text(self.key_end)} {lark.text_until(self.value_end)}")
        if not is_text(schema) or (self.json_key_end and admitted_types(schema) != {"string"}):
            json_key_end = lark.text(self.json_key_end or self.key_end)
            values.append(f"{json_key_end} {lark.json(schema)} {lark.text(self.value_end)}")
        return lark.any_of(values)

    def _key_end_of(self, value: Any) -> str:
        return self.key_end if isinstance(value, str) else self.json_key_end or self.key_end

    def _read_call(self, reader: Reader, sink: Sink) -> Wait[bool]:
        """Read a call from its name on; return True if it was a call, which is settled."""
        yield from reader.skip_space()
        name = yield from reader.read_name()
        if not name or not (yield from reader.accept_words(self.name_end)):
            return False
        properties = sink.tools[name].properties if name in sink.tools else {}
        arguments: JsonObject = {}
        while (yield from self._is_next(reader, self.key_begin)):
            yield from reader.accept_words(self.key_begin)
            key = yield from self._read_key(reader)
            text = None if key is None else (yield from self._read_value(reader))
            if key is None or text is None:
                return False
            arguments[key.name] = self._value_of(text, key, properties.get(key.name))
        if not (yield from reader.accept_words(self.call_end)):
            return False
        try:
            sink.add_call(name, json_of(arguments))
        except ValueError:
            return False
        reader.settle()
        return True

    def _value_of(self, text: str, key: _Key, schema: object) -> Any:
        """Return the value that a text stands for, as its tag and its schema say."""
        if key.is_json and admitted_types(schema) != {"string"}:
            return literal(text)
        return text if self.json_key_end and is_text(schema) else typed_value(text, schema)

    def _read_key(self, reader: Reader) -> Wait[_Key | None]:
        first, *others = self.key_end.split()
        name = yield from reader.read_until(first)
        if name is None:
            return None
        behind = reader.position
        if (yield from reader.accept_words(" ".join(others))):
            return _Key(name.strip(), is_json=False)
        reader.position = behind
        _, *others = self.json_key_end.split() or [first]
        is_json = bool(others) and (yield from reader.accept_words(" ".join(others)))
        return _Key(name.strip(), is_json=True) if is_json else None

    def _read_value(self, reader: Reader) -> Wait[str | None]:
        """Read up to the tag that closes the value; the same tag within the value is text."""
        start, tag = reader.position, self.value_end.strip()
        while (yield from reader.read_until(tag)) is not None:
            behind = reader.position
            is_end = yield from self._is_next(reader, self.key_begin, self.call_end)
            reader.position = behind
            if is_end:
                return self._unpadded(reader.text[start : behind - len(tag)])
        return None

    def _unpadded(self, value: str) -> str:
        """Return the value without the line breaks that the family writes around it."""
        if self.key_end.endswith("\n"):
            value = value.removeprefix("\n")
        return value.removesuffix("\n") if self.value_end.startswith("\n") else value

    def _is_next(self, reader: Reader, *literals: str) -> Wait[bool]:
        """Return True if one of the literals is next; the cursor moves behind white space only."""
        yield from reader.skip_space()
        position = reader.position
        for words in literals:
            is_next = yield from reader.accept_words(words)
            reader.position = position
            if is_next:
                return True
        return False

    def _is_at_end(self, reader: Reader) -> Wait[bool]:
        """Return True unless another call of the block follows."""
        return not (yield from self._is_next(reader, self.call_begin))

    def _read_end(self, reader: Reader) -> Wait[bool]:
        reader.rewind()
        if not (self.end and (yield from reader.accept_words(self.end))):
            reader.rewind()
        return True


def _written(value: Any) -> str:
    """Return a value as it stands between the tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
