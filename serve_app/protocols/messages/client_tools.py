"""Tools that Anthropic's API describes by their type: those that clients run, as functions.

Anthropic's models know these tools from their training, so that requests have no schemas of them. Other models get a
description and a schema here. All other types run on Anthropic's server only, or give images back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEXT = {"type": "string"}
_LINES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}


def _schema(required: tuple[str, ...], **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _command(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """Tool that a client runs."""

    name: str
    """Name where the request gives none."""
    description: str
    input_schema: dict[str, Any]


_EDITOR = _schema(
    ("command", "path"),
    command=_command("view", "create", "str_replace", "insert"),
    path=_TEXT,
    view_range=_LINES | {"description": "first and last line for view; -1: to the end"},
    file_text=_TEXT | {"description": "text of the file for create"},
    old_str=_TEXT | {"description": "text that str_replace replaces; it must occur once"},
    new_str=_TEXT | {"description": "text in its place"},
    insert_line={"type": "integer", "description": "line after which insert puts insert_text; 0: before the first"},
    insert_text=_TEXT,
)
_MEMORY = _schema(
    ("command",),
    command=_command("view", "create", "str_replace", "insert", "delete", "rename"),
    path=_TEXT | {"description": "path below /memories"},
    view_range=_LINES,
    file_text=_TEXT,
    old_str=_TEXT,
    new_str=_TEXT,
    insert_line={"type": "integer"},
    insert_text=_TEXT,
    old_path=_TEXT,
    new_path=_TEXT,
)
_BASH = _schema(
    (),
    command=_TEXT | {"description": "command to run"},
    restart={"type": "boolean", "description": "true to start the shell anew"},
)
_TOOLS = {
    "bash": ClientTool("bash", "Run a command in a bash session that keeps its state between calls.", _BASH),
    "text_editor": ClientTool("str_replace_based_edit_tool", "View, create and edit text files.", _EDITOR),
    "memory": ClientTool("memory", "Read and write the files in /memories, which outlast this conversation.", _MEMORY),
}


def client_tool(kind: str) -> ClientTool | None:
    """Return the tool of a type such as `bash_20250124`; None: a client cannot run it, or not with texts alone."""
    return _TOOLS.get(kind.rpartition("_")[0])
