"""Schemas are enforced as far as a grammar can; every keyword that it cannot is named, wherever it stands."""

from copy import deepcopy
from typing import Any

import pytest

from replicas.errors import InvalidRequest
from replicas.text.grammar import MAX_GRAMMAR_BYTES
from serve_app.openai.structured.json_schema import (
    MAX_DEPTH,
    MAX_MET_PATTERNS,
    MAX_MULTIPLE,
    MAX_PATTERNS,
    Schema,
    enforceable_schema,
)
from testkit.json_schemas import NEVER_ENFORCED, without

UNENFORCED = [
    (keyword, {"type": "object"} | schema)
    for schema in NEVER_ENFORCED
    for keyword in schema
    if keyword != "type" and (keyword, schema.get("type")) != ("format", None)
]
EACH = pytest.mark.parametrize(("keyword", "schema"), UNENFORCED, ids=[keyword for keyword, _ in UNENFORCED])


def fault(schema: Schema | bool, **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        enforceable_schema(schema, "field", **options)
    assert caught.value.param == "field" and "`field`" in str(caught.value)
    return caught.value


@EACH
def test_a_keyword_without_grammar_is_named_with_its_place(keyword: str, schema: Schema) -> None:
    nested = {"type": "object", "properties": {"a/b": {"items": schema}}}
    defined = {"$defs": {"part~": schema}, "anyOf": [{"type": "null"}, {"$ref": "#/$defs/part~0"}]}
    assert f"/{keyword}" in enforceable_schema(schema, "field").not_enforced
    assert f"/properties/a~1b/items/{keyword}" in enforceable_schema(nested, "field").not_enforced
    assert f"/$defs/part~0/{keyword}" in enforceable_schema(defined, "field").not_enforced


@EACH
def test_strict_refuses_it_and_names_the_place(keyword: str, schema: Schema) -> None:
    error = fault({"type": "object", "properties": {"a": schema}}, is_strict=True)
    assert f"`/properties/a/{keyword}`" in str(error) and error.code == "unsupported_parameter"


def test_of_a_long_place_the_keyword_is_named() -> None:
    schema: Schema = {"type": "array", "uniqueItems": True}
    for _ in range(20):
        schema = {"type": "object", "properties": {"name": schema}}
    assert ".../uniqueItems`" in str(fault(schema, is_strict=True))


@EACH
def test_the_rest_is_enforced(keyword: str, schema: Schema) -> None:
    found = enforceable_schema(schema, "field")
    reduced = {name: value for name, value in found.schema.items() if name != "x-guidance"}
    assert reduced == without(schema, found.not_enforced)


@EACH
def test_a_property_may_have_the_name_of_a_keyword(keyword: str, schema: Schema) -> None:
    named = {"type": "object", "properties": {keyword: {"type": "integer"}}, "required": [keyword]}
    for one in (named, {"const": {keyword: 1}}, {"enum": [{keyword: True}]}, {"default": {keyword: 1}}):
        assert enforceable_schema(one, "field", is_strict=True).not_enforced == ()


def test_the_schema_of_the_client_is_not_changed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    before = deepcopy(schema)
    enforceable_schema(schema, "field")
    assert schema == before


@pytest.mark.parametrize("schema", [
    {"type": "array", "uniqueItems": False},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"type": "integer", "format": "int32"}, {"type": ["number", "null"], "format": "double"},
    {"type": "integer", "multipleOf": 5}, {"type": "number", "multipleOf": 0.01},
    {"type": "object", "minProperties": 1}, True, {}, {"x-own": 1, "nullable": True, "title": "t"},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "minProperties": 1},
])  # fmt: skip
def test_strict_takes_what_a_grammar_enforces(schema: Schema) -> None:
    assert enforceable_schema(schema, "field", is_strict=True).not_enforced == ()


@pytest.mark.parametrize(("schema", "places"), [
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("/oneOf",)),
    ({"type": "integer", "multipleOf": MAX_MULTIPLE + 1}, ("/multipleOf",)),
    ({"type": "number", "multipleOf": 1e-20}, ("/multipleOf",)),
    ({"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}, ("/allOf/1/multipleOf",)),
    ({"patternProperties": {"^(?!x)": {}}}, ("/patternProperties",)),
    ({"properties": {"a": {}}, "maxProperties": 1}, ("/maxProperties",)),
    ({"type": ["string", "integer"], "format": "int32"}, ("/format",)),
    ({"type": "number", "multipleOf": 0.07}, ("/multipleOf",)),
    ({"type": "number", "minimum": 1e19}, ("/minimum",)),
    ({"minimum": float("inf")}, ("/minimum",)),
    ({"minimum": 2e18, "exclusiveMinimum": True, "maximum": 1e20}, ("/minimum", "/exclusiveMinimum", "/maximum")),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-30}, ("/exclusiveMinimum", "/maximum")),
    ({"type": "integer", "exclusiveMaximum": -(2**63)}, ("/exclusiveMaximum",)),
    ({"enum": ["a", 2**53 + 1]}, ("/enum",)), ({"const": {"a": [1e400]}}, ("/const",)),
    ({"type": "string", "minLength": 2**40}, ("/minLength",)),
    ({"type": "string", "pattern": "^[^[]$"}, ("/pattern",)),
    ({"type": "string", "pattern": r"[\w&&x]"}, ("/pattern",)),
])  # fmt: skip
def test_bounded_keywords_are_named_beyond_their_bounds(schema: Schema, places: tuple[str, ...]) -> None:
    assert enforceable_schema(schema, "field").not_enforced == places
    assert places[0] in str(fault(schema, is_strict=True))


