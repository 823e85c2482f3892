"""Tools, calls, and the events that a parser reports."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]

_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Tool:
    """Function that a model may call."""

    name: str
    parameters: JsonObject | None = None
    """JSON schema of the arguments; None allows any object."""
    strict: bool = False
    """True if calls must follow `parameters` even where the model chooses freely."""

    @property
    def properties(self) -> JsonObject:
        """Schemas of the arguments by name."""
        properties = (self.parameters or {}).get("properties")
        return properties if isinstance(properties, dict) else {}


@dataclass(frozen=True, slots=True)
class Call:
    """Complete call of a tool."""

    name: str
    arguments: JsonObject
    id: str = ""

    @property
    def arguments_json(self) -> str:
        """Arguments as chat templates write them."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Content:
    """Piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Piece of the text that the model thought before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Begin of a call; its arguments follow in pieces."""

    index: int
    """Place among the choice's calls."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Piece of a call's arguments, which are the text of a JSON object."""

    index: int
    text: str


Event = Content | Reasoning | CallBegin | CallArguments


def random_id(rng: random.Random, prefix: str = "call_", length: int = 24) -> str:
    """Return an id of letters and digits behind a prefix."""
    return prefix + "".join(rng.choices(_ID_CHARS, k=length))


class Sink:
    """Receiver of the text and the calls that a parser reads.

    With `whole_calls` a call is reported when it has ended and is valid. Otherwise its name is reported as soon as it
    is known, and its arguments as they arrive.
    """

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str], whole_calls: bool) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.whole_calls = whole_calls
        self.num_calls = 0
        self.num_malformed = 0
        self.num_broken = 0
        """Calls that were reported and have no valid arguments."""
        self._new_id = new_id
        self._events: list[Event] = []
        self._waiting: list[Event] = []

    def add_content(self, text: str) -> None:
        """Report a piece of the answer's text."""
        if text:
            self._events.append(Content(text))

    def add_reasoning(self, text: str) -> None:
        """Report a piece of the reasoning."""
        if text:
            self._events.append(Reasoning(text))

    def begin(self, name: str, call_id: str | None = None) -> None:
        """Report a call's name."""
        self._report(CallBegin(self.num_calls, call_id or self._new_id(), name))

    def add_arguments(self, text: str) -> None:
        """Report a piece of the arguments of the call that has begun."""
        if text:
            self._report(CallArguments(self.num_calls, text))

    def add_call(self, name: str, arguments: str, call_id: str | None = None) -> None:
        """Report a complete, valid call."""
        self.begin(name, call_id)
        self.add_arguments(arguments)
        self.end(is_valid=True)

    def end(self, is_valid: bool) -> bool:
        """End the call that has begun; return True if it was reported."""
        is_reported = is_valid or not self.whole_calls
        if is_reported:
            self._events += self._waiting
            self.num_calls += 1
            self.num_broken += not is_valid
        self._waiting.clear()
        self.num_malformed += not is_valid
        return is_reported

    def refuse(self) -> None:
        """Count a call that was malformed before it was reported."""
        self.num_malformed += 1

    def take_events(self) -> list[Event]:
        """Return the events since the last call of this method."""
        events, self._events = self._events, []
        return events

    def _report(self, event: Event) -> None:
        (self._waiting if self.whole_calls else self._events).append(event)
