"""Page of the API reference as HTML."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from serve_app.openai.reply.format import JsonObject
from serve_app.reference.document import EVENT_DATA, LINE
from serve_app.reference.words import NO_EFFECT

_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "maxLength": "at most {} characters",
    "maxItems": "at most {} items",
    "pattern": "matches {}",
}
_MAX_SHOWN_LIMIT = 2**53
"""Bounds beyond it are those of 64-bit numbers, which no reader needs."""


def reference_page(document: JsonObject) -> str:
    """Return the documentation of an OpenAPI document."""
    operations = [
        {"method": method.upper(), "path": path, **operation}
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    groups = {
        tag["name"]: [operation for operation in operations if tag["name"] in operation["tags"]]
        for tag in document["tags"]
    }
    return (
        _environment()
        .get_template("reference.html")
        .render(
            info=document["info"],
            groups=groups,
            schemas=document["components"]["schemas"],
            failures=document["components"]["responses"],
            events=EVENT_DATA,
            line=LINE,
            no_effect=NO_EFFECT,
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("serve_app.reference"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"kind": _kind, "prose": _prose, "json": json.dumps, "pretty": _pretty}
    return environment


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _kind(schema: JsonObject) -> Markup:
    """Return a schema's type and bounds in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{0}">{0}</a>').format(name)
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return Markup(" or ").join(map(_kind, _without_null(schema[union])))
    if "const" in schema:
        return Markup("<code>{}</code>").format(json.dumps(schema["const"]))
    if "enum" in schema:
        return Markup(", ").join(Markup("<code>{}</code>").format(json.dumps(value)) for value in schema["enum"])
    name = schema.get("type", "any value")
    bounds = [words.format(schema[key]) for key, words in _BOUNDS.items() if _is_shown(schema.get(key))]
    if 1 in (schema.get("minLength"), schema.get("minItems")):
        bounds.append("not empty")
    if name == "array":
        return Markup("list{} of ({})").format(_listed(bounds), _kind(schema["items"]))
    return escape(name) + _listed(bounds)


def _without_null(options: list[JsonObject]) -> list[JsonObject]:
    return [option for option in options if option != {"type": "null"}] or options


def _is_shown(bound: Any) -> bool:
    return bound is not None and (isinstance(bound, str) or abs(bound) < _MAX_SHOWN_LIMIT)


def _listed(bounds: list[str]) -> Markup:
    return Markup("".join(f", {escape(bound)}" for bound in bounds))


def _prose(text: str) -> Markup:
    """Return a sentence with the parts between backticks as code."""
    parts = text.split("`")
    shown = [Markup("<code>{}</code>").format(part) if place % 2 else escape(part) for place, part in enumerate(parts)]
    return Markup("").join(shown)
