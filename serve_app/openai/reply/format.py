"""Replies of chat and text completions in OpenAI's format, streamed or whole."""

from __future__ import annotations

import codecs
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json

from replicas.protocol import FinishReason, ModelCard, PositionLogprobs, TokenDelta, TokenLogprob, Usage
from serve_app.openai.reply.fan_in import IndexedDelta
from serve_app.openai.request.pooled_schema import AnyBody
from serve_app.openai.request.schema import CompletionBody, EncodedPrompt, GenerationBody
from serve_app.openai.tokenize.prompt_tokenizer import TokenText

JsonObject = dict[str, Any]
ResultT = TypeVar("ResultT")

MIN_LOGPROB = -9999.0
"""Log probability shown for a probability of zero, as in OpenAI's API: JSON has no infinity."""
_ITEMS_PER_PIECE = 256
"""Items of a list in one piece of its JSON."""
TEXT_PLACE = "\0text\0"
"""Text in the object of a `TextEvent`, where the texts of its events go."""


def event(payload: JsonObject) -> bytes:
    """Return a server-sent event with a JSON object as its data; its name is the object's `type`, if it has one."""
    name = payload.get("type")
    return (b"" if name is None else f"event: {name}\n".encode()) + b"data: " + to_json(payload) + b"\n\n"


