"""JSON Schemas of Draft 2020-12 for tests: random ones, some by hand, and the check of a document against them."""

from __future__ import annotations

import decimal
import json
import random
from collections.abc import Iterable
from copy import deepcopy
from decimal import Decimal
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for

Schema = dict[str, Any]

NEVER_ENFORCED: tuple[Schema, ...] = (
    {"uniqueItems": True},
    {"not": {"type": "null"}},
    {"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "string"}},
    {"contains": {"type": "integer"}, "minContains": 1, "maxContains": 3},
    {"propertyNames": {"maxLength": 5}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"unevaluatedProperties": False},
    {"unevaluatedItems": False},
    {"pattern": "^(?!x)"},
    {"type": "string", "format": "idn-hostname"},
)
"""Schemas of which no grammar enforces a keyword."""

BY_HAND: tuple[Schema, ...] = (
    {},
    {"const": {"a": [1, None, "x"]}},
    {"enum": [1, "1", None, True, [], {}, 2.5, 'quote " and \\ and \u2028']},
    {"type": ["string", "null", "boolean"]},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2,4}$"},
    {"type": "string", "pattern": "a.b"},
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "duration", "email", "hostname")),
    *({"type": "string", "format": name} for name in ("ipv4", "ipv6", "uuid", "uri")),
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "integer", "multipleOf": 7, "minimum": 20, "maximum": 90},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 3}], "items": False},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 5},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 3},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "minProperties": 1},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "integer"}}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"not": {"type": "null"}, "if": {"type": "integer"}, "uniqueItems": {"const": 1}, "$ref": {}},
        "required": ["not", "if", "uniqueItems"],
        "additionalProperties": False,
    },
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"allOf": [{"required": ["a"]}, {"properties": {"a": {"type": "integer"}}}], "type": "object"},
    {"$defs": {"a/b": {"type": "integer"}, "c~d": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/$defs/c~0d"},
    {
        "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                           "required": ["v"], "additionalProperties": False}},
        "$ref": "#/$defs/node",
    },
    {"type": "object", "properties": {"a b\n\"c\"": {"const": 1}, "ключ": {"const": "значение"}}, "required": ["ключ"]},
    {"title": "t", "description": "d", "default": 3, "examples": [1], "deprecated": True, "x-own": [], "type": "null"},
    *NEVER_ENFORCED,
)  # fmt: skip
"""Schemas that name every keyword, and some odd ones."""

_CHECKED_FORMATS = ("date", "email", "ipv4", "ipv6", "uuid")
"""Formats that jsonschema checks without further libraries; of a time it refuses long fractions of a second."""

_WORDS = ("name", "age", "city", "items", "note", "id", "not", "if", "größe", 'a "b"', "x/y", "t~u", "")
_FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "unknown")
_PATTERNS = ("^[a-z]+$", "[0-9]{2}", "^(yes|no)$", "^\\w{1,6}$", "^[^\\s]*$", "x", "^.{0,8}$", "^\\d+(\\.\\d+)?$")


