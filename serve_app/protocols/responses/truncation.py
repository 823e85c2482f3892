"""Truncation of a conversation that exceeds the context: messages that may be dropped, the first ones first."""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.openai.reply.format import JsonObject

INSTRUCTIONS = ("system", "developer")
"""Roles of instructions."""

Unit = tuple[int, ...]
"""Indices of messages that are dropped together."""


def droppable_units(turns: Sequence[JsonObject], summary: int | None = None) -> tuple[Unit, ...]:
    """Return the messages of a chat that may be dropped, in the order in which they are.

    1. Instructions, the message `summary` of a compaction and the user's last message stay.
    2. Before that message, each message of the user is dropped with the turns behind it, so that the user still speaks
       first.
    3. Behind that message, each turn of the model is dropped alone.
    4. A result is dropped with its call, wherever it stands.
    """
    last_user = max((index for index, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    units: list[list[int]] = []
    unit_of_call: dict[str, list[int]] = {}
    for index, turn in enumerate(turns):
        if turn["role"] in INSTRUCTIONS or index in (last_user, summary):
            continue
        if turn["role"] == "tool":
            unit_of_call[turn["tool_call_id"]].append(index)
            continue
        if not units or turn["role"] == "user" or index > last_user:
            units.append([])
        units[-1].append(index)
        unit_of_call |= {call["id"]: units[-1] for call in turn.get("tool_calls", ())}
    return tuple(map(tuple, units))
