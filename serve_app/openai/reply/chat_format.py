"""Replies of chats: the reader of their outputs, and OpenAI's format of chat completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from replicas.protocol import PositionLogprobs, TokenDelta, TokenLogprob
from serve_app.openai.reply.chat_choice import ChatChoice, part_of
from serve_app.openai.reply.fan_in import IndexedDelta
from serve_app.openai.reply.format import (
    TEXT_PLACE,
    JsonObject,
    Parsing,
    ReplyFormat,
    ReplyHead,
    TextEvent,
    event,
    namer,
    null_usage,
    prompt_logprobs,
    shown_logprob,
)
from serve_app.openai.request.schema import ChatBody
from serve_app.openai.tokenize.prompt_tokenizer import TokenText
from serve_app.openai.tools.parser import OutputParser
from serve_app.openai.tools.shapes.calls import Content, Event, Reasoning

ResultT = TypeVar("ResultT")


class ChatReader:
    """Reader of a chat's outputs: what each delta adds to a choice, with its log probabilities and the counts."""

    def __init__(
        self,
        head: ReplyHead,
        body: ChatBody,
        prompt_token_ids: Sequence[int],
        token_text: TokenText,
        make_parser: Callable[[], OutputParser] | None = None,
    ) -> None:
        """Create the reader; without a parser all text is the answer."""
        self.choices = [ChatChoice(make_parser, body.include_reasoning, token_text) for _ in range(body.n)]
        self.parsing = None if make_parser is None else Parsing()
        """Time of the parsing; None: there is nothing to parse."""
        self.head = head
        self.body = body
        self.prompt_token_ids = prompt_token_ids
        self.token_text = token_text
        self.started: set[int] = set()
        """Choices whose stream has begun."""
        self._name_of = namer(body, token_text)

    def parse(self, read: Callable[[TokenDelta], ResultT], delta: TokenDelta) -> ResultT:
        """Return what a choice's method makes of a delta, and note its time."""
        return read(delta) if self.parsing is None else self.parsing.timed(read, delta)

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of output tokens before the ends of the reasoning."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def num_malformed_calls(self) -> int:
        """Number of calls that were malformed or cut off."""
        return sum(choice.num_malformed_calls for choice in self.choices)

    def position(self, position: PositionLogprobs) -> JsonObject:
        """Return the log probabilities at one position of the output."""
        return self._token(position.chosen) | {"top_logprobs": [self._token(token) for token in position.top]}

    def _token(self, token: TokenLogprob) -> JsonObject:
        return {
            "token": self._name_of(token.token_id),
            "bytes": list(self.token_text.bytes_of(token.token_id)),
            "logprob": shown_logprob(token.logprob),
        }


