"""Calls as JSON objects with a name and arguments: Hermes, Llama 3, Mistral, Phi-4, Granite, Command and others."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.openai.tools.shapes.calls import Call, Sink, Tool
from serve_app.openai.tools.shapes.json_text import is_object, parse_json, read_arguments, read_value
from serve_app.openai.tools.shapes.reader import Reader, Wait
from serve_app.openai.tools.shapes.shape import Lark

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Shape of calls that are JSON objects.

    The parser takes one object, a list of objects, and objects behind each other, whatever the family writes.
    """

    begin: str = ""
    end: str = ""
    """Marker that closes a block; empty if the block ends with its last object."""
    opening: str = ""
    """Text between `begin` and the first object."""
    closing: str = ""
    """Text between the last object and `end`."""
    separator: str | None = None
    """Text between two objects of a block; None if a block holds one."""
    block_separator: str | None = None
    name_key: str = "name"
    arguments_key: str = "arguments"
    ordinal_key: str | None = None
    """Key of a call's number, which comes first in its object; None if there is none."""
    other_begins: Sequence[str] = ()

    @property
    def holds_several(self) -> bool:
        """True if a block may hold several calls."""
        return self.separator is not None

    @property
    def openings(self) -> Sequence[str]:
        """Bracket that begins a block, if blocks have no marker."""
        return () if self.begin else (self.opening.strip() or "{",)

    def read(self, reader: Reader, sink: Sink) -> Wait[bool]:
        """Read a block behind its marker."""
        is_list = (yield from reader.skip_space()) == "["
        reader.position += is_list
        if is_list and self.begin and (yield from reader.skip_space()) == "]":
            return (yield from self._read_end(reader, is_list))
        while True:
            if not (yield from self._read_call(reader, sink)):
                return False
            char = yield from reader.skip_space()
            if char == ("," if is_list else ";"):
                reader.position += 1
                char = yield from reader.skip_space()
            elif is_list:
                break
            if char != "{":
                break
        return (yield from self._read_end(reader, is_list))

    def write(self, calls: Sequence[Call]) -> str:
        """Return the text of calls."""
        objects = [self._object(index, call.name) + call.arguments_json + "}" for index, call in enumerate(calls)]
        if self.separator is None:
            return (self.block_separator or "").join(map(self._block, objects))
        return self._block(self.separator.join(objects))

    def bind(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        """Return the Lark expression of a block behind its marker."""
        call = lark.any_of([self._bound(lark, tool) for tool in tools])
        calls = f"{call} ({lark.text(self.separator)} {call})*" if several and self.separator else call
        return f"{lark.text(self.opening)} {calls} {lark.text(self.closing)} {lark.text(self.end)}"

    def unenforced(self, tool: Tool) -> tuple[str, ...]:
        """Return nothing: the arguments are bound by their whole schema."""
        return ()

    def _bound(self, lark: Lark, tool: Tool) -> str:
        head = self._object(0, tool.name)
        if self.ordinal_key is None:
            return f"{lark.text(head)} {lark.arguments(tool)} {lark.text('}')}"
        before, after = head.split('"0"', 1)
        return f'{lark.text(before)} /"[0-9]{{1,3}}"/ {lark.text(after)} {lark.arguments(tool)} {lark.text("}")}'

    def _block(self, objects: str) -> str:
        return f"{self.begin}{self.opening}{objects}{self.closing}{self.end}"

    def _object(self, index: int, name: str) -> str:
        """Return the text of a call's object up to its arguments."""
        ordinal = "" if self.ordinal_key is None else f'"{self.ordinal_key}": "{index}", '
        return f'{{{ordinal}"{self.name_key}": {json.dumps(name)}, "{self.arguments_key}": '

    def _read_end(self, reader: Reader, is_list: bool) -> Wait[bool]:
        """Read what closes the block, as far as it is there; return True."""
        if is_list and (yield from reader.accept_words("]")):
            reader.settle()
        reader.rewind()
        if not (self.end and (yield from reader.accept_words(self.end))):
            reader.rewind()
        return True

    def _read_call(self, reader: Reader, sink: Sink) -> Wait[bool]:
        """Read one object; return True if it was a call, which is settled."""
        fields: dict[str, str] = {}
        if (yield from reader.accept(("{",))) is None:
            return self._refused(sink, None)
        while (yield from reader.skip_space()) != "}":
            key = yield from self._read_key(reader, is_first=not fields)
            name = self._name(fields)
            if key is None or (name is not None and not self._accepts(sink, name)):
                return self._refused(sink, name)
            if key in self._arguments_keys and name and (yield from reader.skip_space()) == "{":
                sink.begin(name)
                return (yield from read_arguments(reader, sink)) and (yield from self._skip_rest(reader))
            value = yield from read_value(reader)
            if value is None:
                return self._refused(sink, name)
            fields[key] = value
        reader.position += 1
        return self._report(fields, reader, sink)

    def _read_key(self, reader: Reader, is_first: bool) -> Wait[str | None]:
        """Read a key with the colon behind it, and the comma before it unless it is the first."""
        if not is_first and not (yield from reader.accept_words(",")):
            return None
        if (yield from reader.skip_space()) != '"':
            return None
        key = yield from read_value(reader)
        if key is None or not (yield from reader.accept_words(":")):
            return None
        yield from reader.skip_space()
        return _text_of(key)

    def _skip_rest(self, reader: Reader) -> Wait[bool]:
        """Skip the fields behind the arguments; what is no field stays where it is."""
        while (yield from reader.skip_space()) == ",":
            key = yield from self._read_key(reader, is_first=False)
            if key is None or (yield from read_value(reader)) is None:
                break
        else:
            if (yield from reader.accept(("}",))):
                reader.settle()
        return True

    def _report(self, fields: dict[str, str], reader: Reader, sink: Sink) -> bool:
        """Report a call whose arguments come before its name, are missing, or are a string."""
        name = self._name(fields)
        arguments = next((fields[key] for key in self._arguments_keys if key in fields), "null")
        arguments = "{}" if arguments == "null" else arguments
        if arguments.startswith('"'):
            arguments = _text_of(arguments) or ""
        if not name or not self._accepts(sink, name) or not is_object(arguments):
            return self._refused(sink, name)
        sink.add_call(name, arguments)
        reader.settle()
        return True

    def _refused(self, sink: Sink, name: str | None) -> bool:
        """Count a malformed call, unless it is a JSON answer that only looks like one; return False."""
        if self.begin or (name and self._accepts(sink, name)):
            sink.refuse()
        return False

    def _accepts(self, sink: Sink, name: str) -> bool:
        """Return True if a call may have this name. Without a marker only a tool's name tells a call from an answer."""
        return name in sink.tools or (bool(self.begin) and bool(_NAME.fullmatch(name)))

    def _name(self, fields: dict[str, str]) -> str | None:
        return _text_of(fields[self.name_key]) if self.name_key in fields else None

    @property
    def _arguments_keys(self) -> tuple[str, ...]:
        return (self.arguments_key, "arguments", "parameters")


def _text_of(value: str) -> str | None:
    """Return the string of a JSON text, or None if it is something else."""
    try:
        parsed: Any = parse_json(value)
    except ValueError:
        return None
    return parsed if isinstance(parsed, str) and _is_unicode(parsed) else None


def _is_unicode(text: str) -> bool:
    """Return False for half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
