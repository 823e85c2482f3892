"""Checker of the events of Anthropic's message streams, a state machine over their types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from testkit.http.named_events import read_named

_DELTAS = {
    "text": ("text_delta",),
    "thinking": ("thinking_delta", "signature_delta"),
    "tool_use": ("input_json_delta",),
}
"""Types of the deltas of each type of block."""
_PIECES = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
"""Field of each type of delta."""


@dataclass
class MessageStream:
    """Message as a strict client reads it of events: each must be allowed where it comes."""

    state: str = "start"
    """start, message (no block is open), block, ending (after `message_delta`), stopped or failed."""
    message: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    _input: str = ""

    def add(self, name: str, event: dict[str, Any]) -> None:
        """Add an event; fails if a client could not expect it."""
        assert name == event["type"], (name, event)
        assert self.state not in ("stopped", "failed"), f"{name} behind the end"
        if name == "ping":
            return
        if name == "error":
            self.state, self.error = "failed", event["error"]
            return
        self.state = _NEXT[self.state, name]
        getattr(self, f"_{name}")(event)

    def _message_start(self, event: dict[str, Any]) -> None:
        self.message = event["message"]
        assert (self.message["type"], self.message["role"], self.message["content"]) == ("message", "assistant", [])
        assert self.message["stop_reason"] is None and self.message["id"].startswith("msg_")

    def _content_block_start(self, event: dict[str, Any]) -> None:
        assert event["index"] == len(self.message["content"])
        self.message["content"].append(event["content_block"])
        self._input = ""

    def _content_block_delta(self, event: dict[str, Any]) -> None:
        block, delta = self.message["content"][-1], event["delta"]
        assert event["index"] == len(self.message["content"]) - 1
        assert delta["type"] in _DELTAS[block["type"]]
        assert not (block["type"] == "thinking" and block["signature"]), "a delta behind the signature"
        name = _PIECES[delta["type"]]
        assert delta[name], "an empty delta"
        if name == "partial_json":
            self._input += delta[name]
        else:
            block[name] += delta[name]

    def _content_block_stop(self, event: dict[str, Any]) -> None:
        block = self.message["content"][-1]
        assert event["index"] == len(self.message["content"]) - 1
        assert block["type"] != "thinking" or block["signature"]
        if block["type"] == "tool_use" and self._input:
            block["input"] = self._input

    def _message_delta(self, event: dict[str, Any]) -> None:
        assert event["delta"]["stop_reason"] is not None
        before = self.message["usage"]
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
            assert event["usage"][name] == before[name], "the counts of the prompt change"
        assert event["usage"]["output_tokens"] >= before["output_tokens"]
        self.message |= event["delta"] | {"usage": event["usage"]}

    def _message_stop(self, event: dict[str, Any]) -> None:
        assert event == {"type": "message_stop"}

    @property
    def whole_content(self) -> list[dict[str, Any]]:
        """Blocks with their inputs as objects; those of whole calls."""
        return [
            block | {"input": json.loads(block["input"])} if isinstance(block.get("input"), str) else block
            for block in self.message["content"]
        ]


_NEXT = {
    ("start", "message_start"): "message",
    ("message", "content_block_start"): "block",
    ("block", "content_block_delta"): "block",
    ("block", "content_block_stop"): "message",
    ("message", "message_delta"): "ending",
    ("ending", "message_stop"): "stopped",
}
"""State behind each event that a state allows."""


def read_messages(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a stream with their names."""
    events, is_done = read_named(text)
    assert not is_done
    return events


def checked(events: Sequence[tuple[str, dict[str, Any]]]) -> MessageStream:
    """Return the message that a strict client reads of a stream's events."""
    stream = MessageStream()
    for name, event in events:
        stream.add(name, event)
    return stream
