"""Format of a response: the events of its stream, and the whole response, from the same items."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replicas.protocol import FinishReason, PositionLogprobs, TokenDelta
from serve_app.openai.reply.chat_format import ChatReader
from serve_app.openai.reply.fan_in import IndexedDelta
from serve_app.openai.reply.format import JsonObject, event
from serve_app.openai.tools.shapes.calls import Content
from serve_app.protocols.responses.output import Output
from serve_app.protocols.responses.toolset import ToolName

_END = b"}\n\n"
"""End of an event."""


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """Options of a response, from its request."""

    echo: JsonObject
    """Fields of the request that the response repeats."""
    names: Mapping[str, ToolName]
    """Tools by the names of their functions."""
    has_summary: bool
    """True if the reasoning is a summary."""
    encrypt: Callable[[str], str] | None
    """Function that makes the `encrypted_content` of a reasoning; None: it has none."""
    compaction: str | None = None
    """Encrypted summary with which the output begins; None: the request made none."""


class ResponseFormat(ChatReader):
    """Format of one response.

    Invariants: events are numbered 0, 1, 2, ...; the first two show the response as created and in progress; the last
    one has the whole response.
    """

    ends_with_done = True
    keep_alive: JsonObject | None = None

    def __init__(self, options: ReplyOptions, *chat: Any, clock: Callable[[], float] = time.time) -> None:
        """Create the format from options and as a `ChatReader`; `clock` gives the time of completion, unix seconds."""
        super().__init__(*chat)
        self._options = options
        self._clock = clock
        self._output = Output(self.head.id, options.names, options.has_summary, options.encrypt)
        self._num_events = 0
        self._positions: list[PositionLogprobs] = []
        """Log probabilities that no text has had yet."""
        self._num_taken = 0
        """Output tokens before those."""
        self._status = "in_progress"

    def opening(self, index: int) -> list[JsonObject]:
        """Return the events of the response's begin, before its first delta."""
        if self._num_events:
            return []
        response = self._response()
        states = [{"type": f"response.{state}", "response": response} for state in ("created", "in_progress")]
        return self._numbered([*states, *self._begin_output()])

    def chunks(self, item: IndexedDelta) -> list[JsonObject]:
        """Return a delta's events."""
        return self._numbered(self._read(item.delta))

    def written(self, item: IndexedDelta) -> bytes:
        """Return a delta's events as bytes."""
        if self.body.logprobs or item.delta.finish_reason is not None:
            return b"".join(map(event, self.chunks(item)))
        parts: list[bytes] = []
        for piece in self.parse(self.choices[0].events, item.delta):
            part = self._output.written(piece)
            if part is None:
                parts += map(event, self._numbered(self._output.add([piece])))
            else:
                parts.append(part.removesuffix(_END) + b',"sequence_number":%d' % self._num_events + _END)
                self._num_events += 1
        return b"".join(parts)

    def closing(self, fields: JsonObject, usage: JsonObject) -> list[JsonObject]:
        """Return the last event of a stream, with the whole response."""
        return self.last({**self._response(usage), **fields})

    def last(self, response: JsonObject) -> list[JsonObject]:
        """Return the last event of a stream, with a response that has ended."""
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    @property
    def compaction(self) -> str | None:
        """Encrypted summary with which the output begins; None: there is none."""
        return self._options.compaction

    def begun(self, status: str) -> JsonObject:
        """Return the response as it is before its first delta, with a status."""
        return self._response() | {"status": status}

    def failure(self, error: JsonObject, code: str | None, message: str) -> list[JsonObject]:
        """Return the last event of a stream that failed, with the response up to there."""
        opening = self.opening(0)
        self._status = "failed"
        # SDKs know few codes; the error's own one is its type.
        response = {**self._response(), "error": {"code": "server_error", "type": code, "message": message}}
        return opening + self.last(response)

    def usage_details(self) -> JsonObject:
        """Return the number of reasoning tokens."""
        return {"completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens}}

    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the whole response from its merged delta."""
        (delta,) = deltas
        for _ in self._read(delta):
            pass
        return self._response(usage | self.usage_details())

    def _begin_output(self) -> Iterator[JsonObject]:
        """Yield the events of the compaction, if the output begins with one."""
        if self._options.compaction is not None and not self._output.items:
            yield from self._output.add_compaction(self._options.compaction)

    def _read(self, delta: TokenDelta) -> Iterator[JsonObject]:
        yield from self._begin_output()
        events = self.parse(self.choices[0].events, delta)
        self._positions += delta.logprobs
        has_text = any(isinstance(event, Content) for event in events)
        yield from self._output.add(events, self._logprobs() if has_text else ())
        if delta.finish_reason is not None:
            is_whole = delta.finish_reason is FinishReason.STOP
            yield from self._output.finish(is_whole, self._logprobs())
            self._status = "completed" if is_whole else "incomplete"

    def _logprobs(self) -> list[JsonObject]:
        """Return the log probabilities that no text has had yet, without those of the reasoning, which comes first."""
        num_hidden = max(0, self.num_reasoning_tokens - self._num_taken)
        self._num_taken += len(self._positions)
        positions, self._positions = self._positions[num_hidden:], []
        return [self.position(position) for position in positions]

    def _numbered(self, events: Iterable[JsonObject]) -> list[JsonObject]:
        numbered = [{**event, "sequence_number": number} for number, event in enumerate(events, self._num_events)]
        self._num_events += len(numbered)
        return numbered

    def _response(self, usage: JsonObject | None = None) -> JsonObject:
        """Return the response as it is now; the last item may be in progress if the response failed."""
        is_cut = self._status == "incomplete"
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "completed_at": int(self._clock()) if self._status == "completed" else None,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self.head.model,
            "service_tier": self.head.service_tier,
            "temperature": self.body.temperature,
            "top_p": self.body.top_p,
            **self._options.echo,
            "output": [item.view() for item in self._output.items],
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: JsonObject) -> JsonObject:
    """Return the usage object of a response from that of a chat."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
