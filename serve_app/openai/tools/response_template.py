"""Families from `response_template`, transformers' own description of a model's output, where a tokenizer ships one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from serve_app.openai.tools.families import ChatFamily, ReasoningMarkers
from serve_app.openai.tools.shapes.json_calls import JsonCalls
from serve_app.openai.tools.shapes.named_calls import NamedCalls
from serve_app.openai.tools.shapes.shape import CallShape

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_NAME_GROUP = re.compile(r"\(\?P<name>(?:[^()\\]|\\.)*\)")
_SPACE = re.compile(r"\\s[*+]\??")
_ESCAPED = re.compile(r"\\([^A-Za-z0-9])")
_SPECIAL = re.compile(r"\\.|[.^$*+?{}\[\]()|]")
_PLACEHOLDER = re.compile(r"\{(?:content\.)?(\w+)\}")


def described_family(template: Mapping[str, Any]) -> ChatFamily | None:
    """Return the family that a response template describes, or None if its calls are of another form.

    Taken are calls whose arguments are JSON, with the name in the JSON or in the pattern that opens a call, between
    markers that are plain text. A family of `FAMILIES` says more, so this is for templates without any of their signs.
    """
    fields = template.get("fields")
    calls = fields.get("tool_calls") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(calls, dict):
        return None
    shape = _shape(calls)
    if shape is None:
        return None
    return ChatFamily("response_template", shape, reasoning=_reasoning(fields))


def _reasoning(fields: Mapping[str, Any]) -> ReasoningMarkers | None:
    for name in _REASONING_FIELDS:
        field = fields.get(name)
        if isinstance(field, dict) and isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
            return ReasoningMarkers(field["open"], field["close"])
    return None


def _shape(calls: Mapping[str, Any]) -> CallShape | None:
    opening, closing = _parts(calls, "open"), _parts(calls, "close")
    transform = calls.get("transform")
    function = transform.get("function") if isinstance(transform, dict) else None
    if calls.get("content") != "json" or calls.get("content_args") or not opening or closing is None:
        return None
    begin, *name_end = opening
    (end,) = closing or ("",)
    if function == "{content}" and not name_end:
        return JsonCalls(begin, end, block_separator="\n")
    keys = _keys(function)
    if keys is None:
        return None
    if name_end:
        is_named = keys == ("name", "content")
        return NamedCalls(begin, name_end=name_end[0], call_end=end, block_separator="") if is_named else None
    if calls.get("transform_each"):
        return JsonCalls(begin, end, "[", "]", ", ", name_key=keys[0], arguments_key=keys[1])
    return JsonCalls(begin, end, block_separator="\n", name_key=keys[0], arguments_key=keys[1])


def _keys(function: object) -> tuple[str, str] | None:
    """Return the names of the values that become the name and the arguments."""
    if not isinstance(function, dict):
        return None
    matches = [_PLACEHOLDER.fullmatch(str(function.get(key))) for key in ("name", "arguments")]
    name, arguments = matches
    return (name[1], arguments[1]) if name and arguments else None


def _parts(field: Mapping[str, Any], key: str) -> list[str] | None:
    """Return the plain text of a field's marker, before and behind the name in it; None if it is no plain text."""
    literal, pattern = field.get(key), field.get(f"{key}_pattern")
    if isinstance(literal, str):
        return [literal]
    if not isinstance(pattern, str):
        return [] if key == "close" and literal is None and pattern is None else None
    parts = [_plain_text(part) for part in _NAME_GROUP.split(pattern)]
    texts = [part for part in parts if part is not None]
    return texts if len(texts) == len(parts) <= (2 if key == "open" else 1) and texts[0] else None


def _plain_text(pattern: str) -> str | None:
    """Return the text that a pattern without choices matches, less white space; None for other patterns."""
    without_space = _SPACE.sub("", pattern)
    if _SPECIAL.search(_ESCAPED.sub("", without_space)):
        return None
    return _ESCAPED.sub(r"\1", without_space)
