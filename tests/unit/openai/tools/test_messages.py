"""Conversations with calls and results, as templates get them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from replicas.errors import InvalidRequest
from serve_app.openai.tools.detection import detect, probed
from serve_app.openai.tools.families import FAMILIES, ChatFamily, ToolList, family_named
from serve_app.openai.tools.messages import prompt_messages
from tests.unit.openai.tools.cases import CALLS, can_call_in_parallel, parse
from tests.unit.openai.tools.rendering import TOOL_OBJECTS, renderer

HERMES = family_named("hermes")
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
GENERIC = probed(detect(PLAIN), renderer(PLAIN))
USER = {"role": "user", "content": "hi"}


def call(arguments: str, call_id: str = "call_1", name: str = "get_weather") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def history(*calls: dict[str, Any], content: str | None = None) -> list[dict[str, Any]]:
    results = [{"role": "tool", "tool_call_id": each["id"], "content": "sunny"} for each in calls]
    return [USER, {"role": "assistant", "content": content, "tool_calls": list(calls)}, *results]


def test_arguments_become_an_object_and_results_get_a_name() -> None:
    messages = history(call('{"city": "Zürich \\"x\\""}'), call("", "call_2", "now"))
    before = json.dumps(messages)
    user, assistant, first, second = prompt_messages(HERMES, messages)
    assert user == USER
    assert assistant["content"] == ""
    assert [each["function"]["arguments"] for each in assistant["tool_calls"]] == [{"city": 'Zürich "x"'}, {}]
    assert [each["id"] for each in assistant["tool_calls"]] == ["call_1", "call_2"]
    assert (first["name"], first["tool_call_id"], second["name"]) == ("get_weather", "call_1", "now")
    assert json.dumps(messages) == before


def test_a_template_may_want_arguments_as_text_and_no_content() -> None:
    family = replace(HERMES, takes_text_arguments=True, takes_null_content=True)
    assistant = prompt_messages(family, history(call('{"city":"Zürich"}')))[1]
    assert assistant["tool_calls"][0]["function"]["arguments"] == '{"city": "Zürich"}'
    assert assistant["content"] is None
    assert prompt_messages(family, history(call("{}"), content="Hm."))[1]["content"] == "Hm."


@pytest.mark.parametrize("arguments", ["[1]", "{", "null", '"x"', '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_no_object_are_refused_by_their_place(arguments: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        prompt_messages(HERMES, history(call("{}"), call(arguments, "call_2")))
    assert raised.value.param == "messages[1].tool_calls[1].function.arguments"
    assert "must be the text of a JSON object, and is " in str(raised.value) and len(str(raised.value)) < 250


def test_mistrals_ids_get_the_length_that_its_templates_want() -> None:
    family = family_named("mistral")
    _, assistant, result = prompt_messages(family, history(call("{}", "call_abcdefghijkl")))
    (made,) = assistant["tool_calls"]
    assert len(made["id"]) == 9 and made["id"].isalnum() and result["tool_call_id"] == made["id"]
    assert prompt_messages(family, history(call("{}", "abcdef123")))[1]["tool_calls"][0]["id"] == "abcdef123"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_calls_that_a_template_leaves_out_become_text(family: ChatFamily) -> None:
    adapted = replace(family, renders_calls=False)
    calls = CALLS if can_call_in_parallel(family) else CALLS[:1]
    made = [call(each.arguments_json, each.id, each.name) for each in calls]
    assistant = prompt_messages(adapted, history(*made))[1]
    assert "tool_calls" not in assistant
    assert parse(family, [assistant["content"]]).calls == [(each.name, each.arguments) for each in calls]


def test_a_template_without_tools_gets_them_as_text() -> None:
    assert GENERIC.tool_list is ToolList.SYSTEM_TEXT
    messages = history(call('{"city": "Oslo"}'), call("{}", "call_2", "now"), content="Let me see.")
    system, user, assistant, results = prompt_messages(GENERIC, messages, TOOL_OBJECTS)
    assert system["role"] == "system" and '"name": "get_weather"' in system["content"]
    assert '<tool_call>\n{"name": "function_name", "arguments": {"argument": "value"}}' in system["content"]
    assert user == USER
    assert assistant["content"].startswith('Let me see.\n<tool_call>\n{"name": "get_weather"')
    assert results == {
        "role": "user",
        "content": "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nsunny\n</tool_response>",
    }


def test_tools_follow_the_clients_own_system_message() -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    system, user = prompt_messages(GENERIC, messages, TOOL_OBJECTS)
    assert system["content"].startswith("Be brief.\n\n# Tools") and user == USER
    assert prompt_messages(GENERIC, messages) == messages
    assert prompt_messages(HERMES, messages, TOOL_OBJECTS) == messages


def test_smollm2_is_asked_in_its_own_words() -> None:
    template = f"You are a helpful AI assistant named SmolLM, trained by Hugging Face {PLAIN}"
    family = probed(detect(template), renderer(template))
    assert family.name == "smollm2"
    system = prompt_messages(family, [USER], TOOL_OBJECTS)[0]["content"]
    assert (
        "You are an expert in composing functions." in system and f"<tools>{json.dumps(TOOL_OBJECTS)}</tools>" in system
    )
    assert '<tool_call>[\n{"name": "func_name1", "arguments": {"argument1"' in system


def test_phi4_mini_gets_its_tools_in_a_field_of_the_system_message() -> None:
    system, user = prompt_messages(family_named("phi4_mini"), [USER], TOOL_OBJECTS)
    assert json.loads(system["tools"]) == TOOL_OBJECTS and user == USER
