"""Detection of a model's family from its chat template, and trials of what the template writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import product
from typing import Any

from serve_app.openai.tools.families import FAMILIES, GENERIC, THINK, ChatFamily, ReasoningMarkers, ToolList
from serve_app.openai.tools.instructions import InstructionRules
from serve_app.openai.tools.messages import prompt_messages

Messages = list[dict[str, Any]]
Render = Callable[[Messages, Messages], str]
"""Function that renders messages and tools with the chat template; it may raise anything."""

_REASONING = (THINK, ReasoningMarkers("[THINK]", "[/THINK]"), ReasoningMarkers("<seed:think>", "</seed:think>"))
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_PROBE = "headway_probe"
_USER: dict[str, Any] = {"role": "user", "content": "hi"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": f"{_PROBE}_tool",
        "description": "Description",
        "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "Text"}}},
    },
}


def detect(chat_template: str, added_tokens: Collection[str] = ()) -> ChatFamily:
    """Return the family of a chat template.

    A family's markers are what its model was trained to write, so their text in the template is the sign of the family.
    A template without a sign of any family belongs to the family of which the tokenizer's added tokens are a sign.
    Without such a sign it is `generic`: the model is asked for the form of Hermes, the most common one.
    """
    family = _first_with_signs(_COMMENT.sub("", chat_template)) or _first_with_signs("\n".join(added_tokens)) or GENERIC
    return adapted(family, chat_template, added_tokens)


def adapted(family: ChatFamily, chat_template: str, added_tokens: Collection[str] = ()) -> ChatFamily:
    """Return the family with the markers of reasoning in a template or among the added tokens."""
    text = "\n".join([_COMMENT.sub("", chat_template), *added_tokens])
    reasoning = next((markers for markers in _REASONING if markers.begin in text or markers.end in text), None)
    return replace(family, reasoning=family.reasoning or reasoning)


def probed(family: ChatFamily, render: Render) -> ChatFamily:
    """Return the family with what a template writes of tools, earlier calls and their results, found by trying.

    1. Instructions are tried in each role at each place.
    2. Tools that the template leaves out are described in the system message.
    3. Calls are tried with arguments as an object and as text, and with a missing and an empty content beside them. If
       none of these shows the call's argument, earlier calls become text of the conversation.
    4. Results that the template leaves out, and those of a template that knows neither tools nor calls, become text.
    """
    family = replace(family, instructions=InstructionRules.probed(lambda turns: render(turns, [])), renders_calls=False)
    family = replace(family, tool_list=_tool_list(family, render))
    for takes_text, takes_null in product((False, True), (True, False)):
        candidate = replace(family, renders_calls=True, takes_text_arguments=takes_text, takes_null_content=takes_null)
        if _shows_call(candidate, render):
            family = candidate
            break
    knows_tools = family.renders_calls or family.tool_list in (ToolList.TEMPLATE, ToolList.SYSTEM_FIELD)
    return replace(family, renders_results=knows_tools and _shows_result(family, render))


def _first_with_signs(text: str) -> ChatFamily | None:
    for family in FAMILIES:
        if any(all(sign in text for sign in signs) for signs in family.signs):
            return family
    return None


def _tool_list(family: ChatFamily, render: Render) -> ToolList:
    """Return the family's own place of tools if the template writes it, else the system message's text."""
    is_listed = family.tool_list is ToolList.TEMPLATE
    text = _rendered(render, prompt_messages(family, [_USER], [_TOOL]), [_TOOL] if is_listed else [])
    return family.tool_list if text is not None and _TOOL["function"]["name"] in text else ToolList.SYSTEM_TEXT


def _shows_call(family: ChatFamily, render: Render) -> bool:
    text = _rendered(render, prompt_messages(family, _with_call("{}")))
    base = _rendered(render, [_USER])
    if text is None or base is None:
        return False
    is_python = f"{{'{_PROBE}'" in text or text.count("None") > base.count("None")
    return f"{_PROBE}_value" in text and not is_python and f'\\"{_PROBE}' not in text


def _shows_result(family: ChatFamily, render: Render) -> bool:
    text = _rendered(render, prompt_messages(replace(family, renders_results=True), _with_call(f"{_PROBE}_result")))
    return text is not None and f"{_PROBE}_result" in text


def _with_call(result: str) -> Messages:
    """Return a conversation with a call and its result."""
    arguments = json.dumps({_PROBE: f"{_PROBE}_value"})
    call = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    return [
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "probe0001", "content": result},
    ]


def _rendered(render: Render, turns: Messages, tools: Messages | None = None) -> str | None:
    """Return the text; None: the template refuses the messages."""
    try:
        return render(turns, tools or [])
    # A template is the model's own program; whatever it raises means that it refuses this form.
    except Exception:
        return None
