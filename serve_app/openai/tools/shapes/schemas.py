"""Arguments that are bound one by one, each by its own part of the tool's schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.openai.tools.shapes.calls import JsonObject, Tool
from serve_app.openai.tools.shapes.shape import Lark
from serve_app.openai.tools.shapes.values import admitted_types

_DEFINITIONS = ("$defs", "definitions")
_MAX_ITEMS = 100
"""Largest bound on the items of an array that a grammar expresses."""
SCALARS = frozenset({"integer", "number", "boolean", "null"})
"""Types of values that are written as in JSON by every family."""
_ENFORCED = {"type", "enum", "const", "title", "description", "default", "examples", "$comment"}
_ENFORCED_OF = {
    "object": {"properties", "additionalProperties"},
    "array": {"items"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
"""Keywords that a grammar enforces where a schema admits one type alone."""


def property_schema(tool: Tool, name: str) -> JsonObject:
    """Return the schema of an argument, with the definitions to which it may refer."""
    schema = tool.properties[name]
    own = dict(schema) if isinstance(schema, dict) else {}
    parameters = tool.parameters or {}
    return {key: parameters[key] for key in _DEFINITIONS if key in parameters} | own


def pointer_part(name: str) -> str:
    """Return a name as a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def bound_properties(lark: Lark, tool: Tool, argument: Callable[[str], str], separator: str) -> str:
    """Return the Lark expression of a tool's arguments in the order of its schema.

    Required ones stand there, others may. Arguments that the schema does not name cannot.

    Args:
        lark: Grammar to which rules are added.
        tool: Tool with a schema.
        argument: Function that returns the expression of an argument from its name.
        separator: Lark expression between two arguments; empty if nothing is between them.
    """
    required = set((tool.parameters or {}).get("required", ()))
    names = list(tool.properties)
    rest, first = "", ['""']
    for name in reversed(names):
        one = lark.rule(argument(name))
        first = [f"{one} {rest}"] + ([] if name in required else first)
        following = f"{separator} {one}" if name in required else f"({separator} {one})?"
        rest = lark.rule(f"{following} {rest}")
    return lark.any_of(first)


@dataclass(frozen=True, slots=True)
class ValueForms:
    """Lark expressions of values in one form of calls, each with what must stand behind it."""

    choices: Callable[[Sequence[Any]], str | None]
    """Function of the values of an enumeration; None: the form cannot list them."""
    string: str
    any_value: Callable[[], str]
    of_object: Callable[[Tool], str]
    """Function of the object's schema, as that of a tool's arguments."""
    of_array: Callable[[JsonObject], str]
    of_scalar: Callable[[JsonObject], str]
    """Function of the schema, whose types are of `SCALARS`."""


def bound_value(lark: Lark, schema: JsonObject, forms: ValueForms) -> str:
    """Return the Lark expression of a value, as far as its schema can be followed in these forms."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    choices = forms.choices(values) if values else None
    if choices is not None:
        return choices
    alternatives = schema.get("anyOf", schema.get("oneOf"))
    if alternatives and "type" not in schema:
        schemas = [alternative if isinstance(alternative, dict) else {} for alternative in alternatives]
        return lark.any_of([bound_value(lark, alternative, forms) for alternative in schemas])
    types = admitted_types(schema)
    if not types:
        return forms.any_value()
    expressions = [forms.string] if "string" in types else []
    expressions += [forms.of_object(Tool("", schema))] if "object" in types else []
    expressions += [forms.of_array(schema)] if "array" in types else []
    expressions += [forms.of_scalar({**schema, "type": sorted(types & SCALARS)})] if types & SCALARS else []
    return lark.any_of(expressions)


def num_items(schema: JsonObject, keyword: str) -> int | None:
    """Return a bound on an array's items that a grammar expresses; None: there is none."""
    value = schema.get(keyword)
    return value if isinstance(value, int) and 0 <= value <= _MAX_ITEMS else None


def items_of(schema: JsonObject) -> JsonObject:
    """Return the schema of an array's items."""
    items = schema.get("items")
    return items if isinstance(items, dict) else {}


def unenforced_keywords(schema: JsonObject, types: set[str], place: str) -> Iterator[str]:
    """Yield pointers to the keywords of a schema, and of those in it, that have no expression."""
    alternatives = [key for key in ("anyOf", "oneOf") if "type" not in schema and key in schema][:1]
    enforced = _ENFORCED | {"x-guidance", "$defs", "definitions"}.union(alternatives)
    for kind, keywords in _ENFORCED_OF.items():
        if kind in types or (kind == "number" and "integer" in types):
            enforced = enforced | keywords
    if types == {"array"}:
        enforced = enforced | {key for key in ("minItems", "maxItems") if num_items(schema, key) is not None}
    named = Tool("", schema).properties
    enforced = enforced | {"required"} if named else enforced
    if "const" not in schema and "enum" not in schema:
        yield from (f"{place}/{pointer_part(keyword)}" for keyword in sorted(schema.keys() - enforced))
    inner = {f"/properties/{pointer_part(name)}": subschema for name, subschema in named.items()}
    if not named:
        inner["/additionalProperties"] = schema.get("additionalProperties")
    inner["/items"] = schema.get("items")
    inner |= {f"/{key}/{index}": subschema for key in alternatives for index, subschema in enumerate(schema[key])}
    for way, subschema in inner.items():
        if isinstance(subschema, dict):
            yield from unenforced_keywords(subschema, admitted_types(subschema), f"{place}{way}")
