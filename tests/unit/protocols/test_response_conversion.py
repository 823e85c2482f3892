"""Requests of responses as chats: items become messages, tools functions, and grammars are enforced."""

import json
import pickle
import random
from itertools import pairwise
from typing import Any

import pytest

from replicas.errors import InvalidRequest
from replicas.text.grammar import GrammarCompiler, json_schema_grammar
from serve_app.openai.request.parsing import Converted, convert_fields
from serve_app.openai.request.validation import RequestLimits
from serve_app.openai.structured.json_schema import enforceable_schema
from serve_app.protocols.adapted_chat import AdaptedChat, renamed
from serve_app.protocols.responses.conversion import adapted_response
from serve_app.protocols.responses.custom_input import InputReader, input_arguments, input_schema
from serve_app.protocols.responses.schema import RESPONSES_LEVEL, CustomTool
from serve_app.protocols.responses.toolset import MAX_NAME_CHARS, function_name

USER = {"role": "user", "content": "hello"}
FUNCTION = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "1"}
PATCH = """
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Update File: " NAME LF change+ -> update
    | "*** Delete File: " NAME LF
change: ("+" | "-" | " ") /(.*)/ LF
NAME: /[a-z.]+/
%import common.LF
"""
SELECTION = 'start: "SELECT"i NAME ("," NAME)~0..2 [";"]\nNAME: "a".."f"+\n%ignore /[ \\n]+/\n'

LONG = "\n".join(["start: a", *(f"{rule}: {' '.join([inner] * 9)}" for rule, inner in pairwise("abcdefg")), 'g: "x"'])
"""Grammar that is short, and whose regular expression is not."""


def converted(**fields: Any) -> Converted[AdaptedChat]:
    return convert_fields(
        adapted_response, RequestLimits(), {"model": "m", "input": "hello", **fields}, RESPONSES_LEVEL
    )


def turns(*items: Any) -> list[dict[str, Any]]:
    return [message.turn() for message in converted(input=list(items)).value.chat.messages]


def test_an_answers_items_are_one_message() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
    text = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "hm", "annotations": []}],
    }
    custom = {"type": "custom_tool_call", "call_id": "c2", "name": "run", "input": 'a "b"\n'}
    custom_output = {
        "type": "custom_tool_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "2"}],
    }
    user, answer, *results = turns(USER, reasoning, text, CALL, custom, OUTPUT, custom_output)
    assert (user["role"], answer["role"], answer["content"], answer["reasoning_content"]) == (
        "user",
        "assistant",
        "hm",
        "so",
    )
    functions = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in answer["tool_calls"]]
    assert functions == [("c1", "f", "{}"), ("c2", "run", json.dumps({"input": 'a "b"\n'}))]
    assert [(result["tool_call_id"], result["content"]) for result in results] == [("c1", "1"), ("c2", "2")]


def test_what_does_not_follow_begins_another_message() -> None:
    text = {"role": "assistant", "content": "hm"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}
    assert [turn["role"] for turn in turns(text, text, CALL, text)] == ["assistant"] * 3
    assert turns(CALL, thought)[1] == {"role": "assistant", "reasoning_content": "so", "content": ""}
    assert [turn["content"] for turn in turns(USER, USER)] == ["hello", "hello"]


def test_an_output_without_a_call_is_of_the_user() -> None:
    told = {"type": "function_call_output", "name": "goal", "namespace": "agent", "output": "win"}
    assert turns(USER, told)[1] == {"role": "user", "content": "agent.goal: win"}


def test_the_form_of_a_text_changes_no_message() -> None:
    parts = {"type": "message", "id": "m", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    assert turns(parts) == turns(USER) == [message.turn() for message in converted().value.chat.messages]


def test_namespaces_are_unfolded() -> None:
    long = {"type": "namespace", "name": "n" * 40, "description": "All.", "tools": [{**FUNCTION, "name": "f" * 40}]}
    chat = converted(tools=[FUNCTION, {**long, "name": "n"}, long]).value.chat
    names = [tool.function.name for tool in chat.tools]
    assert names[:2] == ["f", f"n.{'f' * 40}"] and len(names[2]) == MAX_NAME_CHARS
    assert names[2] == function_name("f" * 40, "n" * 40) != function_name("f" * 40, "n" * 41)
    assert chat.tools[1].function.description == "All."
    call = {**CALL, "name": "f" * 40, "namespace": "n" * 40}
    assert turns(call, OUTPUT)[0]["tool_calls"][0]["function"]["name"] == names[2]


@pytest.mark.parametrize(
    ("choice", "names", "mode"),
    [
        ("auto", ["f", "n.g", "run"], "auto"),
        ({"type": "function", "name": "g", "namespace": "n"}, ["f", "n.g", "run"], "n.g"),
        ({"type": "function", "name": "g"}, ["f", "n.g", "run"], "n.g"),
        ({"type": "custom", "name": "run"}, ["f", "n.g", "run"], "run"),
        ({"type": "allowed_tools", "mode": "required", "tools": [FUNCTION]}, ["f"], "required"),
        ({"type": "allowed_tools", "tools": [{"type": "web_search"}]}, [], None),
    ],
)
def test_choices_of_tools(choice: Any, names: list[str], mode: str | None) -> None:
    namespace = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]}
    tools = [FUNCTION, namespace, {"type": "custom", "name": "run"}, {"type": "web_search"}]
    adapted = converted(tools=tools, tool_choice=choice).value
    assert [tool.function.name for tool in adapted.chat.tools] == names and adapted.ignored_tools == ("web_search",)
    given = adapted.chat.tool_choice
    assert (given if given is None or isinstance(given, str) else given.function.name) == mode