class TextEvent:
    """Events of a stream that differ in their texts alone: the bytes around the text are made once."""

    def __init__(self, payload: JsonObject) -> None:
        """`payload` is the object of an event with the text `TEXT_PLACE`, in one field or in several."""
        self._around = event(payload).split(to_json(TEXT_PLACE))

    def written(self, text: str) -> bytes:
        """Return the event with a text."""
        return to_json(text).join(self._around)


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Fields that every chunk of a reply repeats."""

    id: str
    created: int
    """Time of the request's arrival, whole unix seconds."""
    model: str
    system_fingerprint: str
    service_tier: str
    """OpenAI's name of the band in which the request runs."""

    def fields(self, kind: str) -> JsonObject:
        """Return the head fields of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": self.service_tier,
            "system_fingerprint": self.system_fingerprint,
        }


class Progress:
    """Progress of a request: token counts, finish reasons of its choices, and the replica that serves it."""

    def __init__(self, prompt_lengths: Sequence[int], num_samples: int) -> None:
        """Create the progress; choice i is a sample of prompt i // `num_samples`."""
        self._prompt_lengths = prompt_lengths
        self._num_samples = num_samples
        self._usages: dict[int, Usage] = {}
        self._finish_reasons: dict[int, FinishReason] = {}
        self.replica_id: str | None = None

    def add(self, item: IndexedDelta) -> None:
        """Add the usage, finish reason and replica id of a delta."""
        self._usages[item.index] = item.delta.usage
        if item.delta.finish_reason is not None:
            self._finish_reasons[item.index] = item.delta.finish_reason
        if item.delta.stats is not None:
            self.replica_id = item.delta.stats.replica_id

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; each prompt counts once."""
        return sum(self._prompt_lengths)

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all samples."""
        return sum(usage.completion_tokens for usage in self._usages.values())

    @property
    def cached_tokens(self) -> int:
        """Cached prompt tokens of each prompt's first sample; later samples only hit blocks that the first computed."""
        first_samples = range(0, len(self._prompt_lengths) * self._num_samples, self._num_samples)
        return sum(self._usages[index].cached_tokens for index in first_samples if index in self._usages)

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the choices that have ended, in order of choice."""
        return [reason.value for _, reason in sorted(self._finish_reasons.items())]

    def usage(self) -> JsonObject:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Parsing:
    """Time in which the outputs of a chat were parsed for calls and reasoning; monotonic seconds."""

    clock: Callable[[], float] = time.monotonic
    start_s: float | None = None
    """Start of the first piece; None: nothing was parsed yet."""
    end_s: float | None = None
    """End of the last piece."""
    busy_s: float = 0.0
    """Time of all pieces; between them the model computed the next tokens."""

    def timed(self, parse: Callable[[TokenDelta], ResultT], delta: TokenDelta) -> ResultT:
        """Return what `parse` makes of a delta, and add its time."""
        started_s = self.clock()
        parsed = parse(delta)
        self.end_s = self.clock()
        self.busy_s += self.end_s - started_s
        self.start_s = started_s if self.start_s is None else self.start_s
        return parsed


class CompletionFormat:
    """Format of one text completion's reply; choice i is a sample of prompt i // n."""

    ends_with_done = True
    keep_alive: JsonObject | None = None

    def __init__(
        self, head: ReplyHead, body: CompletionBody, prompts: Sequence[EncodedPrompt], token_text: TokenText
    ) -> None:
        """Create the format; with `echo` every prompt must have its text."""
        self._head = head
        self._body = body
        self._has_only_text = body.logprobs is None and not body.return_token_ids
        """True if chunks of a stream show nothing but text."""
        self._text_events: dict[int, TextEvent] = {}
        self._choices = [
            _Choice(body, prompt, index * body.n + sample, token_text)
            for index, prompt in enumerate(prompts)
            for sample in range(body.n)
        ]

    def opening(self, index: int) -> list[JsonObject]:
        """Return no chunk: a text completion has no role."""
        return []

    parsing: Parsing | None = None
    """Time of the parsing: a text completion has nothing to parse."""
    num_malformed_calls = 0
    """Number of malformed calls: a text completion has none."""

    def usage_details(self) -> JsonObject:
        """Return nothing: a text completion has no reasoning."""
        return {}

    def chunks(self, item: IndexedDelta) -> list[JsonObject]:
        """Return one chunk for a delta, or none while there is nothing to show."""
        delta = item.delta
        choice = self._choices[item.index]
        is_echo = self._body.echo and not choice.has_started
        is_shown = is_echo or delta.text or delta.logprobs or delta.prompt_logprobs
        if not (is_shown or delta.finish_reason is not None or (self._body.return_token_ids and delta.token_ids)):
            return []
        return [self._head.fields("text_completion") | {"choices": [choice.render(delta)]}]

    def written(self, item: IndexedDelta) -> bytes:
        """Return a delta's events, with `usage` null if the last event has it."""
        delta, choice = item.delta, self._choices[item.index]
        is_plain = self._has_only_text and delta.text and delta.finish_reason is None
        if not is_plain or (self._body.echo and not choice.has_started):
            return b"".join([event(chunk | null_usage(self._body)) for chunk in self.chunks(item)])
        if (text_event := self._text_events.get(item.index)) is None:
            plain = delta._replace(text=TEXT_PLACE)
            chunk = self._head.fields("text_completion") | {"choices": [choice.render(plain)]}
            text_event = self._text_events[item.index] = TextEvent(chunk | null_usage(self._body))
        return text_event.written(delta.text)

    def closing(self, fields: JsonObject, usage: JsonObject) -> list[JsonObject]:
        """Return the last chunk of a stream, with fields about the whole request, if there are any; no choices."""
        return [self._head.fields("text_completion") | {"choices": [], **fields}] if fields else []

    def failure(self, error: JsonObject, code: str | None, message: str) -> list[JsonObject]:
        """Return OpenAI's error object, the last event of a stream that failed."""
        return [error]

    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the whole completion from one merged delta per choice."""
        absent = dict.fromkeys(("prompt_token_ids", "token_ids", "prompt_logprobs"))
        choices = [absent | choice.render(delta) for choice, delta in zip(self._choices, deltas, strict=True)]
        return self._head.fields("text_completion") | {"choices": choices, "usage": usage}


class _Choice:
    """One choice of a completion, written delta by delta."""

    def __init__(self, body: CompletionBody, prompt: EncodedPrompt, index: int, token_text: TokenText) -> None:
        self._body = body
        self._prompt = prompt
        self._index = index
        self._offsets = _TextOffsets(token_text, (prompt.text or "") if body.echo else "")
        self._token_text = token_text
        self._name_of = namer(body, token_text)
        self.has_started = False

    def render(self, delta: TokenDelta) -> JsonObject:
        """Return the choice object for this delta; with `echo` the first one starts with the prompt."""
        is_first, self.has_started = not self.has_started, True
        text = (self._prompt.text or "") + delta.text if is_first and self._body.echo else delta.text
        choice: JsonObject = {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs(delta, is_first),
            "finish_reason": None if delta.finish_reason is None else delta.finish_reason.value,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(delta, self._body.prompt_logprobs, self._token_text)
        if self._body.return_token_ids:
            if is_first:
                choice["prompt_token_ids"] = list(self._prompt.token_ids)
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def _logprobs(self, delta: TokenDelta, is_first: bool) -> JsonObject | None:
        if self._body.logprobs is None:
            return None
        lists: JsonObject = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if is_first and self._body.echo:
            self._append(lists, self._prompt.token_ids[0], None)
        for position in (*(delta.prompt_logprobs if self._body.echo else ()), *delta.logprobs):
            self._append(lists, position.chosen.token_id, position)
        return lists

    def _append(self, lists: JsonObject, token_id: int, position: PositionLogprobs | None) -> None:
        """Append one token's entries; `position` is None for a prompt's first token, which has no probability."""
        name_of = self._name_of
        lists["tokens"].append(name_of(token_id))
        lists["text_offset"].append(self._offsets.add(token_id))
        lists["token_logprobs"].append(None if position is None else shown_logprob(position.chosen.logprob))
        if position is None:
            lists["top_logprobs"].append(None)
            return
        # The chosen token is listed even if it is not among the most probable ones. It is the first, as in vLLM.
        tokens = (position.chosen, *position.top[: self._body.logprobs])
        lists["top_logprobs"].append({name_of(token.token_id): shown_logprob(token.logprob) for token in tokens})


class _TextOffsets:
    """Counter of the offset of each token in the text, in characters.

    A special token has text only where the prompt spells it.
    """

    def __init__(self, token_text: TokenText, prompt: str) -> None:
        self._token_text = token_text
        self._prompt = prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0

    def add(self, token_id: int) -> int:
        """Return the offset of the next token and advance past the token's text."""
        offset = self._num_chars
        if not self._token_text.is_special(token_id) or self._is_spelled(token_id):
            self._num_chars += len(self._decoder.decode(self._token_text.bytes_of(token_id)))
        return offset

    def _is_spelled(self, token_id: int) -> bool:
        name = self._token_text.name_of(token_id)
        return name != "" and self._prompt.startswith(name, self._num_chars)


