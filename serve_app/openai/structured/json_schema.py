"""JSON Schemas as far as a grammar can enforce them, with the places of the keywords that it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any

from replicas.errors import InvalidRequest
from replicas.text.grammar import check_length, json_schema_fault, json_schema_grammar, schema_options
from serve_app.errors import shortened
from serve_app.openai.structured.numeric import compilable, is_compilable
from serve_app.openai.tools.shapes.schemas import pointer_part

Schema = dict[str, Any]

MAX_DEPTH = 64
"""Deepest nesting of a schema."""
MAX_MULTIPLE = 10_000
"""Largest common multiple of all `multipleOf` of a schema; the automaton of a number has as many states."""

MAX_PATTERNS = 256
"""Most regular expressions of a schema."""
MAX_MET_PATTERNS = 16
"""Most regular expressions of a schema within `allOf`. An intersection may take exponential time."""

_NOT_ENFORCED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems",
})  # fmt: skip
"""Keywords that no grammar here expresses."""

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated"})

_NAMED_GROUP = re.compile(r"\(\?<(?=[^=!])")
_NAMED_REFERENCE = re.compile(r"\\k<(\w+)>")
"""Named groups and references to them as JavaScript, and so JSON Schema, writes them."""

_CLASS = re.compile(r"\\.|\[((?:\\.|[^\]\\])*)\]", re.DOTALL)
_CLASS_OPERATOR = re.compile(r"\[|&&|--|~~")

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_NUM_PROPERTIES = ("minProperties", "maxProperties")
_MAX_NAMED = 10


@dataclass(frozen=True, slots=True)
class EnforceableSchema:
    """Schema that has a grammar."""

    schema: Schema
    """The schema as llguidance compiles it, with its options for the grammar."""
    reduced: Schema
    """The schema in the client's words, without the keywords that were left out."""
    not_enforced: tuple[str, ...] = ()
    """JSON pointers to the keywords that were left out."""


def enforceable_schema(
    schema: Schema | bool, param: str, *, is_strict: bool = False, has_whitespace: bool = True
) -> EnforceableSchema:
    """Return `schema` as far as it can be enforced.

    Raises:
        InvalidRequest: it has no grammar, or, if `is_strict`, none that enforces it wholly. The error names `param`.
    """
    if schema is False:
        raise InvalidRequest(f"`{param}` is false: no output meets it", param)
    reduction = _Reduction(param)
    reduced = reduction.of({} if schema is True else schema, "", 0)
    compiled = _compilable(reduced) | schema_options(has_whitespace=has_whitespace)
    check_length(json_schema_grammar(compiled), param)
    fault = json_schema_fault(compiled)
    if fault is not None and "oneOf" in fault:  # Two alternatives may hold at once, which a grammar cannot forbid.
        reduction.not_enforced += reduction.one_ofs
        compiled |= schema_options(has_whitespace=has_whitespace, takes_any_of=True)
        fault = json_schema_fault(compiled)
    if fault is not None:
        raise InvalidRequest(f"`{param}` cannot be enforced: {fault}", param)
    if is_strict:
        refuse_unenforced(reduction.not_enforced, param)
    return EnforceableSchema(compiled, reduced, tuple(reduction.not_enforced))


def refuse_unenforced(places: Sequence[str], param: str) -> None:
    """Refuse keywords of a strict schema that are not enforced, given as JSON pointers.

    Raises:
        InvalidRequest: there are such keywords; the error names `param` and their places.
    """
    if places:
        listed = ", ".join(f"`{_shown(place)}`" for place in places[:_MAX_NAMED])
        message = f"`{param}` is strict and has keywords that cannot be enforced: {listed}"
        raise InvalidRequest(message, param, "unsupported_parameter")