class ChatFormat(ChatReader):
    """Format of one chat completion's reply; calls and reasoning are parsed out of the text."""

    ends_with_done = True
    keep_alive: JsonObject | None = None

    def __init__(self, *chat: Any) -> None:
        """Create the format as a `ChatReader`."""
        super().__init__(*chat)
        self._has_only_text = not (self.body.logprobs or self.body.return_token_ids)
        """True if chunks of a stream show nothing of their tokens."""
        self._text_events: dict[tuple[int, type[Event]], TextEvent] = {}

    def opening(self, index: int) -> list[JsonObject]:
        """Return the chunk with the role, which has no token, for a choice that has none yet."""
        if index in self.started:
            return []
        opening = self._chunk(index, {"role": "assistant", "content": ""})
        if self.body.return_token_ids and not self.started:
            opening["prompt_token_ids"] = list(self.prompt_token_ids)
        self.started.add(index)
        return [opening]

    def chunks(self, item: IndexedDelta) -> list[JsonObject]:
        """Return a delta's chunks: content, then the finish reason."""
        return self._chunks(item, self.parse(self.choices[item.index].events, item.delta))

    def written(self, item: IndexedDelta) -> bytes:
        """Return a delta's events, with `usage` null if the last event has it."""
        events = self.parse(self.choices[item.index].events, item.delta)
        if self._has_only_text and item.delta.finish_reason is None:
            return b"".join([self._event(item.index, piece) for piece in events])
        return b"".join([event(chunk | null_usage(self.body)) for chunk in self._chunks(item, events)])

    def _event(self, index: int, piece: Event) -> bytes:
        """Return the event of a piece of a choice's message."""
        if not isinstance(piece, Content | Reasoning):
            return event(self._chunk(index, part_of(piece)) | null_usage(self.body))
        kind = type(piece)
        if (text_event := self._text_events.get((index, kind))) is None:
            chunk = self._chunk(index, part_of(kind(TEXT_PLACE)))
            text_event = self._text_events[index, kind] = TextEvent(chunk | null_usage(self.body))
        return text_event.written(piece.text)

    def _chunks(self, item: IndexedDelta, events: Sequence[Event]) -> list[JsonObject]:
        delta, choice = item.delta, self.choices[item.index]
        parts = [part_of(piece) for piece in events]
        if not parts and (delta.logprobs or (self.body.return_token_ids and delta.token_ids)):
            parts = [{"content": ""}]
        chunks = [self._chunk(item.index, part) for part in parts]
        if chunks:
            chunks[0]["choices"][0] |= self._tokens_of(delta)
        if delta.finish_reason is not None:
            last = self._chunk(item.index, {})
            last["choices"][0] |= choice.ending(delta)
            chunks.append(last)
        return chunks

    def usage_details(self) -> JsonObject:
        """Return the part of the usage object that is about reasoning; empty for a model that does not reason."""
        if self.parsing is None:
            return {}
        return {"completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens}}

    def closing(self, fields: JsonObject, usage: JsonObject) -> list[JsonObject]:
        """Return the last chunk of a stream, with fields about the whole request, if there are any; no choices."""
        return [self.head.fields("chat.completion.chunk") | {"choices": [], **fields}] if fields else []

    def failure(self, error: JsonObject, code: str | None, message: str) -> list[JsonObject]:
        """Return OpenAI's error object, the last event of a stream that failed."""
        return [error]

    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the whole completion from one merged delta per choice."""
        choices = [
            {
                "index": index,
                "message": self.parse(choice.message, delta),
                "token_ids": None,
                **self._tokens_of(delta),
                **choice.ending(delta),
            }
            for index, (choice, delta) in enumerate(zip(self.choices, deltas, strict=True))
        ]
        # The reasoning is counted while the choices are read, so its part of the usage comes after them.
        usage |= self.usage_details()
        reply = self.head.fields("chat.completion") | {"choices": choices, "usage": usage}
        reply |= {"prompt_token_ids": None, "prompt_logprobs": None}
        if self.body.return_token_ids:
            reply["prompt_token_ids"] = list(self.prompt_token_ids)
        if self.body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(deltas[0], self.body.prompt_logprobs, self.token_text)
        return reply

    def _chunk(self, index: int, message: JsonObject) -> JsonObject:
        choice = {"index": index, "delta": message, "logprobs": None, "finish_reason": None}
        return self.head.fields("chat.completion.chunk") | {"choices": [choice]}

    def _tokens_of(self, delta: TokenDelta) -> JsonObject:
        """Return a choice's fields about its tokens: log probabilities and token ids."""
        fields: JsonObject = {"logprobs": None}
        if self.body.logprobs:
            fields["logprobs"] = {"content": [self.position(position) for position in delta.logprobs], "refusal": None}
        if self.body.return_token_ids:
            fields["token_ids"] = list(delta.token_ids)
        return fields


ChatReply = Callable[[ReplyHead, ChatBody, Sequence[int], TokenText, Callable[[], OutputParser] | None], ReplyFormat]


@dataclass(frozen=True, slots=True)
class ReplyKind:
    """Kind of reply to a chat: OpenAI's chat completion, or the answer of another protocol."""

    id_prefix: str
    """Begin of the reply's id."""
    make: ChatReply
    """Function that makes the reply's format, as `ChatReader` is made."""
    lowers_max_tokens: bool = False
    """True if `max_tokens` may be more than the context or the API key allows, and is then lowered. Otherwise it is
    refused."""


CHAT_COMPLETION = ReplyKind("chatcmpl-", ChatFormat)
