"""Fields that have no effect: unknown ones are left out of a body, and all are noted with their places."""

from typing import Any

import pytest

from serve_app.openai.request.unknown_fields import IgnoredFields


def known_and_ignored(fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    ignored = IgnoredFields()
    return ignored.known_fields(fields), ignored.names


def test_unknown_fields_are_left_out_at_every_level() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "x": 1}, "extra_content": {}}
    fields = {
        "max_token": 5,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": None, "id": "msg_1", "tool_calls": [call]},
        ],
        "tools": [
            {"type": "function", "cache_control": 1, "function": {"name": "f", "parameters": {"x": None}, "y": 2}}
        ],
    }
    known, ignored = known_and_ignored(fields)
    assert known == {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": None}}}],
    }
    assert ignored == [
        "max_token",
        "messages.0.content.0.cache_control",
        "messages.1.id",
        "messages.1.tool_calls.0.function.x",
        "messages.1.tool_calls.0.extra_content",
        "tools.0.cache_control",
        "tools.0.function.y",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}]},
        {"guided_json": {}},
        {"regex": "a"},
        {"stream_options": {"x": 1}},
        {"response_format": {"type": "json_object", "schema": {}}},
        {"messages": "text"},
        {"messages": ["text", {"role": "user", "content": "a", "audio": {"id": "a"}}]},
        {"prompts": [{"x": 1}]},
    ],
)
def test_fields_that_could_change_the_answer_stay_for_the_schema(fields: dict[str, Any]) -> None:
    assert known_and_ignored(fields) == (fields, [])


def test_a_served_value_that_has_no_effect_is_noted_unless_it_asks_for_nothing() -> None:
    fields = {"modalities": ["text"], "store": True, "functions": [], "echo": False}
    assert known_and_ignored(fields) == (fields, ["modalities", "store"])
    assert known_and_ignored({"modalities": ["text", "audio"], "nothing": None, "zero": 0})[1] == ["zero"]


def test_names_are_safe_in_a_header_and_bounded() -> None:
    _, ignored = known_and_ignored({"a\r\nset-cookie: x, é": 1, "x" * 5000: 1})
    assert ignored == ["a%0D%0Aset-cookie%3A%20x%2C%20%C3%A9", "x" * 64]
    _, ignored = known_and_ignored({f"field_{number}": 1 for number in range(10_000)})
    assert ignored[:2] == ["field_0", "field_1"] and ignored[-1] == "..." and ignored.count("...") == 1
    assert 900 < len(", ".join(ignored)) <= 1024
    _, ignored = known_and_ignored({"\U0001f600" * 64 + str(number): 1 for number in range(9)})
    assert ignored[-1] == "..." and len(", ".join(ignored)) <= 1024
