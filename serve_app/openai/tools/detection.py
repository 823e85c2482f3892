"""Detection of a model's family from its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import product
from typing import Any

from serve_app.openai.tools.families import FAMILIES, GENERIC, THINK, ChatFamily, ReasoningMarkers, ToolList
from serve_app.openai.tools.messages import prompt_messages

Render = Callable[[list[dict[str, Any]]], str]
"""Function that renders messages with the chat template; it may raise anything."""

_REASONING = (THINK, ReasoningMarkers("[THINK]", "[/THINK]"), ReasoningMarkers("<seed:think>", "</seed:think>"))
_PROBE = "headway_probe"


def detect(chat_template: str, added_tokens: Collection[str] = ()) -> ChatFamily:
    """Return the family of a chat template.

    A template without a sign of any family belongs to the family of which the tokenizer's added tokens are a sign.
    Without such a sign it is `generic`: the model is asked for the form of Hermes, the most common one.
    """
    family = _first_with_signs(chat_template) or _first_with_signs("\n".join(added_tokens)) or GENERIC
    return adapted(family, chat_template, added_tokens)


def adapted(family: ChatFamily, chat_template: str, added_tokens: Collection[str] = ()) -> ChatFamily:
    """Return the family with what a template says: its reasoning, and if it writes tools and earlier calls."""
    text = "\n".join([chat_template, *added_tokens])
    tool_list = family.tool_list
    if "tools" not in chat_template:
        tool_list = ToolList.SYSTEM_TEXT
    return replace(
        family,
        reasoning=family.reasoning or next((one for one in _REASONING if one.begin in text or one.end in text), None),
        tool_list=tool_list,
        renders_calls="tool_calls" in chat_template,
    )


def probed(family: ChatFamily, render: Render) -> ChatFamily:
    """Return the family with the form of earlier calls that a template renders, found by trying.

    Tries arguments as an object and as text, and a missing and an empty content beside the calls. If none of these
    shows the call's argument, earlier calls become text of the conversation.
    """
    for takes_text, takes_null in product((False, True), (True, False)):
        candidate = replace(family, renders_calls=True, takes_text_arguments=takes_text, takes_null_content=takes_null)
        if family.renders_calls and _shows_call(candidate, render):
            return candidate
    return replace(family, renders_calls=False)


def _first_with_signs(text: str) -> ChatFamily | None:
    for family in FAMILIES:
        if any(all(sign in text for sign in signs) for signs in family.signs):
            return family
    return None


def _shows_call(family: ChatFamily, render: Render) -> bool:
    arguments = json.dumps({_PROBE: f"{_PROBE}_value"})
    call = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    user: dict[str, Any] = {"role": "user", "content": "hi"}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "probe0001", "content": "{}"},
    ]
    try:
        text, base = render(prompt_messages(family, [user, *turns])), render([user])
    # A template is the model's own program; whatever it raises means that it refuses this form.
    except Exception:
        return False
    is_python = f"{{'{_PROBE}'" in text or text.count("None") > base.count("None")
    return f"{_PROBE}_value" in text and not is_python and f'\\"{_PROBE}' not in text
