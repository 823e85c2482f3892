"""Bodies of Anthropic's Messages API become chats: the same prompt for each form of a text, and errors by place."""

import pickle
from typing import Any

import pytest

from replicas.errors import InvalidRequest
from serve_app.openai.request.parsing import convert_fields
from serve_app.openai.request.validation import RequestLimits
from serve_app.protocols.adapted_chat import AdaptedChat
from serve_app.protocols.messages.conversion import adapted_message, counted_message
from serve_app.protocols.messages.schema import MESSAGES_LEVEL

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"b": None, "a": [1]}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
HINT = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [USER], **fields}


def adapted(**fields: Any) -> AdaptedChat:
    return adapted_message(body(**fields))


def turns(**fields: Any) -> list[dict[str, Any]]:
    return [message.turn() for message in adapted(**fields).chat.messages]


def ignored(**fields: Any) -> tuple[str, ...]:
    return convert_fields(adapted_message, RequestLimits(), body(**fields), MESSAGES_LEVEL).ignored_fields


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        adapted(**fields)
    return caught.value


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def test_a_text_is_the_same_alone_and_in_blocks_wherever_cache_control_stands() -> None:
    def form(of: Any, hint: dict[str, Any]) -> dict[str, Any]:
        call = [{"role": "assistant", "content": [CALL | hint]}, {"role": "user", "content": [RESULT | hint]}]
        messages = [{"role": "user", "content": of("hi")}, {"role": "system", "content": of("be brief")}, *call]
        return {"system": of("you"), "messages": messages, "tools": [TOOL | hint], **hint}

    plain = form(lambda words: words, {})
    expected = adapted(**plain)
    for given in (form(lambda words: [text(words, **HINT)], HINT), form(lambda words: [text(words)], {})):
        assert turns(**given) == turns(**plain)
        assert adapted(**given).chat.tools == expected.chat.tools
        assert ignored(**given) == ()
    assert [turn["role"] for turn in turns(**plain)] == ["system", "user", "system", "assistant", "tool"]


def test_successive_blocks_and_messages_of_one_role_are_joined_by_lines() -> None:
    messages = [{"role": "user", "content": [text("a"), text("b")]}, {"role": "user", "content": "c"}]
    assert turns(messages=messages) == [{"role": "user", "content": "a\nb\nc"}]


def test_the_billing_header_of_a_conversation_is_dropped() -> None:
    header = text("x-anthropic-billing-header: cc_version=2.1; cch=1f2e")
    assert turns(system=[header, text("you")]) == turns(system="you")
    assert turns(system=[header]) == turns()
    assert turns(system=[text("you"), header])[0]["content"].startswith("you\nx-anthropic")


def test_results_come_before_the_text_of_their_turn_and_errors_are_marked() -> None:
    second = CALL | {"id": "toolu_2"}
    results = [text("go on"), RESULT | {"content": "boom", "is_error": True}, RESULT | {"tool_use_id": "toolu_2"}]
    messages = [
        USER,
        {"role": "assistant", "content": [text("so"), CALL, second]},
        {"role": "user", "content": results},
    ]
    _, calls, *rest = turns(messages=messages)
    assert calls["content"] == "so"
    assert [call["id"] for call in calls["tool_calls"]] == ["toolu_1", "toolu_2"]
    assert calls["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"b": null, "a": [1]}'}
    assert rest == [
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: boom"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": ""},
        {"role": "user", "content": "go on"},
    ]


