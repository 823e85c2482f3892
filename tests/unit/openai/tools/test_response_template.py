"""Families from transformers' response templates."""

from typing import Any

import pytest

from serve_app.openai.tools.families import ChatFamily
from serve_app.openai.tools.response_template import described_family
from serve_app.openai.tools.shapes.calls import Call
from tests.unit.openai.tools.cases import CALLS, parse

FUNCTION = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
KEYS = {"type": "function", "function": {"name": "{content.tool_name}", "arguments": "{content.parameters}"}}
ITEMS = {"type": "function", "function": {"name": "{tool}", "arguments": "{args}"}}


def template(**calls: Any) -> dict[str, Any]:
    reasoning = {"open": "<thought>", "close": "</thought>", "content": "text"}
    fields = {
        "reasoning_content": reasoning,
        "tool_calls": {"content": "json", **calls},
        "content": {"content": "text"},
    }
    return {"version": 1, "start_anchor": "<|assistant|>", "fields": fields}


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (
            {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "transform": FUNCTION},
            '<tool_call>{"name": "',
        ),
        ({"open": "<action>", "close": "</action>", "transform": KEYS}, '<action>{"tool_name": "'),
        ({"open_pattern": r"<fn=(?P<name>[^>\n]+)>\s*", "close": "</fn>", "transform": NAMED}, "<fn=get_weather>{"),
        ({"open": "[CALLS]", "transform": ITEMS, "transform_each": True}, '[CALLS][{"tool": "'),
        (
            {"open_pattern": r"call:(?P<name>\w+)\|", "close_pattern": r"\s*\|end\|", "transform": NAMED},
            "call:get_weather|{",
        ),
    ],
)
def test_a_response_template_gives_parser_and_reasoning(calls: dict[str, Any], text: str) -> None:
    family = described_family(template(**calls))
    assert family is not None
    written = f"<thought>\nHm.\n</thought>\n{family.calls.write(CALLS)}"
    assert text in written
    parsed = parse(family, list(written))
    assert parsed.reasoning == "Hm." and parsed.content == ""
    assert parsed.calls == [(call.name, call.arguments) for call in CALLS]


@pytest.mark.parametrize(
    "calls",
    [
        {"open": "<c>", "close": "</c>", "content": "xml-inline", "transform": FUNCTION},
        {"open": "<c>", "close": "</c>", "content_args": {"unquoted_keys": True}, "transform": FUNCTION},
        {"open": ["<c>", "<d>"], "close": "</c>", "transform": FUNCTION},
        {"open_pattern": "<c>|<d>", "close": "</c>", "transform": FUNCTION},
        {"open": "<c>", "close": "</c>"},
        {"open": "<c>", "close": "</c>", "transform": {"function": {"name": "f", "arguments": "{content}"}}},
        {"close": "</c>", "transform": FUNCTION},
    ],
)
def test_other_response_templates_describe_no_family(calls: dict[str, Any]) -> None:
    assert described_family(template(**calls)) is None
    assert described_family({}) is None and described_family({"fields": {"tool_calls": None}}) is None


def test_transformers_parses_what_the_family_writes() -> None:
    """The description is transformers' own, so its parser must agree."""
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    spec = template(open_pattern=r"\s*<tool_call>", close="</tool_call>", repeats=True, transform=FUNCTION)
    family: ChatFamily | None = described_family(spec)
    assert family is not None
    call = Call("get_weather", {"city": "Zürich"})
    message = chat_parsing.parse_response(family.calls.write([call, call]), spec, prefix="<|assistant|>")
    assert [each["function"] for each in message["tool_calls"]] == [
        {"name": call.name, "arguments": call.arguments}
    ] * 2
