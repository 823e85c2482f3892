"""Calls as messages of channels: the harmony format of gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.openai.tools.shapes.calls import Call, Sink, Tool
from serve_app.openai.tools.shapes.json_text import read_arguments
from serve_app.openai.tools.shapes.reader import Reader, Wait
from serve_app.openai.tools.shapes.shape import Lark

_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.\-]+)")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_BEGINS = ("<|start|>", "<|channel|>")


@dataclass(frozen=True, slots=True)
class ChannelCalls:
    """Shape of messages with a channel: `analysis` is reasoning, and a message to a function is a call."""

    begin: str = "<|channel|>"
    other_begins: Sequence[str] = ("<|start|>",)
    block_separator: str = "<|start|>assistant"

    @property
    def holds_several(self) -> bool:
        """False: a message is one call."""
        return False

    @property
    def openings(self) -> Sequence[str]:
        """Recipient of a call, which may stand before the message's first marker."""
        return ("to=functions.",)

    def read(self, reader: Reader, sink: Sink) -> Wait[bool]:
        """Read a message behind its marker."""
        header = yield from reader.read_until("<|message|>")
        if header is None:
            sink.refuse()
            return False
        recipient = _RECIPIENT.search(header)
        if recipient:
            return (yield from self._read_call(recipient[1], reader, sink))
        is_reasoning = header.rpartition("<|channel|>")[2].strip().startswith("analysis")
        yield from reader.skip_space()
        report = sink.add_reasoning if is_reasoning else sink.add_content
        marker = yield from reader.read_text((*_ENDS, *_BEGINS), report)
        if marker in _ENDS:
            yield from reader.accept_words(marker or "")
        reader.settle()
        return True

    def write(self, calls: Sequence[Call]) -> str:
        """Return the text of calls."""
        return self.block_separator.join(
            f"{self.begin}{self._head(call.name)}{call.arguments_json}<|call|>" for call in calls
        )

    def bind(self, lark: Lark, tools: Sequence[Tool], several: bool) -> str:
        """Return the Lark expression of a message to a function, behind its marker."""
        calls = [f"{lark.text(self._head(tool.name))} {lark.arguments(tool)}" for tool in tools]
        return f"{lark.any_of(calls)} ({lark.text('<|call|>')})?"

    def unenforced(self, tool: Tool) -> tuple[str, ...]:
        """Return nothing: the arguments are bound by their whole schema."""
        return ()

    def _head(self, name: str) -> str:
        return f"commentary to=functions.{name} <|constrain|>json<|message|>"

    def _read_call(self, name: str, reader: Reader, sink: Sink) -> Wait[bool]:
        if not sink.tools or (yield from reader.skip_space()) != "{":
            sink.refuse()
            return False
        sink.begin(name)
        if not (yield from read_arguments(reader, sink)):
            return False
        if not (yield from reader.accept_words("<|call|>")):
            reader.rewind()
        return True
