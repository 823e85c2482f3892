"""Tools, calls and outputs on which the parser, the grammar and the prompts are tested."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from serve_app.openai.tools.families import FAMILIES, THINK, ChatFamily
from serve_app.openai.tools.parser import OutputParser
from serve_app.openai.tools.shapes.calls import Call, CallArguments, CallBegin, Content, Event, Reasoning, Tool

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    Tool(
        "add",
        {
            "type": "object",
            "properties": {
                "xs": {"type": "array", "items": {"type": ["number", "null", "boolean"]}},
                "note": {"$ref": "#/$defs/note"},
            },
            "required": ["xs"],
            "$defs": {"note": {"type": "object"}},
        },
    ),
    Tool("now"),
)
HARD_TEXT = 'Zürich "x" \'y\' \\ 東京 😀 {[(\n</tool_call> <tool_call>{"name": "add"} [TOOL_CALLS] <think> \t`$'
CALLS = (
    Call("get_weather", {"city": HARD_TEXT, "days": -3}, "abcdef123"),
    Call("add", {"xs": [1, 2.5, None, True], "note": {"k": {"deep": [{"a": "}"}]}}}, "abcdef124"),
)
REASONED = tuple(family if family.reasoning else replace(family, reasoning=THINK) for family in FAMILIES)
"""All families, each with reasoning."""


@dataclass
class Parsed:
    """Events of one output, their pieces joined."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    """Kinds of the events in order, each run once."""
    num_malformed: int = 0

    @property
    def calls(self) -> list[tuple[str, object]]:
        return [(name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)]

    def add(self, event: Event) -> None:
        kind = type(event).__name__
        if kind == "CallBegin" or self.kinds[-1:] != [kind]:
            self.kinds.append(kind)
        match event:
            case Content(text):
                assert text
                self.content += text
            case Reasoning(text):
                assert text
                self.reasoning += text
            case CallBegin(index, call_id, name):
                assert index == len(self.names)
                self.names.append(name)
                self.ids.append(call_id)
                self.arguments.append("")
            case CallArguments(index, text):
                assert index == len(self.names) - 1 and text
                self.arguments[index] += text


def parse(
    family: ChatFamily,
    pieces: Iterable[str],
    *,
    tools: Sequence[Tool] = TOOLS,
    in_reasoning: bool = False,
    whole_calls: bool = False,
) -> Parsed:
    """Parse an output that arrives in pieces."""
    parser = OutputParser(family, tools, random.Random(7), in_reasoning, whole_calls)
    parsed = Parsed()
    for events in (*map(parser.push, pieces), parser.finish()):
        for event in events:
            parsed.add(event)
    parsed.num_malformed = parser.num_malformed
    assert parser.num_calls == len(parsed.names)
    return parsed


def answer_text(family: ChatFamily, text: str) -> str:
    """Return an answer as the family's models write it."""
    begin = family.reasoning.answer_begin if family.reasoning else ""
    if family.name == "command_r":
        return f"<|START_RESPONSE|>{text}<|END_RESPONSE|>"
    return begin + text


def reasoning_text(family: ChatFamily, text: str, is_open: bool = False) -> str:
    """Return reasoning with its markers; without the first marker if the prompt has opened it."""
    reasoning = family.reasoning
    assert reasoning
    return f"{'' if is_open else reasoning.begin}\n{text}\n{reasoning.end}{reasoning.turn_begin}\n\n"


def can_call_in_parallel(family: ChatFamily) -> bool:
    return family.calls.holds_several or family.calls.block_separator is not None
