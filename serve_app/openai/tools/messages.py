"""Conversations with calls and results, in the form that chat templates expect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from replicas.errors import InvalidRequest
from serve_app.openai.tools.families import ChatFamily, ToolList
from serve_app.openai.tools.shapes.calls import Call, JsonObject
from serve_app.openai.tools.shapes.json_text import parse_json


def prompt_messages(
    family: ChatFamily, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()
) -> list[JsonObject]:
    """Return a conversation in OpenAI's form as the family's chat template expects it.

    Args:
        family: Family of the template, adapted to it.
        messages: Messages of the request; they are left as they are.
        tools: Tools in OpenAI's form. A template that lists tools itself gets them as its own argument; for others
            they are written into the system message.

    Raises:
        InvalidRequest: the arguments of a call are no JSON object.
    """
    names = _call_names(messages)
    turns = [_turn(family, place, dict(message), names) for place, message in enumerate(messages)]
    if not family.renders_results:
        turns = _with_results_as_text(turns)
    if tools and family.tool_list is not ToolList.TEMPLATE:
        turns = _with_tools(family, turns, tools)
    return family.instructions.apply(turns)


def _call_names(messages: Sequence[JsonObject]) -> dict[str, str]:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return {str(call.get("id")): call["function"]["name"] for call in calls}


def _turn(family: ChatFamily, place: int, turn: JsonObject, names: Mapping[str, str]) -> JsonObject:
    if turn.get("role") == "tool":
        call_id = str(turn.get("tool_call_id", ""))
        if turn.get("name") is None and call_id in names:
            turn["name"] = names[call_id]
        turn["tool_call_id"] = _prompt_id(family, call_id)
    calls = turn.pop("tool_calls", None)
    if not calls:
        return turn
    parsed = [_call(family, call, f"messages[{place}].tool_calls[{number}]") for number, call in enumerate(calls)]
    if not family.renders_calls:
        text = turn.get("content")
        return turn | {"content": (f"{text}\n" if text else "") + family.calls.write(parsed)}
    if not turn.get("content"):
        turn["content"] = None if family.takes_null_content else ""
    return turn | {"tool_calls": [_call_object(family, call) for call in parsed]}


def _call(family: ChatFamily, call: JsonObject, place: str) -> Call:
    text = call["function"].get("arguments") or "{}"
    try:
        arguments: Any = parse_json(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        param = f"{place}.function.arguments"
        raise InvalidRequest(f"{param} must be the text of a JSON object, and is {text[:100]!r}", param)
    return Call(call["function"]["name"], arguments, _prompt_id(family, str(call.get("id", ""))))


def _call_object(family: ChatFamily, call: Call) -> JsonObject:
    arguments = call.arguments_json if family.takes_text_arguments else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _prompt_id(family: ChatFamily, call_id: str) -> str:
    """Return the id of a call for the prompt; Mistral's templates refuse ids of any other length than their own."""
    if family.id_prefix or len(call_id) == family.id_length:
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[: family.id_length]


def _with_results_as_text(turns: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the turns with each run of results as one message of the user, for templates that leave results out."""
    merged: list[JsonObject] = []
    was_result = False
    for turn in turns:
        is_result = turn.get("role") == "tool"
        if is_result:
            text = f"<tool_response>\n{turn.get('content')}\n</tool_response>"
            if was_result:
                merged[-1]["content"] += f"\n{text}"
            else:
                merged.append({"role": "user", "content": text})
        else:
            merged.append(turn)
        was_result = is_result
    return merged


def _with_tools(family: ChatFamily, turns: list[JsonObject], tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the turns with the tools in the system message."""
    has_system = bool(turns) and turns[0].get("role") in ("system", "developer")
    system = turns[0] if has_system else {"role": "system", "content": ""}
    rest = turns[1:] if has_system else turns
    if family.tool_list is ToolList.SYSTEM_FIELD:
        return [system | {"tools": json.dumps(list(tools), ensure_ascii=False)}, *rest]
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = family.calls.write([Call("function_name", {"argument": "value"})])
    as_list = json.dumps(list(tools), ensure_ascii=False)
    text = family.tool_prompt.format(tools=listed, tool_list=as_list, call=example)
    return [system | {"content": "\n\n".join(filter(None, [system.get("content"), text]))}, *rest]
