"""Checker of the events of response streams, a state machine over the types of OpenAI's SDK."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from testkit.http.named_events import read_named

_SDK: TypeAdapter[Any] = TypeAdapter(cast("Any", ResponseStreamEvent))
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_FIXED = ("name", "call_id", "namespace", "encrypted_content")
"""Fields that an item has from its begin on."""
_TEXTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "summary": ("response.reasoning_summary_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
"""Begin of the names of the events about each kind of item's text, and the field with the whole text."""


@dataclass
class ResponseStream:
    """Response as a strict client reads it of events: each must be allowed where it comes."""

    state: str = "start"
    """start, created, open (no item is), item (before its part), text, text_done, part_done, or the last event's."""
    response: dict[str, Any] = field(default_factory=dict)
    output: list[dict[str, Any]] = field(default_factory=list)
    num_events: int = 0
    _kind: str = ""
    _text: str = ""

    def add(self, name: str, event: dict[str, Any]) -> None:
        """Add an event; fails if a client could not expect it."""
        _SDK.validate_python(event)
        assert name == event["type"] and event["sequence_number"] == self.num_events, event
        self.num_events += 1
        if name in _ENDS:
            self._end(name, event["response"])
        elif name in ("response.created", "response.in_progress"):
            self._begin(name, event["response"])
        elif name == "response.output_item.added":
            self._add_item(event)
        else:
            assert event["output_index"] == len(self.output) - 1
            assert event.get("item_id", self.output[-1]["id"]) == self.output[-1]["id"]
            self._add_to_item(name, event)

    def _begin(self, name: str, response: dict[str, Any]) -> None:
        before, behind = ("start", "created") if name == "response.created" else ("created", "open")
        assert self.state == before and (response["status"], response["output"]) == ("in_progress", [])
        assert not self.response or response == self.response
        self.state, self.response = behind, response

    def _add_item(self, event: dict[str, Any]) -> None:
        item = event["item"]
        assert self.state == "open" and event["output_index"] == len(self.output), (self.state, event)
        assert item["status"] == "in_progress" and item["id"] not in [other["id"] for other in self.output]
        self.output.append(item)
        self._kind, self._text = item["type"], ""
        # A compaction has no event about its text.
        self.state = {"message": "item", "reasoning": "item", "compaction": "text_done"}.get(item["type"], "text")

    def _add_to_item(self, name: str, event: dict[str, Any]) -> None:
        if name in ("response.content_part.added", "response.reasoning_summary_part.added"):
            assert self.state == "item" and event["part"]["text"] == ""
            self._kind = "summary" if "summary" in name else self._kind
            self.state = "text"
        elif name in ("response.content_part.done", "response.reasoning_summary_part.done"):
            assert self.state == "text_done" and event["part"]["text"] == self._text
            assert ("summary" in name) == (self._kind == "summary")
            self.state = "part_done"
        elif name == "response.output_item.done":
            has_part = self._kind not in ("function_call", "custom_tool_call", "compaction")
            assert self.state == ("part_done" if has_part else "text_done")
            self._end_item(event["item"])
        else:
            begin, text = _TEXTS[self._kind]
            assert self.state == "text" and name in (f"{begin}.delta", f"{begin}.done"), (self.state, name)
            if name.endswith(".delta"):
                assert event["delta"], "an empty delta"
                self._text += event["delta"]
            else:
                assert event[text] == self._text
                self.state = "text_done"

    def _end_item(self, item: dict[str, Any]) -> None:
        added = self.output[-1]
        assert item["status"] in ("completed", "incomplete")
        assert {name: item[name] for name in ("id", "type")} == {name: added[name] for name in ("id", "type")}
        assert all(item[name] == added[name] for name in _FIXED if name in added)
        self.output[-1], self.state = item, "open"

    def _end(self, name: str, response: dict[str, Any]) -> None:
        status = name.removeprefix("response.")
        assert response["status"] == status and response["id"] == self.response["id"]
        assert (status == "failed") == (response["error"] is not None)
        assert (status == "incomplete") == (response["incomplete_details"] is not None)
        if status == "failed":
            assert [item["id"] for item in response["output"]] == [item["id"] for item in self.output]
        else:
            assert self.state == "open" and response["output"] == self.output
            assert response["usage"]["output_tokens"] > 0
        self.state, self.response = status, response


def read_responses(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a stream with their names; a stream that did not fail ends with `[DONE]`."""
    events, is_done = read_named(text)
    assert is_done == (events[-1][0] != "response.failed")
    return events


def checked_response(events: Sequence[tuple[str, dict[str, Any]]]) -> ResponseStream:
    """Return the response that a strict client reads of a stream's events."""
    stream = ResponseStream()
    for name, event in events:
        stream.add(name, event)
    assert stream.state in ("completed", "incomplete", "failed"), stream.state
    return stream
