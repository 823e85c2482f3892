"""One choice of a chat: its answer, its reasoning and its calls, parsed out of the output's text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from replicas.protocol import FinishReason, TokenDelta
from serve_app.openai.tokenize.prompt_tokenizer import TokenText
from serve_app.openai.tools.parser import OutputParser
from serve_app.openai.tools.shapes.calls import CallArguments, CallBegin, Content, Event, Reasoning

JsonObject = dict[str, Any]


class ReasoningTokens:
    """Counter of a choice's tokens before the marker that ends its reasoning."""

    def __init__(self, end: str | None, token_text: TokenText) -> None:
        """Create the counter; `end` is the marker, None if there is none."""
        self._end = end
        self._token_text = token_text
        self._text = ""
        self._token_ids: list[int] = []
        self._is_reasoning = False
        self.count = 0

    def add(self, delta: TokenDelta, has_reasoning: bool) -> None:
        """Add a delta; `has_reasoning` is true if some of its text is reasoning."""
        self._is_reasoning = self._is_reasoning or has_reasoning
        if self._end is None:
            return
        self._text += delta.text
        self._token_ids += delta.token_ids
        at = self._text.find(self._end)
        if self._is_reasoning:
            self.count = len(self._token_ids) if at < 0 else self._num_before(len(self._text[:at].encode()))
        if at >= 0:
            self._end = None

    def _num_before(self, num_bytes: int) -> int:
        """Return the number of tokens that begin before this many bytes of the text."""
        position = 0
        for number, token_id in enumerate(self._token_ids):
            if position >= num_bytes:
                return number
            position += len(self._token_text.bytes_of(token_id))
        return len(self._token_ids)


class ChatChoice:
    """Choice of a chat, read delta by delta."""

    def __init__(
        self, make_parser: Callable[[], OutputParser] | None, include_reasoning: bool, token_text: TokenText
    ) -> None:
        """Create the choice; without a parser all text is the answer."""
        self._parser = None if make_parser is None else make_parser()
        self._include_reasoning = include_reasoning
        end = None if self._parser is None else self._parser.reasoning_end
        self._reasoning = ReasoningTokens(end, token_text)

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of output tokens before the end of the reasoning."""
        return self._reasoning.count

    @property
    def num_malformed_calls(self) -> int:
        """Number of calls that were malformed or cut off."""
        return 0 if self._parser is None else self._parser.num_malformed

    def events(self, delta: TokenDelta) -> list[Event]:
        """Return what a delta adds to the message; of each text one piece at a time."""
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        self._reasoning.add(delta, any(isinstance(event, Reasoning) for event in events))
        return [event for event in _joined(events) if self._is_shown(event)]

    def message(self, delta: TokenDelta) -> JsonObject:
        """Return the whole message from the choice's merged delta."""
        message: JsonObject = {"role": "assistant", "content": "", "refusal": None}
        for part in map(part_of, self.events(delta)):
            if "tool_calls" in part:
                _add_call(message.setdefault("tool_calls", []), *part["tool_calls"])
                continue
            for name, text in part.items():
                message[name] = message.get(name, "") + text
        if "tool_calls" in message and not message["content"]:
            message["content"] = None
        return message

    def ending(self, delta: TokenDelta) -> JsonObject:
        """Return the finish reason and the stop string or token that ended the choice (vLLM's `stop_reason`).

        A choice that ends within a call, such as at a stop string, does not finish with `tool_calls`: a client would
        run it.
        """
        assert delta.finish_reason is not None
        has_calls = self._parser is not None and self._parser.has_whole_calls
        calls = has_calls and delta.finish_reason is FinishReason.STOP
        return {"finish_reason": "tool_calls" if calls else delta.finish_reason.value, "stop_reason": delta.stop_reason}

    def _is_shown(self, event: Event) -> bool:
        return self._include_reasoning or not isinstance(event, Reasoning)


def _joined(events: Iterable[Event]) -> list[Event]:
    """Return the events, with successive pieces of one text joined."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        match last, event:
            case Content(before), Content(text):
                joined[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                joined[-1] = CallArguments(index, before + text)
            case _:
                joined.append(event)
    return joined


def part_of(event: Event) -> JsonObject:
    """Return an event as a part of OpenAI's message."""
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallBegin(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _add_call(calls: list[JsonObject], part: JsonObject) -> None:
    """Add a part of a call to the message's calls."""
    index = part.pop("index")
    if index == len(calls):
        calls.append(part)
    else:
        calls[index]["function"]["arguments"] += part["function"]["arguments"]