def random_schema(rng: random.Random) -> Schema:
    """Return a schema; one of seven has a keyword that no grammar enforces."""
    schema = _of(rng, 3)
    if rng.random() < 0.15:
        _somewhere(rng, schema).update(deepcopy(rng.choice(NEVER_ENFORCED)))
    if rng.random() < 0.1:
        schema = {"$defs": {"part": schema}, "type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 3}
    return schema


def random_numbers(rng: random.Random) -> Schema:
    """Return a schema of numbers with bounds and multiples, of Draft 4 or 2020-12, alone or within another."""
    is_draft_4 = rng.random() < 0.3
    schema, other = _bounded(rng, is_draft_4), _bounded(rng, is_draft_4)
    schemas: tuple[Schema, ...] = (
        schema, schema, schema, {"allOf": [schema, other]}, {"anyOf": [schema, other]}, schema | {"allOf": [other]},
        {"definitions": {"part": schema}, "type": "array", "items": {"$ref": "#/definitions/part"}, "maxItems": 2},
        {"type": "array", "items": schema, "minItems": 1, "maxItems": 2},
        {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False},
        {"type": "object", "additionalProperties": schema, "maxProperties": 1},
        {"enum": [_bound(rng) or 0 for _ in range(3)], **schema},
    )  # fmt: skip
    dialect = {"$schema": "http://json-schema.org/draft-04/schema#"} if is_draft_4 else {}
    return dialect | rng.choice(schemas)


def documents_near(schema: Schema, rng: random.Random) -> list[str]:
    """Return documents of one number, at and around the numbers in a schema, of at most 14 digits and no exponent."""
    steps = [Decimal(step) for step in ("0", "1", "0.1", "0.001", str(rng.randrange(100)))]
    steps += _numbers_in(schema.get("multipleOf"))
    numbers = [one + sign * step for one in (Decimal(0), *_numbers_in(schema)) for step in steps for sign in (1, -1)]
    numbers += [(rng.choice(numbers) + rng.choice(numbers)) / 2 for _ in range(8)]
    texts = {f"{number.normalize():f}" for number in numbers if number or not number.is_signed()}
    return [
        document for text in sorted(texts) if len(text) <= 15 for document in (text, f"[{text}]", f'{{"x":{text}}}')
    ]


def _numbers_in(value: Any) -> list[Decimal]:
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [number for part in parts for number in _numbers_in(part)]
    return [Decimal(str(value))] if isinstance(value, int | float) and not isinstance(value, bool) else []


def without(schema: Schema, pointers: Iterable[str]) -> Schema:
    """Return a copy of a schema without the keywords at these JSON pointers."""
    copied = deepcopy(schema)
    for pointer in sorted(pointers, key=len, reverse=True):  # Inner ones before those around them.
        *way, keyword = (part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])
        place: Any = copied
        for part in way:
            place = place[int(part)] if isinstance(place, list) else place[part]
        del place[keyword]
    return copied


def fault_of(text: str, schema: Schema) -> str | None:
    """Return the reason why a text is no JSON document of a schema; None: it is one. Numbers are exact."""
    try:
        document = json.loads(text, parse_float=_exact)
    except ValueError as error:
        return f"no JSON: {error}"
    exact = json.loads(json.dumps(schema), parse_float=_exact)
    with decimal.localcontext(prec=2000):
        validator = validator_for(schema, Draft202012Validator)
        found = next(validator(exact, format_checker=FormatChecker(_CHECKED_FORMATS)).iter_errors(document), None)
    return None if found is None else f"{found.json_path}: {found.message[:200]}"


def _exact(number: str) -> Decimal | float:
    """Return a number as it is written; infinity if its exponent is beyond decimal's."""
    try:
        return Decimal(number)
    except decimal.InvalidOperation:
        return float(number)


def _of(rng: random.Random, depth: int) -> Schema:
    leaves = (_string, _number, _number, _choice)
    makers = leaves if depth == 0 else (*leaves, _array, _object, _object, _object, _combined)
    return rng.choice(makers)(rng, depth - 1)


def _string(rng: random.Random, _: int) -> Schema:
    schema: Schema = {"type": "string"}
    shortest = rng.randrange(4)
    options: tuple[Schema, ...] = (
        {}, {"minLength": shortest, "maxLength": shortest + rng.randrange(6)}, {"maxLength": rng.randrange(20)},
        {"format": rng.choice(_FORMATS)}, {"pattern": rng.choice(_PATTERNS)},
    )  # fmt: skip
    return schema | rng.choice(options)


def _number(rng: random.Random, _: int) -> Schema:
    schema: Schema = {"type": rng.choice(["integer", "number"])}
    low = rng.randint(-1000, 1000)
    for keyword, value in (
        (rng.choice(["minimum", "exclusiveMinimum"]), low),
        (rng.choice(["maximum", "exclusiveMaximum"]), low + rng.choice([2, 10, 0.5, 10**6])),
        ("multipleOf", rng.choice([1, 2, 5, 7, 0.1, 0.25, 100, 12])),
    ):
        if rng.random() < 0.35:
            schema[keyword] = value
    return schema


