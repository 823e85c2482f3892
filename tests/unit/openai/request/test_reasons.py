"""Reasons of refusals: each of pydantic's errors has a sentence of Headway's, with plain values."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from replicas.errors import InvalidRequest
from serve_app.openai.request import job_schema
from serve_app.openai.request import schema as body_schema
from serve_app.openai.request.parsing import REASONS, parse_body

BODIES = [
    kind
    for module in (body_schema, job_schema)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not BaseModel
]
ERRORS_OF_SCHEMA = {
    "bool": {"bool_type", "bool_parsing"},
    "dict": {"dict_type"},
    "float": {"float_type", "float_parsing", "finite_number"},
    "int": {"int_type", "int_parsing", "int_from_float", "int_parsing_size"},
    "list": {"list_type"},
    "literal": {"literal_error"},
    "model": {"model_type"},
    "str": {"string_type"},
}
NO_ERRORS = {
    "any", "call", "custom-error", "default", "definitions", "definition-ref", "function-after", "function-before",
    "function-plain", "model-field", "model-fields", "no-info", "nullable", "tagged-union", "with-info",
}  # fmt: skip
"""Schemas that pass on the errors of inner schemas, or have only Headway's errors."""
ERROR_OF_LIMIT = {
    "ge": "greater_than_equal",
    "gt": "greater_than",
    "le": "less_than_equal",
    "lt": "less_than",
    "multiple_of": "multiple_of",
    "pattern": "string_pattern_mismatch",
}
ERROR_OF_LENGTH = {
    ("str", "min_length"): "string_too_short",
    ("str", "max_length"): "string_too_long",
    ("list", "min_length"): "too_short",
    ("list", "max_length"): "too_long",
    ("dict", "min_length"): "too_short",
    ("dict", "max_length"): "too_long",
}


def errors_of(node: Any) -> Iterator[str]:
    """Yield the error types that a core schema and those within it can have."""
    if isinstance(node, list | tuple):
        for item in node:
            yield from errors_of(item)
    elif isinstance(node, dict):
        kind = node.get("type")
        if isinstance(kind, str):
            yield from () if kind in NO_ERRORS else ERRORS_OF_SCHEMA[kind]
            yield from (ERROR_OF_LIMIT[limit] for limit in ERROR_OF_LIMIT if limit in node)
            yield from (error for (of, limit), error in ERROR_OF_LENGTH.items() if of == kind and limit in node)
        for name, value in node.items():
            if name not in ("json_schema_input_schema", "metadata", "serialization"):
                yield from errors_of(value)


def test_every_error_of_the_schemas_has_a_reason_and_no_other() -> None:
    found = {error for body in BODIES for error in errors_of(body.__pydantic_core_schema__)}
    assert found == REASONS.keys()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "`n` must be at least 1; got 0"),
        ({"n": 2**70}, "`n` must be at most 9223372036854775807; got 1180591620717411303424"),
        ({"temperature": 1e16}, "`temperature` must be at most 2; got 10000000000000000"),
        ({"top_p": 0.0}, "`top_p` must be above 0; got 0"),
        ({"n": 1.5}, "`n` must be a whole number; got 1.5"),
        ({"n": True}, "`n` must be a whole number; got true"),
        ({"stream": "yes"}, '`stream` must be true or false; got "yes"'),
        ({"user": "u" * 513}, f'`user` has 513 characters; at most 512 are accepted; got "{"u" * 49}...'),
        ({"service_tier": "gold"}, "`service_tier` must be one of auto, default, scale, flex, priority, fast; "
         'got "gold"'),
        ({"stream": True, "stream_options": {"include_obfuscation": True}},
         "`stream_options.include_obfuscation` must be false; got true"),
        ({"stream_options": []}, "`stream_options` must be an object"),
        ({"stop": [""]}, '`stop[0]` has 0 characters; it must have at least 1; got ""'),
        ({"logit_bias": {"5": "much"}}, '`logit_bias.5` must be a number; got "much"'),
        ({"stop_token_ids": "5"}, '`stop_token_ids` must be a list of token ids; got "5"'),
        ({"best_of": 3}, "`best_of` is not supported, unless it equals `n`"),
    ],
)  # fmt: skip
def test_a_refusal_is_a_sentence_with_field_limit_and_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(body_schema.CompletionBody, {"model": "m", "prompt": "a", **fields}, {})
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ([], "`messages` has 0 items; it must have at least 1"),
        ([{"role": "function", "content": "a"}],
         '`messages[0].role` is "function"; messages of this role are not supported'),
        ([{"role": "tool", "content": "a"}], "`messages[0].tool_call_id` is missing"),
        ([{"role": "user", "content": "a", "tool_call_id": "c"}],
         '`messages[0].tool_call_id` is only for messages of the role tool; got "c"'),
        ([{"role": "user"}], "`messages[0].content` is missing"),
        ([{"role": "user", "content": "a", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}],
         "`messages[0].tool_calls` is only for messages of the role assistant"),
        ([{"role": "user", "content": [{"type": "image_url"}]}],
         '`messages[0].content` has a part of type "image_url"; only text parts are supported'),
        ([{"role": "user", "content": 5}], "`messages[0].content` must be a string; got 5"),
        (["hi"], '`messages[0]` must be an object; got "hi"'),
    ],
)  # fmt: skip
def test_a_refused_message_is_named_by_its_place(message: list[Any], expected: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(body_schema.ChatBody, {"model": "m", "messages": message}, {})
    assert caught.value.message == expected


def test_ignored_values_are_compared_with_their_types() -> None:
    given = {"model": "m", "prompt": "a"}
    ignored = body_schema.COMPLETION_IGNORED
    parse_body(body_schema.CompletionBody, {**given, "store": False, "length_penalty": 1.0}, ignored)
    for fields in ({"store": 0}, {"length_penalty": True}):
        with pytest.raises(InvalidRequest, match="not supported"):
            parse_body(body_schema.CompletionBody, {**given, **fields}, ignored)
