"""The page docs/configuration.md: `python -m serve_app.config_page > docs/configuration.md` makes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from pydantic import ByteSize

from replicas.settings import settings_of
from serve_app.config import PARTS, HeadwayConfig

_INTRODUCTION = """# Configuration

Each field can be given as `key=value` to `make serve ARGS=` and `serve run serve_app.app:build`, or under `args:` in a
config file. Unknown fields, values outside their limits and contradictions are refused at start-up. A size is a number
of bytes, also with a unit: `2GiB`. This page is made from the code:
`python -m serve_app.config_page > docs/configuration.md`.
"""
_KINDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "`true`, `false`", "null": "`none`"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}


def page() -> str:
    """Return the page: one table of fields for the deployment and one for each part."""
    settings = {part: settings_of(part).keys() for part in PARTS}
    of_parts = {name for names in settings.values() for name in names}
    own = [name for name in HeadwayConfig.model_fields if name not in of_parts]
    sections = [(HeadwayConfig, own), *settings.items()]
    return "\n".join([_INTRODUCTION, *(line for part, names in sections for line in _section(part, names))])


def _section(part: type, names: Iterable[str]) -> Iterator[str]:
    title = (part.__doc__ or "").splitlines()[0].split(";")[0].rstrip(".")
    yield f"## {title}\n\n| field | default | values | effect |\n|---|---|---|---|"
    schema = HeadwayConfig.model_json_schema()
    for name in names:
        field = HeadwayConfig.model_fields[name]
        values = "size > 0" if name.endswith("_bytes") else _values(schema["properties"][name], schema["$defs"])
        effect = " ".join((field.description or "").split())
        yield f"| `{name}` | `{_default(name, field.default)}` | {values} | {effect} |"
    yield ""


def _default(name: str, value: object) -> str:
    """Return a default as an operator would write it."""
    match value:
        case None | bool():
            return str(value).lower()
        case Enum():
            return str(value.value)
        case int() if name.endswith("_bytes"):
            return ByteSize(value).human_readable()
        case int() | float() if value == int(value):
            return str(int(value))
        case _:
            return str(value) or '""'


def _values(schema: dict[str, Any], named: dict[str, Any]) -> str:
    """Return the values that a JSON schema admits, in words."""
    if "anyOf" in schema:
        return " or ".join(_values(option, named) for option in schema["anyOf"])
    if "$ref" in schema:
        return _values(named[schema["$ref"].rpartition("/")[2]], named)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    bounds = [f" {sign} {schema[rule]:g}" for rule, sign in _BOUNDS.items() if rule in schema]
    return _KINDS[schema["type"]] + ",".join(bounds)


if __name__ == "__main__":
    print(page(), end="")