def test_thinking_comes_back_whatever_its_signature() -> None:
    thoughts = [{"type": "thinking", "thinking": "hm", "signature": "EqQB"}, {"type": "redacted_thinking", "data": "x"}]
    messages = [USER, {"role": "assistant", "content": [*thoughts, text("yes")]}, USER]
    assert turns(messages=messages)[1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_a_last_turn_of_the_model_is_continued() -> None:
    assert adapted(messages=[USER, {"role": "assistant", "content": "{"}]).chat.continue_final_message
    assert not adapted().chat.continue_final_message


@pytest.mark.parametrize(
    ("thinking", "effort", "expected"),
    [
        (None, None, ("none", False)),
        (None, "max", ("none", False)),
        ({"type": "disabled"}, "high", ("none", False)),
        ({"type": "enabled", "budget_tokens": 2000}, None, ("high", True)),
        ({"type": "adaptive", "display": "omitted"}, "low", ("low", True)),
        ({"type": "adaptive"}, "max", ("xhigh", True)),
    ],
)
def test_thinking_and_effort_decide_the_reasoning(
    thinking: dict[str, Any] | None, effort: str | None, expected: tuple[str, bool]
) -> None:
    chat = adapted(thinking=thinking, output_config={"effort": effort}).chat
    assert (chat.reasoning_effort, chat.include_reasoning) == expected


def test_what_has_no_effect_is_named_also_where_unknown_fields_are_refused() -> None:
    given: dict[str, Any] = {
        "thinking": {"type": "enabled", "budget_tokens": 2000, "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "service_tier": "auto",
        "tools": [TOOL | {"input_examples": [{}]}],
    }
    named = {
        "thinking.budget_tokens",
        "thinking.display",
        "context_management",
        "service_tier",
        "tools.0.input_examples",
    }
    assert set(ignored(**given)) == named
    strict = RequestLimits(unknown_fields="refuse")
    del given["tools"]
    assert convert_fields(adapted_message, strict, body(**given), MESSAGES_LEVEL).ignored_fields == ()


def test_tools_that_clients_run_are_functions_and_servers_tools_are_left_out() -> None:
    tools = [
        TOOL,
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]
    result = adapted(tools=tools)
    names = [tool.function.name for tool in result.chat.tools]
    assert names == ["look", "bash", "str_replace_based_edit_tool", "memory"]
    assert all(tool.function.parameters for tool in result.chat.tools)
    assert result.ignored_tools == ("web_search_20250305", "computer_20250124", "mcp_toolset")
    error = refused(tools=tools, tool_choice={"type": "tool", "name": "web_search"})
    assert error.param == "tool_choice" and "web_search_20250305" in error.message


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "none"}, ("none", True)),
    ],
)
def test_a_choice_of_tools_is_that_of_chats(choice: dict[str, Any], expected: tuple[str, bool]) -> None:
    chat = adapted(tools=[TOOL], tool_choice=choice).chat
    assert (chat.tool_choice, chat.parallel_tool_calls) == expected


def test_the_other_fields_are_those_of_chats() -> None:
    schema = {"type": "object"}
    given = {"stop_sequences": ["."], "temperature": 0.5, "top_p": 0.9, "top_k": 3, "metadata": {"user_id": "u"}}
    chat = adapted(**given, stream=True, output_config={"format": {"type": "json_schema", "schema": schema}}).chat
    assert (chat.max_tokens, chat.stop, chat.temperature, chat.top_p, chat.top_k) == (9, ["."], 0.5, 0.9, 3)
    assert (chat.user, chat.stream, chat.has_constraint) == ("u", True, True)


def test_a_count_needs_no_max_tokens_and_has_the_prompt_of_the_message() -> None:
    fields = body(system="you", tools=[TOOL], thinking={"type": "adaptive"})
    counted = counted_message({name: value for name, value in fields.items() if name != "max_tokens"}).chat
    message = adapted_message(fields).chat
    assert (counted.messages[0], counted.tools) == (message.messages[0], message.tools)
    assert counted.reasoning_effort == message.reasoning_effort


def test_another_process_can_convert_a_body() -> None:
    chat = adapted(system="you", tools=[TOOL])
    assert pickle.loads(pickle.dumps(chat)).chat.tools == chat.chat.tools


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "missing"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"messages": []}, "messages", "0 items"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "user, assistant, system"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]",
         '"image"'),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]", '"document"'),
        ({"messages": [{"role": "user", "content": [text("x", citations=[{}])]}]}, "messages[0].content[0].citations",
         "not supported"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content", '"tool_use"'),
        ({"messages": [USER, {"role": "assistant", "content": [RESULT]}]}, "messages[1].content", '"tool_result"'),
        ({"messages": [{"role": "user", "content": [RESULT, RESULT | {"tool_use_id": "b"}]}]},
         "messages[0].content[0].tool_use_id", "`toolu_1`, `b`"),
        ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "messages[1]", "`toolu_1`"),
        ({"system": [{"type": "image"}]}, "system[0]", '"image"'),
        ({"tools": [{"name": "no name", "input_schema": {}}]}, "tools[0].name", "letters"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "missing"),
        ({"tools": [TOOL, TOOL]}, "tools", "two functions named look"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name", "none of"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "missing"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences", "at most 16"),
        ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id", "at most 512"),
        ({"temperature": 3}, "temperature", "at most 2"),
        ({"thread": {"type": "create"}}, "thread", "no conversation is stored"),
        ({"nonsense": 1}, "nonsense", "not supported"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_as_the_protocol_does(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert words in error.message