class _Reduction:
    """Reduction of one schema to what can be enforced."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._multiple = 1
        self._num_patterns = 0
        self._num_met_patterns = 0
        self.not_enforced: list[str] = []
        self.one_ofs: list[str] = []

    def of(self, schema: Schema, place: str, depth: int) -> Schema:
        """Return `schema`, which stands at the JSON pointer `place`, without what cannot be enforced.

        Raises:
            InvalidRequest: the schema is nested too deeply.
        """
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"`{self._param}` is nested more than {MAX_DEPTH} deep", self._param)
        self._count_patterns(schema, place)
        reduced: Schema = {}
        for keyword, value in schema.items():
            here = f"{place}/{pointer_part(keyword)}"
            self._check_patterns(keyword, value, here)
            if keyword == "x-guidance" or (keyword == "uniqueItems" and value is False):
                continue
            if keyword == "format" and not _takes_strings(schema):
                continue  # Such as int32: an annotation, since formats are about strings.
            if keyword in _NUM_PROPERTIES and _has_optional(schema):
                self.not_enforced.append(here)
                continue
            if not self._is_enforceable(keyword, schema, here):
                self.not_enforced.append(here)
                continue
            if keyword == "oneOf":
                self.one_ofs.append(here)
            reduced[keyword] = _changed(keyword, value, here, lambda part, there: self.of(part, there, depth + 1))
        return reduced

    def _count_patterns(self, schema: Schema, place: str) -> None:
        by_name = schema.get("patternProperties")
        num_patterns = ("pattern" in schema) + (len(by_name) if isinstance(by_name, dict) else 0)
        self._num_patterns += num_patterns
        self._num_met_patterns += num_patterns if "/allOf/" in place else 0
        counts = (self._num_patterns, MAX_PATTERNS, ""), (self._num_met_patterns, MAX_MET_PATTERNS, " within `allOf`")
        for count, limit, where in counts:
            if count > limit:
                counted = f"{count} regular expressions{where} up to `{_shown(place)}`"
                message = f"`{self._param}` has {counted}; at most {limit} are accepted"
                raise InvalidRequest(message, self._param)

    def _check_patterns(self, keyword: str, value: Any, place: str) -> None:
        """Check that a keyword's patterns are regular expressions.

        Raises:
            InvalidRequest: one is none, for llguidance and for Python alike.
        """
        for pattern in _patterns_of(keyword, value):
            reason = None if _has_grammar("pattern", pattern) else _regex_fault(pattern)
            if reason is not None:
                raise InvalidRequest(
                    f"`{self._param}`: `{_shown(place)}` is no regular expression: {reason}", self._param
                )

    def _is_enforceable(self, keyword: str, schema: Schema, place: str) -> bool:
        """Return True if a grammar can express a schema's keyword.

        Raises:
            InvalidRequest: nothing can be a multiple of the number.
        """
        value = schema[keyword]
        if keyword in _NOT_ENFORCED or keyword == "uniqueItems" or not is_compilable(keyword, schema):
            return False
        if keyword == "format" and isinstance(value, str):
            return _has_grammar(keyword, value)
        if not all(_has_grammar("pattern", pattern) for pattern in _patterns_of(keyword, value)):
            return False
        if keyword != "multipleOf" or not isinstance(value, int | float):
            return True
        if value <= 0:
            message = f"`{self._param}`: `{_shown(place)}` is {value}; it must be greater than 0"
            raise InvalidRequest(message, self._param)
        if not _has_grammar(keyword, value):
            return False
        multiple = lcm(self._multiple, _num_remainders(value))
        if multiple <= MAX_MULTIPLE:
            self._multiple = multiple
        return multiple <= MAX_MULTIPLE


def _changed(keyword: str, value: Any, place: str, change: Callable[[Schema, str], Schema]) -> Any:
    """Return a keyword's value with the schemas in it changed; `change` gets a schema and its JSON pointer."""

    def changed(part: Any, there: str) -> Any:
        return change(part, there) if isinstance(part, dict) else part

    if keyword in _SCHEMA_MAPS and isinstance(value, Mapping):
        return {name: changed(part, f"{place}/{pointer_part(name)}") for name, part in value.items()}
    if keyword in _SCHEMA_LISTS or keyword in _SCHEMAS:
        if isinstance(value, list):
            return [changed(part, f"{place}/{index}") for index, part in enumerate(value)]
        return changed(value, place)
    return value


def _compilable(schema: Schema) -> Schema:
    """Return a schema without annotations, all numeric keywords of which llguidance compiles as they are meant."""
    compiled = {}
    for keyword, value in schema.items():
        # Any keyword but these holds schemas if a `$ref` leads there.
        place = keyword if keyword in (*_SCHEMA_MAPS, "const", "enum") else "items"
        if keyword not in _ANNOTATIONS:
            compiled[keyword] = _changed(place, value, "", lambda part, _: _compilable(part))
    return compilable(compiled)


def _takes_strings(schema: Schema) -> bool:
    """Return False if a schema's `type` excludes strings."""
    types = schema.get("type", "string")
    return types == "string" or not isinstance(types, str | list) or "string" in types


def _has_optional(schema: Schema) -> bool:
    """Return True if a schema has properties that need not be there: a grammar cannot count them."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return (
        isinstance(properties, dict) and isinstance(required, list) and any(name not in required for name in properties)
    )


def _patterns_of(keyword: str, value: Any) -> Iterable[str]:
    """Return the regular expressions in a keyword's value."""
    if keyword == "pattern" and isinstance(value, str):
        return (value,)
    return value if keyword == "patternProperties" and isinstance(value, dict) else ()


def _regex_fault(pattern: str) -> str | None:
    """Return the reason why a text is no regular expression, not even one that has no grammar; None: it is one."""
    in_python = _NAMED_REFERENCE.sub(r"(?P=\1)", _NAMED_GROUP.sub("(?P<", pattern))
    try:
        re.compile(in_python)
    except re.error as error:
        return error.msg
    except (RecursionError, OverflowError):
        return "it is too large"
    return None


@lru_cache(maxsize=1024)
def _has_grammar(keyword: str, value: str | float) -> bool:
    """Return True if strings with this format or pattern, or numbers with this `multipleOf`, have a grammar."""
    if keyword == "pattern" and any(map(_has_class_operator, _CLASS.findall(str(value)))):
        return False
    return json_schema_fault({"type": ["string", "number"], keyword: value}) is None


def _has_class_operator(char_class: str) -> bool:
    """Return True for a class of characters in which llguidance reads a class or an operator, others characters."""
    return bool(_CLASS_OPERATOR.search(re.sub(r"\\.", "", char_class)))


def _num_remainders(divisor: float) -> int:
    """Return the number of remainders of a division by `divisor`, in units of its last decimal place."""
    if not 0 < divisor < 10**12:
        return 1 if divisor <= 0 else MAX_MULTIPLE + 1
    return int(f"{divisor:.12f}".rstrip("0").replace(".", "")) or MAX_MULTIPLE + 1


def _shown(place: str) -> str:
    """Return a JSON pointer for a message; of a long one the keyword stays."""
    parent, _, keyword = place.rpartition("/")
    return f"{shortened(parent)}/{keyword}"
