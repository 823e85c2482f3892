"""Calls as a name and a JSON object of arguments behind it: Mistral, DeepSeek, Kimi, Functionary and others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.openai.tools.shapes.calls import Call, Sink, Tool
from serve_app.openai.tools.shapes.json_text import read_arguments
from serve_app.openai.tools.shapes.reader import Reader, Wait
from serve_app.openai.tools.shapes.shape import Lark, joined_blocks


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """Shape of calls whose name stands outside their JSON."""

    begin: str
    end: str = ""
    call_begin: str = ""
    """Text before a call's name; empty if a block is one call whose name follows `begin`."""
    name_end: str = ""
    """Text between the name, or the call's id, and the arguments."""
    call_end: str = ""
    separator: str | None = None
    """Text between two calls of a block; None if a block holds one."""
    block_separator: str | None = None
    id_marker: str | None = None
    """Marker before a call's id, between the name and `name_end`; a model may leave both out."""
    is_numbered: bool = False
    """True if `:` and the call's number follow the name, and `functions.name:number` is the call's id."""
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
        if not (yield from reader.accept_words(self.call_begin)):
            sink.refuse()
            return False
        while (yield from self._read_call(reader, sink)):
            if not (self.holds_several and (yield from reader.accept_words(self.call_begin))):
                reader.rewind()
                if not (self.end and (yield from reader.accept_words(self.end))):
                    reader.rewind()
                return True
        return False

    def write(self, calls: Sequence[Call]) -> str:
        """Return the text of calls."""
        texts = [
            self.call_begin + call.name + self._id(index, call) + self.name_end + call.arguments_json + self.call_end
            for index, call in enumerate(calls)
        ]
        return joined_blocks(texts, self.begin, self.end, self.separator, self.block_separator)

    def bind(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        """Return the Lark expression of a block behind its marker."""
        call = lark.any_of([self._bound(lark, tool) for tool in tools])
        return f"{lark.series(call, self.separator if several else None)} {lark.text(self.end)}"

    def unenforced(self, tool: Tool) -> tuple[str, ...]:
        """Return nothing: the arguments are bound by their whole schema."""
        return ()

    def _bound(self, lark: Lark, tool: Tool) -> str:
        number = '":" /[0-9]{1,3}/' if self.is_numbered else ""
        call_id = f"({lark.text(self.id_marker)} /[a-zA-Z0-9]{{9}}/)?" if self.id_marker else ""
        head = f"{lark.text(self.call_begin + tool.name)} {number} {call_id} {lark.text(self.name_end)}"
        return f"{head} {lark.arguments(tool)} {lark.text(self.call_end)}"

    def _id(self, index: int, call: Call) -> str:
        if self.is_numbered:
            return f":{index}"
        return f"{self.id_marker}{call.id}" if self.id_marker and call.id else ""

    def _read_call(self, reader: Reader, sink: Sink) -> Wait[bool]:
        """Read a call from its name on; return True if it was a call, which is settled."""
        yield from reader.skip_space()
        name = yield from reader.read_name()
        call_id = yield from self._read_id(reader, name)
        is_named = (yield from reader.skip_space()) == "{" or (yield from reader.accept_words(self.name_end))
        if not name or not is_named or (yield from reader.skip_space()) != "{":
            sink.refuse()
            return False
        sink.begin(name, call_id)
        if not (yield from read_arguments(reader, sink)):
            return False
        if self.call_end and (yield from reader.accept_words(self.call_end)):
            reader.settle()
        reader.rewind()
        return True

    def _read_id(self, reader: Reader, name: str) -> Wait[str | None]:
        if self.is_numbered and (yield from reader.accept((":",))):
            number = yield from reader.read_name()
            return f"functions.{name}:{number}"
        if self.id_marker and (yield from reader.accept((self.id_marker,))):
            return (yield from reader.read_name()) or None
        return None