class ReplyFormat(Protocol):
    """Format of one request's reply, streamed or whole, from the same deltas."""

    ends_with_done: bool
    """True if `[DONE]` ends a stream."""
    keep_alive: JsonObject | None
    """Event that shows a client that the stream goes on; None: a comment does."""
    parsing: Parsing | None
    """Time of the parsing; None: there is nothing to parse."""

    @property
    def num_malformed_calls(self) -> int:
        """Number of calls that were malformed or cut off."""

    def opening(self, index: int) -> list[JsonObject]:
        """Return the events before a delta of choice `index`; they have no token."""

    def chunks(self, item: IndexedDelta) -> list[JsonObject]:
        """Return the events for a delta."""

    def written(self, item: IndexedDelta) -> bytes:
        """Return the events for a delta as bytes, in place of `chunks`: each delta is read once."""

    def closing(self, fields: JsonObject, usage: JsonObject) -> list[JsonObject]:
        """Return the last events of a stream; `fields` are those about the whole request that the client asked for."""

    def failure(self, error: JsonObject, code: str | None, message: str) -> list[JsonObject]:
        """Return the last events of a stream that failed; `error` is the error's body."""

    def usage_details(self) -> JsonObject:
        """Return the part of the usage object that is about reasoning; empty for a model that does not reason."""

    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the whole reply from one merged delta per choice."""


@functools.lru_cache(maxsize=16)
def fingerprint_of(card: ModelCard) -> str:
    """Return a name for the configuration on which the output of a seed depends."""
    decisive = (card.model_id, card.dtype, card.device, card.max_model_len, card.vocab_size)
    return f"fp_{hashlib.sha256(repr(decisive).encode()).hexdigest()[:10]}"


def null_usage(body: AnyBody) -> JsonObject:
    """Return the field that each chunk of a stream has if the last one has the usage."""
    return {"usage": None} if body.stream_options is not None and body.stream_options.include_usage else {}


def namer(body: GenerationBody, token_text: TokenText) -> Callable[[int], str]:
    """Return the function that names the tokens of log probabilities."""
    return "token_id:{}".format if body.return_tokens_as_token_ids else token_text.name_of


def prompt_logprobs(delta: TokenDelta, num_top: int, token_text: TokenText) -> list[JsonObject | None]:
    """Return vLLM's list of a prompt's log probabilities: null for the first token, then one map for each."""
    return [None, *(_ranked(position, num_top, token_text) for position in delta.prompt_logprobs)]


def _ranked(position: PositionLogprobs, num_top: int, token_text: TokenText) -> JsonObject:
    ranks: dict[TokenLogprob, int | None] = {position.chosen: None}
    ranks |= {token: rank for rank, token in enumerate(position.top[:num_top], start=1)}
    return {
        str(token.token_id): {
            "logprob": shown_logprob(token.logprob),
            "rank": rank,
            "decoded_token": token_text.name_of(token.token_id),
        }
        for token, rank in ranks.items()
    }


def shown_logprob(logprob: float) -> float:
    """Return a log probability that JSON can express, at least `MIN_LOGPROB`."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def json_in_pieces(value: object) -> bytes:
    """Return a value as JSON, written in pieces between which other threads may run: one call would hold the GIL."""
    return b"".join(_pieces(value))


def _pieces(value: object) -> Iterator[bytes]:
    if isinstance(value, dict) and value:
        for index, (name, item) in enumerate(value.items()):
            yield (b"," if index else b"{") + to_json(name) + b":"
            yield from _pieces(item)
        yield b"}"
    elif isinstance(value, list) and len(value) > _ITEMS_PER_PIECE:
        for start in range(0, len(value), _ITEMS_PER_PIECE):
            yield (b"," if start else b"[") + to_json(value[start : start + _ITEMS_PER_PIECE])[1:-1]
        yield b"]"
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield b"," if index else b"["
            yield from _pieces(item)
        yield b"]"
    else:
        yield to_json(value)