def test_what_has_no_effect_is_named_and_a_chat_can_be_pickled() -> None:
    result = converted(
        client_metadata={"a": "b"}, text={"verbosity": "low"}, store=True, background=False,
        include=["web_search_call.results"], reasoning={"effort": "max", "context": "auto"}, max_tool_calls=3,
    )  # fmt: skip
    assert set(result.ignored_fields) == {
        "client_metadata",
        "text.verbosity",
        "reasoning.context",
    }
    assert pickle.loads(pickle.dumps(result.value)).chat.reasoning_effort == "xhigh"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"background": True}, "background"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"input": [USER, {"type": "compaction", "encrypted_content": "x"}]}, "input[1]"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [USER, {"role": "user", "content": [{"type": "input_image"}]}]}, "input[1].content"),
        ({"input": [OUTPUT]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "image_generation"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}},
         "tool_choice.tools[0].name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        converted(**fields)
    assert (caught.value.param == param and f"`{param}`" in caught.value.message) or "tools" in param


def test_an_error_is_renamed_by_the_longest_begin_of_its_path() -> None:
    names = {"messages": "input", "messages[1]": "input[2]", "messages[1].tool_calls[0].function": "input[3]"}
    for before, behind in (
        ("messages[1].tool_calls[0].function.arguments", "input[3].arguments"),
        ("messages[1].content", "input[2].content"), ("messages[10].content", "input[10].content"),
        ("messages", "input"), ("n", "n"),
    ):  # fmt: skip
        error = renamed(InvalidRequest(f"your {before} is bad", before), names)
        assert (error.param, error.message) == (behind, f"your {behind} is bad")


def test_the_messages_to_drop_leave_no_output_without_its_call() -> None:
    second = {**CALL, "call_id": "c2"}
    rules = {"role": "developer", "content": "French."}
    answer, ask = {"role": "assistant", "content": "ja"}, {"role": "user", "content": "do it"}
    items = [rules, answer, USER, CALL, answer, rules, USER, OUTPUT, ask, second, {**OUTPUT, "call_id": "c2"}, answer]
    units = converted(input=items, truncation="auto", instructions="Brief.").value.droppable
    # The output of the first call comes late, behind another message of the user.
    assert units == ((2,), (3, 4, 5, 8), (7,), (10, 11), (12,))
    assert converted(input=items).value.droppable == ()
    assert converted(truncation="auto").value.droppable == ()


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


@pytest.mark.parametrize(
    ("syntax", "definition", "valid", "invalid"),
    [
        ("regex", r"[a-z]+\d{3}", "abc123", "abc12"),
        (
            "lark",
            PATCH,
            '*** Begin Patch\n*** Update File: a.py\n-x "q"\n+é \\ 👋\n*** End Patch\n',
            "*** Begin Patch\n",
        ),
        ("lark", PATCH, "*** Begin Patch\n*** Delete File: a\n*** End Patch", "*** Begin Patch\n*** Delete File: A\n"),
        ("lark", SELECTION, "select ab , c;", "select ab c"),
    ],
)
def test_the_grammar_of_a_custom_tool_is_enforced(
    compiler: GrammarCompiler, tokenizer: Any, syntax: str, definition: str, valid: str, invalid: str
) -> None:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    schema = input_schema(CustomTool.model_validate({"type": "custom", "name": "c", "format": form}), "p")
    grammar = json_schema_grammar(enforceable_schema(schema, "p", is_strict=True).schema)
    compiler.check(grammar, "p")
    for text, is_valid in ((valid, True), (invalid, False)):
        constraint = compiler._constraint(grammar)
        try:
            constraint.accept_all(tokenizer.encode(input_arguments(text)))
        except ValueError:
            assert not is_valid
        else:
            assert constraint.is_complete and is_valid


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ('start: a\na: "(" a ")" | "x"', "refers to itself"),
        ("start: (", "Unclosed"),
        ('begin: "x"', "no rule `start`"),
        ("start: X", "X"),
        (LONG, "more than"),
        ("%import .secret.X\nstart: X", "imports another grammar"),
        ("%import common.X.Y\nstart: Y", "cannot be enforced"),
        (f"start: {'a ' * 5000}", "at most 8192"),
    ],
)  # fmt: skip
def test_a_grammar_that_is_no_regular_expression_is_refused(definition: str, reason: str) -> None:
    tool = {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": definition}}
    with pytest.raises(InvalidRequest, match=reason) as caught:
        converted(tools=[tool])
    assert caught.value.param == "tools[0].format.definition"


def test_an_input_is_read_however_its_arguments_are_split() -> None:
    rng = random.Random(5)
    for _ in range(1000):
        text = "".join(rng.choices(["a", '"', "\\", "\n", "é", "👋", "/", "u0041"], k=rng.randint(0, 12)))
        arguments = json.dumps({"input": text}, ensure_ascii=rng.random() < 0.5)
        reader, read, at = InputReader(), "", 0
        while at < len(arguments):
            size = rng.randint(1, 5)
            read, at = read + reader.add(arguments[at : at + size]), at + size
        assert (read, reader.has_ended, reader.finish()) == (text, True, "")
    other = InputReader()
    assert (other.add('{"code": "x"}'), other.finish()) == ("", '{"code": "x"}')
