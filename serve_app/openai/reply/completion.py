"""Replies of text completions in OpenAI's format."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from replicas.protocol import PositionLogprobs, TokenDelta
from serve_app.openai.reply.fan_in import IndexedDelta
from serve_app.openai.reply.format import JsonObject, ReplyHead, shown_logprob
from serve_app.openai.request.schema import CompletionBody, EncodedPrompt
from serve_app.openai.tokenize.token_text import TokenText


class CompletionFormat:
    """Format of one text completion's reply; choice i is a sample of prompt i // n."""

    def __init__(
        self, head: ReplyHead, body: CompletionBody, prompts: Sequence[EncodedPrompt], token_text: TokenText
    ) -> None:
        """Create the format; with `echo` every prompt must have its text."""
        self._head = head
        self._body = body
        self._choices = [
            _Choice(body, prompt, index * body.n + sample, token_text)
            for index, prompt in enumerate(prompts)
            for sample in range(body.n)
        ]

    def chunk(self, item: IndexedDelta) -> list[JsonObject]:
        """Return one chunk for a delta, or none while there is nothing to show."""
        delta = item.delta
        choice = self._choices[item.index]
        is_echo = self._body.echo and not choice.has_started
        is_shown = is_echo or delta.text or delta.logprobs or delta.prompt_logprobs
        if not (is_shown or delta.finish_reason is not None or (self._body.return_token_ids and delta.token_ids)):
            return []
        return [self._head.fields("text_completion") | {"choices": [choice.render(delta)]}]

    def usage_chunk(self, usage: JsonObject) -> JsonObject:
        """Return the last chunk of a stream with usage; it has no choices."""
        return self._head.fields("text_completion") | {"choices": [], "usage": usage}

    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the whole completion from one merged delta per choice."""
        choices = [choice.render(delta) for choice, delta in zip(self._choices, deltas, strict=True)]
        return self._head.fields("text_completion") | {"choices": choices, "usage": usage}


class _Choice:
    """One choice of a completion, written delta by delta."""

    def __init__(self, body: CompletionBody, prompt: EncodedPrompt, index: int, token_text: TokenText) -> None:
        self._body = body
        self._prompt = prompt
        self._index = index
        self._offsets = _TextOffsets(token_text)
        self._token_text = token_text
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
        for position in (*delta.prompt_logprobs, *delta.logprobs):
            self._append(lists, position.chosen.token_id, position)
        return lists

    def _append(self, lists: JsonObject, token_id: int, position: PositionLogprobs | None) -> None:
        """Append one token's entries; `position` is None for a prompt's first token, which has no probability."""
        name_of = self._token_text.name_of
        lists["tokens"].append(name_of(token_id))
        lists["text_offset"].append(self._offsets.add(token_id))
        lists["token_logprobs"].append(None if position is None else shown_logprob(position.chosen.logprob))
        if position is None:
            lists["top_logprobs"].append(None)
            return
        # The chosen token is listed even if it is not among the likeliest ones.
        tokens = (*position.top, position.chosen)
        lists["top_logprobs"].append({name_of(token.token_id): shown_logprob(token.logprob) for token in tokens})


class _TextOffsets:
    """Counter of the offset of each token in the text, in characters; special tokens have no text."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0

    def add(self, token_id: int) -> int:
        """Return the offset of the next token and advance past the token's text."""
        offset = self._num_chars
        if not self._token_text.is_special(token_id):
            self._num_chars += len(self._decoder.decode(self._token_text.bytes_of(token_id)))
        return offset
