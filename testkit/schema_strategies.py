"""Strategies of hypothesis for JSON Schemas of Draft 2020-12; `json_schemas.py` has those for measurements."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

from testkit.json_schemas import NEVER_ENFORCED, Schema

Schemas = st.SearchStrategy[Schema]

_NAMES = st.sampled_from(("name", "age", "not", "$ref", "größe", 'a "b"', "x/y", "t~u", "")) | st.text(max_size=4)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_NAMES, inner, max_size=2),
    max_leaves=4,
)
_FORMATS = st.sampled_from(("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "unknown"))
_PATTERNS = st.sampled_from(("^[a-z]+$", "[0-9]{2}", "^(yes|no)$", "^[a-z_]{1,6}$", "^.{0,8}$", "^(?!x)", "(a)\\1"))
_TYPES = st.sampled_from(("string", "integer", "number", "boolean", "null", "array", "object"))
_SIZES = st.integers(0, 4)
_BOUNDS = st.integers(-100, 100) | st.sampled_from((0.5, -2.25, 10**9))
_MULTIPLES = st.sampled_from((1, 2, 5, 7, 0.1, 0.25, 100, 12, 10_007))
_ANNOTATIONS = st.sampled_from(({}, {}, {}, {"title": "t", "default": 1}, {"description": "d", "x-own": []}))


def schemas(max_leaves: int = 8) -> Schemas:
    """Return the strategy of schemas, of which some have keywords that no grammar enforces, or no documents."""
    return st.recursive(_leaves(), _around, max_leaves=max_leaves).flatmap(_referred)


def _some(always: Schema, /, **optional: st.SearchStrategy[Any]) -> Schemas:
    """Return the strategy of schemas with the keywords of `always` and any of the optional ones."""
    fixed = {name: st.just(value) for name, value in always.items()}
    return st.fixed_dictionaries(fixed, optional=optional)


def _leaves() -> Schemas:
    numbers = {"minimum": _BOUNDS, "exclusiveMaximum": _BOUNDS, "maximum": _BOUNDS, "multipleOf": _MULTIPLES}
    return st.one_of(
        _some({"type": "string"}, minLength=_SIZES, maxLength=st.integers(4, 9)),
        _some({"type": "string"}, format=_FORMATS),
        _some({"type": "string"}, pattern=_PATTERNS),
        _some({"type": "integer"}, **numbers),
        _some({"type": "number"}, **numbers),
        st.fixed_dictionaries({"enum": st.lists(_VALUES, min_size=1, max_size=4)}),
        st.fixed_dictionaries({"const": _VALUES}),
        st.fixed_dictionaries({"type": _TYPES | st.lists(_TYPES, min_size=1, max_size=3, unique=True)}),
        st.sampled_from(NEVER_ENFORCED).map(deepcopy),
        _ANNOTATIONS.map(deepcopy),
    )


def _around(inner: Schemas) -> Schemas:
    """Return the strategy of schemas that hold others."""
    listed = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        _some(
            {"type": "array"}, items=inner | st.just(False), prefixItems=listed, minItems=_SIZES,
            maxItems=st.integers(2, 5), uniqueItems=st.booleans(),
        ),
        st.dictionaries(_NAMES, inner, max_size=4).flatmap(lambda properties: _object(properties, inner)),
        st.fixed_dictionaries({"anyOf": listed}),
        st.fixed_dictionaries({"oneOf": listed}),
        st.fixed_dictionaries({"allOf": listed}),
        st.fixed_dictionaries({"not": inner, "if": inner, "then": inner}),
    )  # fmt: skip


def _object(properties: dict[str, Schema], inner: Schemas) -> Schemas:
    names = sorted(properties)
    return _some(
        {"type": "object", "properties": properties},
        required=st.lists(st.sampled_from(names), unique=True) if names else st.just([]),
        additionalProperties=st.just(False) | inner,
        patternProperties=st.dictionaries(_PATTERNS, inner, max_size=1),
        minProperties=_SIZES,
        maxProperties=_SIZES,
    )


def _referred(schema: Schema) -> Schemas:
    """Return the strategy of the schema itself, and of one that refers to it."""
    behind = {"$defs": {"a/b~": schema}, "$ref": "#/$defs/a~1b~0"}
    tree = {"$defs": {"part": schema}, "type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
    return st.sampled_from((schema, schema, schema, behind, tree))