def test_the_clients_options_of_the_library_are_ignored() -> None:
    schema = {"type": "object", "x-guidance": {"lenient": True}, "properties": {"a": {"x-guidance": {}}}}
    found = enforceable_schema(schema, "field")
    assert found.schema["x-guidance"]["lenient"] is False and found.schema["properties"] == {"a": {}}
    assert found.not_enforced == ()


@pytest.mark.parametrize(("schema", "reason"), [
    (False, "no output meets it"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3)"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "'a'"),
    ({"$ref": "#/$defs/a"}, "/$defs/a"), ({"$ref": "https://example.com/x"}, "https://example.com/x"),
    ({"$ref": "file:///etc/passwd"}, "file:///etc/passwd"), ({"type": "text"}, "Invalid type: text"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"), ({"properties": []}, "properties must be an object"),
    ({"const": "\ud800"}, "hex escape"), ({"items": {"multipleOf": 0}}, "`/items/multipleOf` is 0"),
    ({"multipleOf": -0.5}, "`/multipleOf` is -0.5"), ({"minimum": "1"}, "minimum"),
    ({"type": "string", "maxLength": 1.5}, "maxLength"),
    ({"type": "number", "exclusiveMinimum": 2, "maximum": 2}, "exclusiveMinimum (2)"),
    ({"type": "number", "minimum": 2, "maximum": 2, "exclusiveMaximum": True}, "(2)"),
    ({"type": "integer", "minimum": 0.5, "maximum": 0.6}, "contains no integer"),
    ({"type": "number", "minimum": 1e30, "maximum": 1e20}, "minimum (1)"),
    ({"type": "integer", "minimum": -(2**63) + 1, "maximum": -(2**63)}, "minimum (1)"),
    ({"type": "integer", "exclusiveMinimum": 0, "maximum": 0.9999999999999999}, "minimum (1)"),
    ({"default": {"type": "integer", "const": -(2**63)}, "$ref": "#/default"}, "'/default' does not exist"),
    ({"x-own": [{"type": "integer", "const": -(2**63)}], "$ref": "#/x-own/0"}, "Unsatisfiable"),
])  # fmt: skip
def test_a_schema_without_outputs_or_sense_is_refused(schema: Schema | bool, reason: str) -> None:
    assert reason in str(fault(schema))


@pytest.mark.parametrize("pattern", ["(", "*a", "[z-a]", "a{3,2}", "(?<name", "((" * 3000])
@pytest.mark.parametrize("is_strict", [False, True])
def test_what_is_no_regular_expression_is_refused_with_its_place(pattern: str, is_strict: bool) -> None:
    for schema, place in (
        ({"items": {"type": "string", "pattern": pattern}}, "/items/pattern"),
        ({"patternProperties": {"^a": {}, pattern: {}}}, "/patternProperties"),
    ):
        error = fault(schema, is_strict=is_strict)
        assert f"`{place}` is no regular expression: " in str(error) and "^" not in str(error) and len(str(error)) < 300


@pytest.mark.parametrize("pattern", [r"(?=a)b", r"(a)\1", r"(?<n>a)\k<n>", r"^{.*}$", r"\bword\b", r"(?<!x)y"])
def test_a_regular_expression_without_grammar_is_not_enforced(pattern: str) -> None:
    assert enforceable_schema({"type": "string", "pattern": pattern}, "field").not_enforced == ("/pattern",)


def nested(depth: int) -> Schema:
    schema: Schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_sizes_are_bounded() -> None:
    assert enforceable_schema(nested(MAX_DEPTH), "field")
    assert f"more than {MAX_DEPTH} deep" in str(fault(nested(MAX_DEPTH + 1)))
    assert f"at most {MAX_GRAMMAR_BYTES}" in str(fault({"const": "x" * MAX_GRAMMAR_BYTES}))
    pattern = {"type": "string", "pattern": "^a$"}
    assert enforceable_schema({"properties": {f"p{n}": pattern for n in range(MAX_PATTERNS)}}, "field")
    error = fault({"properties": {f"p{n}": pattern for n in range(MAX_PATTERNS + 1)}})
    assert f"at most {MAX_PATTERNS}" in str(error) and f"/properties/p{MAX_PATTERNS}" in str(error)
    error = fault({"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(MAX_MET_PATTERNS + 1)]})
    assert f"at most {MAX_MET_PATTERNS}" in str(error) and "within `allOf`" in str(error)


def test_whitespace_is_bounded_or_absent() -> None:
    assert "{0,16}" in enforceable_schema({}, "field").schema["x-guidance"]["whitespace_pattern"]
    assert enforceable_schema({}, "field", has_whitespace=False).schema["x-guidance"]["whitespace_flexible"] is False
