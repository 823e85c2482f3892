"""Compaction of a conversation: the chat that asks for its summary, and the reply that has it encrypted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from replicas.errors import InvalidRequest
from replicas.protocol import TokenDelta
from serve_app.openai.reply.chat_format import ReplyKind
from serve_app.openai.reply.format import JsonObject
from serve_app.openai.request.parsing import parse_body
from serve_app.openai.request.schema import RequestOptions
from serve_app.protocols.adapted_chat import AdaptedChat, chat_of
from serve_app.protocols.responses.conversion import COMPACTION, ResponseRequest
from serve_app.protocols.responses.encrypted_content import ContentCipher
from serve_app.protocols.responses.reply import ReplyOptions, ResponseFormat
from serve_app.protocols.responses.schema import CompactBody
from serve_app.protocols.responses.stored import ANY_INPUT, parsed_items, stored_items
from serve_app.protocols.responses.truncation import INSTRUCTIONS, droppable_units

MAX_SUMMARY_TOKENS = 2048
_SUMMARY_SHARE = 4
"""Part of the context, or of the threshold, that a summary takes at most: a quarter."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_REQUEST = (
    "Write a summary of the conversation up to here. An assistant will continue it who sees your summary in place of "
    "all earlier messages. Keep what the user asked for and every condition, decisions and their reasons, facts, "
    "names, numbers, results of tools, and what is left to do. Write the summary alone, in at most {num_words} words."
)
_WORDS_OF_TOKENS = 0.6
"""Words of a text for each of its tokens, about."""


@dataclass(frozen=True, slots=True)
class ContinuedRequest:
    """Request for a response, with what is stored of its conversation."""

    asked: ResponseRequest
    history: tuple[str, ...]
    """Items before the request's own, as JSON."""
    cipher: ContentCipher

    @property
    def num_chars(self) -> int:
        """Size of the stored items, characters."""
        return sum(map(len, self.history))

    @property
    def threshold(self) -> int | None:
        """Most tokens of a prompt that is not compacted; None: what the context holds."""
        return next((options.compact_threshold for options in self.asked.body.context_management), None)

    def adapted(self, compaction: str | None = None) -> AdaptedChat:
        """Return the chat of the request, as `ResponseRequest.with_history` does."""
        return self.asked.with_history(parsed_items(self.history), self.cipher, compaction)

    def summary(self, adapted: AdaptedChat, num_tokens: int) -> AdaptedChat:
        """Return the chat that asks for the summary of the conversation, whose chat is `adapted`."""
        return summary_chat(adapted, self.asked.items(parsed_items(self.history)), self.cipher, num_tokens)


def compact_request(fields: JsonObject) -> ResponseRequest:
    """Return the request for a response whose conversation the fields of POST /v1/responses/compact have.

    Raises:
        InvalidRequest: a field cannot be served; the error names it.
    """
    body = parse_body(CompactBody, fields, {})
    if body.input is not None:
        return ResponseRequest.of({**fields, "store": False})
    if body.previous_response_id is None:
        message = "`input` is missing; it, or else `previous_response_id`, must be given"
        raise InvalidRequest(message, "input", "missing_required_parameter")
    asked = ResponseRequest.of({**fields, "store": False, "input": ANY_INPUT})
    return replace(asked, fields={**asked.fields, "input": []})


def most_summary_tokens(max_model_len: int, threshold: int | None) -> int:
    """Return the most tokens of a summary: a quarter of the context or the threshold, at most 2,048."""
    return max(1, min(MAX_SUMMARY_TOKENS, min(max_model_len, threshold or max_model_len) // _SUMMARY_SHARE))


def can_be_compacted(adapted: AdaptedChat) -> bool:
    """Return True if a compaction would take a message out of the prompt."""
    roles = [message.role for message in adapted.chat.messages]
    num_instructions = sum(role in INSTRUCTIONS for role in roles)
    has_question = any(role == "user" and index != adapted.summary for index, role in enumerate(roles))
    return len(roles) > num_instructions + (adapted.summary is not None) + has_question


def summary_chat(
    adapted: AdaptedChat, items: Sequence[JsonObject], cipher: ContentCipher, num_tokens: int
) -> AdaptedChat:
    """Return the chat that asks for the summary of a conversation; its reply is a `response.compaction`.

    Args:
        adapted: Chat of the conversation.
        items: Its items.
        cipher: Cipher of the summary.
        num_tokens: Most tokens of the summary.

    What does not fit the context is dropped as with `truncation`; an earlier summary stays.
    """
    turns = [message.turn() for message in adapted.chat.messages]
    options = {*RequestOptions.model_fields, *_SAMPLING} & adapted.chat.model_fields_set
    request = _REQUEST.format(num_words=max(1, int(num_tokens * _WORDS_OF_TOKENS)))
    chat = {
        **adapted.chat.model_dump(include=options),
        "messages": [*turns, {"role": "user", "content": request}],
        "max_completion_tokens": num_tokens,
        "reasoning_effort": "none",
        "chat_template_kwargs": adapted.chat.chat_template_kwargs,
    }
    reply = ReplyKind("resp_", partial(CompactionFormat, cipher, kept_items(items)))
    droppable = droppable_units(turns, adapted.summary)
    return AdaptedChat(chat_of(chat, adapted.names), reply, adapted.names, droppable=droppable, summary=adapted.summary)


def kept_items(items: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the items that stand before the compaction of a conversation, as the client sends them the next time.

    These are the instructions, the user's messages since the last compaction, and the user's last message.
    """
    messages = {index: item["role"] for index, item in enumerate(items) if item.get("type", "message") == "message"}
    start = max((index for index, item in enumerate(items) if item.get("type") == COMPACTION), default=-1)
    last = max((index for index, role in messages.items() if role == "user"), default=-1)
    return [
        items[index]
        for index, role in messages.items()
        if role in INSTRUCTIONS or (role == "user" and (index > start or index == last))
    ]


class CompactionFormat(ResponseFormat):
    """Format of a compacted conversation, which is never streamed."""

    def __init__(self, cipher: ContentCipher, kept: list[JsonObject], *chat: Any) -> None:
        """Create the format of a cipher and the items before the compaction, and as a `ChatReader`."""
        super().__init__(ReplyOptions({}, {}, has_summary=False, encrypt=None), *chat)
        self._cipher = cipher
        self._kept = kept

    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the object `response.compaction` from the summary's merged delta."""
        response = super().full_reply(deltas, usage)
        compaction = {
            "id": f"cmp_{self.head.id.partition('_')[2]}",
            "type": COMPACTION,
            "encrypted_content": self._cipher.encrypt(COMPACTION, _text_of(response["output"])),
        }
        return {
            "id": self.head.id,
            "object": "response.compaction",
            "created_at": self.head.created,
            "output": [*parsed_items(stored_items(self._kept, self.head.id)), compaction],
            "usage": response["usage"],
        }


def _text_of(output: Sequence[JsonObject]) -> str:
    """Return the text of a summary; that of the reasoning if the model wrote nothing else."""
    texts: dict[str, str] = {}
    for item in output:
        texts[item["type"]] = texts.get(item["type"], "") + "".join(part["text"] for part in item["content"])
    return texts.get("message") or texts.get("reasoning", "")


def compacted_content(reply: JsonObject) -> str:
    """Return the encrypted summary in an object `response.compaction`."""
    content: str = reply["output"][-1]["encrypted_content"]
    return content