def _bounded(rng: random.Random, is_draft_4: bool) -> Schema:
    schema: Schema = {"type": rng.choice(["integer", "number", "number", ["number", "null"], ["integer", "string"]])}
    low, high = sorted((_bound(rng), _bound(rng)))
    if rng.random() < 0.3:
        high = low + rng.choice([0, 0.001, 0.1, 0.5, 1, 3])
    for keyword, exclusive_keyword, value in (
        ("minimum", "exclusiveMinimum", low), ("maximum", "exclusiveMaximum", high),
    ):  # fmt: skip
        if rng.random() < 0.3:
            continue
        is_excluded = rng.random() < 0.5
        schema[exclusive_keyword if is_excluded and not is_draft_4 else keyword] = value
        if is_draft_4 and rng.random() < 0.8:
            schema[exclusive_keyword] = is_excluded
    if rng.random() < 0.25:
        schema["multipleOf"] = rng.choice([1, 2, 3, 7, 10, 0.1, 0.01, 0.05, 0.25, 0.5, 1.5, 0.3, 1e-6, 0.07])
    return schema


def _bound(rng: random.Random) -> float:
    """Return a bound as people and programs write it: round, with decimals, tiny, or the largest of its type."""
    number = rng.choice([0, 0, 1, rng.randint(-20, 20), rng.randint(-(10**6), 10**6), rng.uniform(-2, 2)])
    number = rng.choice([number, round(number * rng.choice([0.1, 0.01, 1.5]), 3)])
    if rng.random() < 0.8:
        return number
    return rng.choice([
        1e-7, 1e-12, 0.30000000000000004, 0.9999999999999999, 1e20, -1e20, 2**31 - 1, -(2**31), 2**53 + 1, 2**63 - 1,
        -(2**63), 2**64 - 1, 1.7976931348623157e308, -1.7976931348623157e308, -0.0, 5e-324, 123456789.123,
    ])  # fmt: skip


def _choice(rng: random.Random, _: int) -> Schema:
    values: list[Any] = [1, -2.5, "a", "long text", None, True, False, [], [1, "x"], {}, {"k": [None]}]
    options: tuple[Schema, ...] = (
        {"enum": rng.sample(values, rng.randint(1, 5))}, {"const": rng.choice(values)}, {"type": "boolean"},
        {"type": "null"}, {"type": rng.sample(["string", "integer", "null", "boolean"], 2)}, {},
    )  # fmt: skip
    return rng.choice(options)


def _array(rng: random.Random, depth: int) -> Schema:
    shortest = rng.randrange(3)
    schema: Schema = {"type": "array", "maxItems": shortest + rng.randrange(4)}
    if rng.random() < 0.5:
        schema["minItems"] = shortest
    if rng.random() < 0.3:
        schema["prefixItems"] = [_of(rng, depth) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.8:
        schema["items"] = _of(rng, depth)
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randrange(5))
    schema: Schema = {"type": "object", "properties": {name: _of(rng, depth) for name in names}}
    if rng.random() < 0.8:
        schema["required"] = [name for name in names if rng.random() < 0.7]
    if rng.random() < 0.7:
        schema["additionalProperties"] = False if rng.random() < 0.8 else _of(rng, 0)
    if rng.random() < 0.1:
        schema["minProperties"] = rng.randrange(3)
    if rng.random() < 0.1:
        schema["patternProperties"] = {"^p_": _of(rng, 0)}
    return schema


def _combined(rng: random.Random, depth: int) -> Schema:
    kind = rng.choice(["anyOf", "anyOf", "oneOf", "allOf"])
    if kind == "allOf":
        return {"allOf": [_number(rng, 0), {"maximum": 10**7}]} if rng.random() < 0.5 else {"allOf": [_of(rng, depth)]}
    return {kind: [_of(rng, depth) for _ in range(rng.randint(1, 3))]}


def _somewhere(rng: random.Random, schema: Schema) -> Schema:
    """Return the schema or one of those in it."""
    parts = (*schema.get("properties", {}).values(), schema.get("items"), *schema.get("anyOf", ()))
    inner = [part for part in parts if isinstance(part, dict)]
    return _somewhere(rng, rng.choice(inner)) if inner and rng.random() < 0.7 else schema
