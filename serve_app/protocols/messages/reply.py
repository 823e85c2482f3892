"""Answers of Anthropic's Messages API: blocks, and the events of a stream, from which the whole answer is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from replicas.protocol import TokenDelta
from serve_app.openai.reply.chat_format import ChatReader
from serve_app.openai.reply.fan_in import IndexedDelta
from serve_app.openai.reply.format import TEXT_PLACE, JsonObject, TextEvent, event
from serve_app.openai.tools.shapes.calls import CallArguments, CallBegin, Content, Event, Reasoning

_BLOCKS: dict[type[Event], str] = {Content: "text", Reasoning: "thinking"}
"""Types of the blocks of texts."""


class ContentBlocks:
    """Blocks of an answer: the events for what is read of the model's output.

    Invariants: at most one block is open; the blocks' indices are 0, 1, 2, ...; a block that has started ends.
    """

    def __init__(self, reply_id: str) -> None:
        self._reply_id = reply_id
        self._num_blocks = 0
        self._open: str | None = None
        """Type of the open block; None: there is none."""
        self._text_event: TextEvent | None = None
        """Events that add text to the open block; None: there were none yet."""

    def add(self, piece: Event) -> Iterator[JsonObject]:
        """Yield the events for a piece of the output."""
        match piece:
            case Content(text):
                yield from self._within(_BLOCKS[Content], {"text": ""})
                yield self._delta("text_delta", "text", text)
            case Reasoning(text):
                yield from self._within(_BLOCKS[Reasoning], {"thinking": "", "signature": ""})
                yield self._delta("thinking_delta", "thinking", text)
            case CallBegin(_, call_id, name):
                yield from self.end()
                yield from self._within("tool_use", {"id": call_id, "name": name, "input": {}})
            case CallArguments(_, text) if text:
                yield self._delta("input_json_delta", "partial_json", text)

    def written(self, piece: Event) -> bytes:
        """Return the events for a piece of the output as bytes, in place of `add`."""
        if not isinstance(piece, Content | Reasoning) or self._open != _BLOCKS[type(piece)]:
            return b"".join(map(event, self.add(piece)))
        if self._text_event is None:
            (payload,) = self.add(type(piece)(TEXT_PLACE))
            self._text_event = TextEvent(payload)
        return self._text_event.written(piece.text)

    def end(self) -> Iterator[JsonObject]:
        """Yield the events that end the open block, if there is one."""
        if self._open is None:
            return
        if self._open == _BLOCKS[Reasoning]:
            yield self._delta("signature_delta", "signature", f"{self._reply_id}-{self._num_blocks - 1}")
        self._open = None
        yield {"type": "content_block_stop", "index": self._num_blocks - 1}

    def _within(self, kind: str, fields: JsonObject) -> Iterator[JsonObject]:
        """Yield the events that end a block of another type and start one of this type; none if it is open."""
        if self._open == kind:
            return
        yield from self.end()
        self._open, self._text_event = kind, None
        self._num_blocks += 1
        block = {"type": kind, **fields}
        yield {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _delta(self, kind: str, name: str, text: str) -> JsonObject:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": {"type": kind, name: text}}


class MessageFormat(ChatReader):
    """Format of one answer: its events, and the whole answer, which is what a client makes of them."""

    ends_with_done = False

    def __init__(self, *chat: Any) -> None:
        """Create the format as a `ChatReader`."""
        super().__init__(*chat)
        self.keep_alive: JsonObject | None = {"type": "ping"}
        self._blocks = ContentBlocks(self.head.id)
        self._cached_tokens: int | None = None
        """Cached tokens at the begin of the message; a replica that continues it may have others. None: no begin."""
        self._ending: JsonObject = {}

    def opening(self, index: int) -> list[JsonObject]:
        """Return no event: the first one has the number of cached tokens, which comes with the first delta."""
        return []

    def written(self, item: IndexedDelta) -> bytes:
        """Return a delta's events as bytes, without those that end the message."""
        if self._cached_tokens is None or item.delta.finish_reason is not None:
            return b"".join(map(event, self.chunks(item)))
        return b"".join(map(self._blocks.written, self.parse(self.choices[0].events, item.delta)))

    def chunks(self, item: IndexedDelta) -> list[JsonObject]:
        """Return a delta's events, without those that end the message."""
        delta, (choice,) = item.delta, self.choices
        events: list[JsonObject] = []
        if self._cached_tokens is None:
            self._cached_tokens = delta.usage.cached_tokens
            events.append({"type": "message_start", "message": self._message(delta)})
        for piece in self.parse(choice.events, delta):
            events += self._blocks.add(piece)
        if delta.finish_reason is not None:
            events += self._blocks.end()
            self._ending = self._ending_of(choice.ending(delta))
        return events

    def closing(self, fields: JsonObject, usage: JsonObject) -> list[JsonObject]:
        """Return the events that end the message."""
        counts = self._usage(usage["completion_tokens"])
        return [{"type": "message_delta", "delta": self._ending, "usage": counts}, {"type": "message_stop"}]

    def failure(self, error: JsonObject, code: str | None, message: str) -> list[JsonObject]:
        """Return the error's event, the last one of a stream that failed."""
        return [error]

    def usage_details(self) -> JsonObject:
        """Return nothing: the events have their own counts."""
        return {}

    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the whole answer from the merged delta."""
        (delta,) = deltas
        return folded([*self.chunks(IndexedDelta(0, delta)), *self.closing({}, usage)])

    def _message(self, delta: TokenDelta) -> JsonObject:
        return {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(delta.usage.completion_tokens),
        }

    def _usage(self, output_tokens: int) -> JsonObject:
        """Return the counts; the prompt's tokens are those of the input and those read from the cache, together.

        Every prompt is cached without being asked, so that no tokens count as written to the cache.
        """
        cached_tokens = self._cached_tokens or 0
        return {
            "input_tokens": len(self.prompt_token_ids) - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": output_tokens,
            "output_tokens_details": {"thinking_tokens": self.num_reasoning_tokens},
            "service_tier": "standard",
        }

    def _ending_of(self, ending: JsonObject) -> JsonObject:
        """Return the reason of the end in Anthropic's words."""
        match ending["finish_reason"]:
            case "tool_calls":
                reason = "tool_use"
            case "length":
                # Without its own bound the answer has all that the context holds.
                reason = "max_tokens" if self.body.max_tokens is not None else "model_context_window_exceeded"
            case _:
                reason = "stop_sequence" if isinstance(ending["stop_reason"], str) else "end_turn"
        sequence = ending["stop_reason"] if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": sequence}


def folded(events: Sequence[JsonObject]) -> JsonObject:
    """Return the message that a client makes of the events of a whole stream."""
    message: JsonObject = {}
    inputs: dict[int, str] = {}
    for payload in events:
        match payload["type"]:
            case "message_start":
                message = payload["message"]
            case "content_block_start":
                message["content"].append(payload["content_block"])
            case "content_block_delta":
                _add(message["content"][payload["index"]], payload["delta"], inputs, payload["index"])
            case "message_delta":
                message |= payload["delta"] | {"usage": payload["usage"]}
    for index, text in inputs.items():
        # A call that the end of the answer cuts has what can be read of its input.
        message["content"][index]["input"] = from_json(text, allow_partial="trailing-strings")
    return message


def _add(block: JsonObject, delta: JsonObject, inputs: dict[int, str], index: int) -> None:
    """Add a delta to its block; the pieces of an input go to `inputs`."""
    if delta["type"] == "input_json_delta":
        inputs[index] = inputs.get(index, "") + delta["partial_json"]
        return
    (name,) = delta.keys() - {"type"}
    block[name] += delta[name]
