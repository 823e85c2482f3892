"""The grammar of a chat binds calls and answers as `tool_choice`, `response_format` and the family's reasoning ask."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from replicas.errors import InvalidRequest
from replicas.text.grammar import GrammarCompiler
from serve_app.openai.request.schema import ChatBody
from serve_app.openai.structured.chat_grammar import ChatDialect, chat_grammar, grammar_key
from serve_app.openai.structured.output_grammar import OutputGrammar
from serve_app.openai.tools.families import THINK, family_named
from serve_app.openai.tools.shapes.shape import marker_of
from tests.unit.text.test_grammar import DEMO, ids, request

COMPILER = GrammarCompiler(DEMO)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
OTHER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
SETS = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
ANSWER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
PROMPT = "<|im_start|>assistant\n"


def tool(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def made(*, reasons: bool = False, prompt: str = PROMPT, family: str = "hermes", **fields: Any) -> OutputGrammar | None:
    dialect = ChatDialect(replace(family_named(family), reasoning=THINK if reasons else None), marker_of({}))
    body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    return chat_grammar(body, dialect, prompt)


def is_whole(grammar: OutputGrammar | None, text: str) -> bool:
    """Return True if the text is a whole output."""
    assert grammar is not None
    constraint = COMPILER.constraint_of(request(grammar.grammar))
    try:
        constraint.accept_all(ids(text))
        if not constraint.is_complete:
            assert DEMO.eos_token_id is not None
            constraint.accept(DEMO.eos_token_id)
    except ValueError:
        return False
    return True


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


TOOLS = [tool("weather", CITY), tool("other", OTHER)]
GOOD, SECOND = call("weather", city="Zürich"), call("other", x=1)
BAD = call("weather", town="Zürich")


@pytest.mark.parametrize(("fields", "whole", "not_whole"), [
    ({"tools": TOOLS}, ["text", GOOD, f"text {SECOND}", f"{GOOD}\n{SECOND}"], [BAD, f"text {BAD}"]),
    ({"tools": TOOLS, "parallel_tool_calls": False}, ["text", GOOD], [f"{GOOD}\n{SECOND}", BAD]),
    ({"tools": TOOLS, "tool_choice": "required"}, [GOOD, f"{GOOD}\n{SECOND}"], ["text", f"text {GOOD}", BAD, ""]),
    ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, [GOOD, SECOND], [f"{GOOD}\n{SECOND}"]),
    ({"tools": TOOLS, "tool_choice": NAMED}, [GOOD], [SECOND, "text", f"{GOOD}\n{GOOD}"]),
    ({"tools": TOOLS, "response_format": ANSWER}, ['"yes"', GOOD], ["text", BAD, f'"yes" {GOOD}']),
    ({"tools": TOOLS, "response_format": ANSWER, "tool_choice": "required"}, [GOOD], ['"yes"']),
    ({"tools": TOOLS, "response_format": ANSWER, "tool_choice": "none"}, ['"yes"'], [GOOD, "text"]),
    ({"response_format": ANSWER}, ['"yes"'], ["text", GOOD]),
    ({"structured_outputs": {"choice": ["a", "b"]}}, ["a"], ["c", "ab"]),
])  # fmt: skip
def test_calls_and_answers_are_bound(fields: dict[str, Any], whole: list[str], not_whole: list[str]) -> None:
    grammar = made(**fields)
    assert [text for text in whole if not is_whole(grammar, text)] == []
    assert [text for text in not_whole if is_whole(grammar, text)] == []


def test_chats_with_other_grammars_have_other_keys() -> None:
    both = [tool("weather", CITY), tool("other", OTHER)]
    cases: list[dict[str, Any]] = [
        {}, {"tools": both}, {"tools": both[:1]}, {"tools": both[::-1]}, {"tools": [tool("weather", OTHER)]},
        {"tools": [tool("weather", CITY, strict=True)]}, {"tools": both, "tool_choice": "required"},
        {"tools": both, "tool_choice": NAMED}, {"tools": both, "parallel_tool_calls": False},
        {"tools": both, "response_format": ANSWER}, {"response_format": ANSWER}, {"structured_outputs": {"regex": "a"}},
        {"prompt": f"{PROMPT}<think>", "reasons": True}, {"reasons": True},
    ]  # fmt: skip
    keys = []
    for case in cases:
        fields = {name: value for name, value in case.items() if name not in ("prompt", "reasons")}
        body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "y"}], **fields})
        family = replace(family_named("hermes"), reasoning=THINK if case.get("reasons") else None)
        keys.append(grammar_key(body, ChatDialect(family, marker_of({})), case.get("prompt", PROMPT)))
    assert len(set(keys)) == len(cases)
    assert keys[1] == grammar_key(
        ChatBody.model_validate(
            {"model": "n", "messages": [{"role": "user", "content": "z"}], "tools": both, "seed": 1}
        ),
        ChatDialect(replace(family_named("hermes"), reasoning=None), marker_of({})),
        f"other {PROMPT}",
    )


def test_a_chat_without_tools_and_format_is_free() -> None:
    assert made() is None and made(response_format={"type": "text"}) is None
    assert made(tools=TOOLS, tool_choice="none") is None


def test_reasoning_before_an_answer_is_free() -> None:
    thought = "<think>\nany {[ text\n</think>\n\n"
    grammar = made(reasons=True, response_format=ANSWER)
    assert is_whole(grammar, f'{thought}"no"') and is_whole(grammar, '"no"')
    assert not is_whole(grammar, f"{thought}text") and not is_whole(grammar, "text")
    opened = made(reasons=True, prompt=f"{PROMPT}<think>\n", response_format=ANSWER)
    assert is_whole(opened, thought.removeprefix("<think>\n") + '"no"') and not is_whole(opened, '"no"')
    ended = made(reasons=True, prompt=f"{PROMPT}<think>\n\n</think>\n\n", tools=TOOLS, tool_choice="required")
    assert is_whole(ended, GOOD) and not is_whole(ended, thought + GOOD)


def test_keywords_of_tools_not_enforced_are_named_by_place() -> None:
    grammar = made(tools=[TOOLS[0], tool("sets", SETS)])
    assert grammar is not None
    assert grammar.not_enforced == ("/tools/1/function/parameters/properties/x/uniqueItems",)
    unused = made(tools=[TOOLS[0], tool("sets", SETS)], tool_choice=NAMED)
    assert unused is not None and unused.not_enforced == (), "the other tool is not bound"


TEXTS = {
    "type": "object",
    "properties": {"a/b": {"type": "string", "minLength": 3}, "c": {"minimum": 2}, "d": {"type": "integer"}},
}


def test_keywords_that_a_familys_calls_do_not_enforce_are_named_by_their_place() -> None:
    grammar = made(family="qwen3_coder", tools=[tool("texts", TEXTS)])
    place = "/tools/0/function/parameters/properties"
    assert grammar is not None and grammar.not_enforced == (f"{place}/a~1b/minLength", f"{place}/c/minimum")
    with pytest.raises(InvalidRequest) as caught:
        made(family="qwen3_coder", tools=[tool("texts", TEXTS, strict=True)])
    assert caught.value.param == "tools[0].function.parameters"
    assert "`/properties/a~1b/minLength`" in str(caught.value) and caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(("parameters", "fields"), [(SETS, {"strict": True}), ({"type": "text"}, {})])
def test_tools_that_cannot_be_bound_are_refused_by_name(parameters: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(tools=[TOOLS[0], tool("sets", parameters, **fields)])
    assert caught.value.param == "tools[1].function.parameters"
