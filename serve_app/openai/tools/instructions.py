"""Instructions of a conversation: messages of the roles `system` and `developer`, and a chat template's use of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product
from typing import Any

from replicas.errors import InvalidRequest

Turn = dict[str, Any]
Render = Callable[[list[Turn]], str]
"""Function that renders messages with the chat template; it may raise anything."""

_ROLES = ("system", "developer")
_EARLIER, _PROBE, _ANY_ROLE = "headway_earlier", "headway_probe", "headway_role"
_SYSTEM: Turn = {"role": "system", "content": _EARLIER}
_USER: Turn = {"role": "user", "content": "hi"}
_ASSISTANT: Turn = {"role": "assistant", "content": "hello"}


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

    left_out: frozenset[tuple[str, Place]] = frozenset()
    """Instructions whose text, or that of an earlier one beside them, is not in the prompt. A developer's also if the
    template writes it as it would one of any role: the model knows no developers then."""
    refused: frozenset[tuple[str, Place]] = frozenset()
    """Instructions for which the template raises an error."""

    @classmethod
    def probed(cls, render: Render) -> InstructionRules:
        """Return the rules of a template, found by trying."""
        left_out, refused = set(), set()
        for role, place in product(_ROLES, Place):
            text, of_any_role = _prompt(render, role, place), _prompt(render, _ANY_ROLE, place)
            if text is None:
                refused.add((role, place))
                continue
            is_known = role == "system" or of_any_role is None or text != of_any_role.replace(_ANY_ROLE, role)
            has_earlier = _EARLIER in text or _SYSTEM not in _BEFORE[place]
            if not (is_known and has_earlier and _PROBE in text):
                left_out.add((role, place))
        return cls(frozenset(left_out), frozenset(refused))

    def apply(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns in the form in which the template writes every instruction.

        1. A developer's message that the template does not write becomes a system message.
        2. At the beginning, an instruction that the template does not write behind another is appended to that one.
        3. One that the template refuses stays as it is, so that the template gives its reason.

        Raises:
            InvalidRequest: the template would leave an instruction out.
        """
        applied: list[Turn] = []
        for index, turn in enumerate(turns):
            if turn["role"] not in _ROLES:
                applied.append(turn)
                continue
            place = _place_behind(applied)
            role = turn["role"] if self._writes(turn["role"], place) else "system"
            if place is Place.NEXT and not self._writes(role, place):
                applied[-1] = applied[-1] | {"content": f"{applied[-1]['content']}\n\n{turn['content']}"}
            elif (role, place) in self.left_out:
                raise _left_out(index, turn["role"], place)
            else:
                applied.append(turn | {"role": role})
        return applied

    def _writes(self, role: str, place: Place) -> bool:
        return (role, place) not in self.left_out | self.refused


def _prompt(render: Render, role: str, place: Place) -> str | None:
    """Return the prompt of a conversation with an instruction; None: the template refuses it."""
    try:
        return render([*_BEFORE[place], {"role": role, "content": _PROBE}, _USER])
    # A template is the model's own program; whatever it raises means that it refuses this form.
    except Exception:
        return None


def _place_behind(turns: Sequence[Turn]) -> Place:
    """Return the place of an instruction behind the given turns."""
    is_instruction = [turn["role"] in _ROLES for turn in turns]
    if all(is_instruction):
        return Place.NEXT if turns else Place.FIRST
    return Place.AGAIN if any(is_instruction) else Place.LATER


def _left_out(index: int, role: str, place: Place) -> InvalidRequest:
    where = "" if place is Place.FIRST else " at this place"
    param = f"messages[{index}].role"
    message = f'`{param}` is "{role}"; the model\'s chat template leaves out messages of this role{where}'
    return InvalidRequest(message, param, "unsupported_parameter")
