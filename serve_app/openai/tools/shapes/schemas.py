"""Arguments that are bound one by one, each by its own part of the tool's schema."""

from __future__ import annotations

from collections.abc import Callable

from serve_app.openai.tools.shapes.calls import JsonObject, Tool
from serve_app.openai.tools.shapes.shape import Lark

_DEFINITIONS = ("$defs", "definitions")


def property_schema(tool: Tool, name: str) -> JsonObject:
    """Return the schema of an argument, with the definitions to which it may refer."""
    schema = tool.properties[name]
    own = dict(schema) if isinstance(schema, dict) else {}
    found = tool.parameters or {}
    return {key: found[key] for key in _DEFINITIONS if key in found} | own


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
