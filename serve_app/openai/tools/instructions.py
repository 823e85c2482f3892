"""Instructions of a conversation: messages of the roles `system` and `developer`, and a chat template's use of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product
from typing import Any

Turn = dict[str, Any]
Render = Callable[[list[Turn]], str]
"""Function that renders messages with the chat template; it may raise anything."""

_ROLES = ("system", "developer")
_JOINED = (("user", "user"), ("user", "tool"), ("assistant", "assistant"))
"""Roles of a message that may have to end the one before it, with the role of that one."""
_EARLIER, _PROBE, _ANY_ROLE, _ANSWER = "headway_earlier", "headway_probe", "headway_role", "headway_answer"
_SYSTEM: Turn = {"role": "system", "content": _EARLIER}
_USER: Turn = {"role": "user", "content": "hi"}
_ASSISTANT: Turn = {"role": "assistant", "content": _ANSWER}


class Place(Enum):
    """Place of an instruction in a conversation."""

    FIRST = auto()
    NEXT = auto()
    """Behind another instruction, at the beginning of the conversation."""
    LATER = auto()
    """Behind another turn, without an earlier instruction."""
    AGAIN = auto()
    """Behind another turn, with an earlier instruction."""


_BEFORE: Mapping[Place, tuple[Turn, ...]] = {
    Place.FIRST: (),
    Place.NEXT: (_SYSTEM,),
    Place.LATER: (_USER, _ASSISTANT),
    Place.AGAIN: (_SYSTEM, _USER, _ASSISTANT),
}
"""Turns before an instruction at each place, for the trial."""


@dataclass(frozen=True, slots=True)
class InstructionRules:
    """Roles and places of instructions that a chat template does not write; all others it writes."""

    unwritten: frozenset[tuple[str, Place]] = frozenset()
    """Instructions that the template refuses, or whose text, or that of an earlier one beside them, is not in the
    prompt behind the earlier turns. A developer's also if the template writes it as it would one of any role: the model
    knows no developers then."""
    joins_turns: bool = False
    """True if the template does not write messages of one role in succession."""

    @classmethod
    def probed(cls, render: Render) -> InstructionRules:
        """Return the rules of a template, found by trying."""
        unwritten = set()
        for role, place in product(_ROLES, Place):
            text, of_any_role = _prompt(render, role, place), _prompt(render, _ANY_ROLE, place)
            is_known = role == "system" or of_any_role is None or text != of_any_role.replace(_ANY_ROLE, role)
            if text is None or not (is_known and _has_in_order(text, place)):
                unwritten.add((role, place))
        text = _rendered(render, [_USER, {"role": "user", "content": _PROBE}])
        return cls(frozenset(unwritten), joins_turns=text is None or _PROBE not in text)

    def apply(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns in the form in which the template writes all of them, each behind those before it.

        1. A developer's message that the template does not write becomes a system message.
        2. An instruction that the template does not write at its place ends the instruction, the message of the user or
           the result before it. Behind the model's turn, or at the beginning, it becomes a message of the user.
        3. A message behind another of its role, or of the user behind a result, ends that one where the template does
           not write messages of one role in succession.
        """
        applied: list[Turn] = []
        for turn in turns:
            before = applied[-1]["role"] if applied else None
            joins = self.joins_turns and (turn["role"], before) in _JOINED and "tool_calls" not in applied[-1]
            if turn["role"] in _ROLES:
                place = _place_behind(applied)
                role = turn["role"] if self._writes(turn["role"], place) else "system"
                is_written = self._writes(role, place)
                joins = not is_written and before not in ("assistant", None)
                turn = turn | {"role": role if is_written else "user"}
            if joins:
                texts = (applied[-1].get("content"), turn.get("content"))
                applied[-1] = turn | applied[-1] | {"content": "\n\n".join(filter(None, texts))}
            else:
                applied.append(turn)
        return applied

    def _writes(self, role: str, place: Place) -> bool:
        return (role, place) not in self.unwritten


def _prompt(render: Render, role: str, place: Place) -> str | None:
    """Return the prompt of a conversation with an instruction; None: the template refuses it."""
    return _rendered(render, [*_BEFORE[place], {"role": role, "content": _PROBE}, _USER])


def _rendered(render: Render, turns: list[Turn]) -> str | None:
    """Return the prompt; None: the template refuses the turns."""
    try:
        return render(turns)
    # A template is the model's own program; whatever it raises means that it refuses this form.
    except Exception:
        return None


def _has_in_order(text: str, place: Place) -> bool:
    """Return True if a prompt has an instruction at a place, and behind it no text of the turns before it."""
    before = [turn["content"] for turn in _BEFORE[place] if turn is not _USER]
    places = [text.find(content) for content in (*before, _PROBE)]
    return -1 not in places and places == sorted(places)


def _place_behind(turns: Sequence[Turn]) -> Place:
    """Return the place of an instruction behind the given turns."""
    is_instruction = [turn["role"] in _ROLES for turn in turns]
    if all(is_instruction):
        return Place.NEXT if turns else Place.FIRST
    return Place.AGAIN if any(is_instruction) else Place.LATER
