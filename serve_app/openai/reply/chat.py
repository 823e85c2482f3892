"""Replies of chat completions in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.protocol import PositionLogprobs, TokenDelta, TokenLogprob
from serve_app.openai.reply.fan_in import IndexedDelta
from serve_app.openai.reply.format import JsonObject, ReplyHead, shown_logprob
from serve_app.openai.request.schema import ChatBody
from serve_app.openai.tokenize.token_text import TokenText


class ChatFormat:
    """Format of one chat completion's reply."""

    def __init__(self, head: ReplyHead, body: ChatBody, prompt_token_ids: Sequence[int], token_text: TokenText) -> None:
        self._head = head
        self._body = body
        self._prompt_token_ids = prompt_token_ids
        self._token_text = token_text
        self._started: set[int] = set()

    def chunk(self, item: IndexedDelta) -> list[JsonObject]:
        """Return a delta's chunks: a choice's role before its first content, then content, then the finish reason."""
        delta, chunks = item.delta, []
        if item.index not in self._started:
            chunks.append(self._chunk(item.index, {"role": "assistant", "content": ""}))
            if self._body.return_token_ids and not self._started:
                chunks[0]["prompt_token_ids"] = list(self._prompt_token_ids)
            self._started.add(item.index)
        if delta.text or delta.logprobs or (self._body.return_token_ids and delta.token_ids):
            content = self._chunk(item.index, {"content": delta.text})
            content["choices"][0] |= self._tokens_of(delta)
            chunks.append(content)
        if delta.finish_reason is not None:
            last = self._chunk(item.index, {})
            last["choices"][0] |= _ending(delta)
            chunks.append(last)
        return chunks

    def usage_chunk(self, usage: JsonObject) -> JsonObject:
        """Return the last chunk of a stream with usage; it has no choices."""
        return self._head.fields("chat.completion.chunk") | {"choices": [], "usage": usage}

    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the whole completion from one merged delta per choice."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                **self._tokens_of(delta),
                **_ending(delta),
            }
            for index, delta in enumerate(deltas)
        ]
        reply = self._head.fields("chat.completion") | {"choices": choices, "usage": usage}
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = list(self._prompt_token_ids)
        return reply

    def _chunk(self, index: int, message: JsonObject) -> JsonObject:
        choice = {"index": index, "delta": message, "logprobs": None, "finish_reason": None}
        return self._head.fields("chat.completion.chunk") | {"choices": [choice]}

    def _tokens_of(self, delta: TokenDelta) -> JsonObject:
        """Return a choice's fields about its tokens: log probabilities and token ids."""
        fields: JsonObject = {"logprobs": None}
        if self._body.logprobs:
            fields["logprobs"] = {"content": [self._position(position) for position in delta.logprobs], "refusal": None}
        if self._body.return_token_ids:
            fields["token_ids"] = list(delta.token_ids)
        return fields

    def _position(self, position: PositionLogprobs) -> JsonObject:
        return self._token(position.chosen) | {"top_logprobs": [self._token(token) for token in position.top]}

    def _token(self, token: TokenLogprob) -> JsonObject:
        return {
            "token": self._token_text.name_of(token.token_id),
            "bytes": list(self._token_text.bytes_of(token.token_id)),
            "logprob": shown_logprob(token.logprob),
        }


def _ending(delta: TokenDelta) -> JsonObject:
    """Return a choice's finish reason and the stop string or token that ended the choice (vLLM's `stop_reason`)."""
    assert delta.finish_reason is not None
    return {"finish_reason": delta.finish_reason.value, "stop_reason": delta.stop_reason}
