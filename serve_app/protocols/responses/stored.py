"""Stored responses: the items of their inputs, and their events as a function of what is stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import from_json, to_json

from replicas.protocol import FinishReason, TokenDelta, Usage
from serve_app.openai.reply.fan_in import IndexedDelta
from serve_app.openai.reply.format import JsonObject, event
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.reply.stored_run import StoredRun, unpacked
from serve_app.openai.service import CompletionService
from serve_app.protocols.responses.conversion import ResponseRequest
from serve_app.protocols.responses.encrypted_content import ContentCipher
from serve_app.protocols.responses.reply import ResponseFormat

_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "compaction": "cmp",
}  # fmt: skip
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAMED_ITEM = re.compile(r"[a-z]+_(.+)_i?[0-9]+")
ANY_INPUT = "."
"""Input of a request whose own is stored or missing."""
_NO_USAGE = Usage(0, 0, 0)
_LOST = "the process that answered has ended"


def stored_items(given: object, owner_id: str, start: int = 0) -> tuple[str, ...]:
    """Return the items of an input as JSON, each with an id; `owner_id` is that of their response or conversation.

    `start` is the number of the first one.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    assert isinstance(items, list)
    suffix = owner_id.partition("_")[2]
    return tuple(to_json(_with_id(item, suffix, number)).decode() for number, item in enumerate(items, start))


def _with_id(item: dict[str, Any], suffix: str, number: int) -> JsonObject:
    kind = item.get("type", "message")
    given = item.get("id")
    # Another id could not stand in a path.
    item_id = given if given and _ID.fullmatch(given) else f"{_PREFIXES[kind]}_{suffix}_i{number}"
    stored = {"id": None, "type": kind, "status": "completed", **item} | {"id": item_id}
    if kind == "message" and isinstance(item["content"], str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        stored["content"] = [{"type": part, "text": item["content"]}]
    return stored


def response_id_of(item_id: str) -> str | None:
    """Return the id of the response after which an item was named; None: it was not."""
    named = _NAMED_ITEM.fullmatch(item_id)
    return None if named is None else f"resp_{named[1]}"


def parsed_items(items: Sequence[str]) -> list[JsonObject]:
    """Return stored items as the input of a request has them."""
    return [from_json(item) for item in items]


def restored(
    service: CompletionService, key: bytes, run: StoredRun, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> PreparedCompletion:
    """Return the completion of a stored run, which goes on behind `output`; its format gives the response's events.

    `key` is that of encrypted contents.
    """
    cipher = ContentCipher(key, run.account)
    adapted = ResponseRequest.of({**run.fields, "input": ANY_INPUT}).with_history((), cipher, run.compaction)
    run = replace(run, request=replace(run.request, output_token_ids=tuple(output)))
    return service.restored(run, prompt, adapted.chat, adapted.reply)


def stored_delta(start: int, token_ids: bytes, text: str, finish: str | None) -> TokenDelta:
    """Return a delta of a response from what is stored of it; `start` tokens were before it."""
    reason = None if finish is None else FinishReason(finish)
    return TokenDelta("", start, unpacked(token_ids), text, _NO_USAGE, finish_reason=reason)


def response_object(response: str, output: Sequence[str], status: str) -> JsonObject:
    """Return a stored response from its parts; one that failed without an answer gets the error of a lost process."""
    stored: JsonObject = from_json(response)
    changes: JsonObject = {"status": status, "output": parsed_items(output)}
    if status == "failed" and stored["error"] is None:
        changes["error"] = {"code": "server_error", "type": "replica_lost", "message": _LOST}
    return stored | changes


def split_response(response: JsonObject) -> tuple[str, tuple[str, ...]]:
    """Return a response as JSON without its output, and the output's items as JSON."""
    output = tuple(to_json(item).decode() for item in response["output"])
    return to_json(response | {"output": []}).decode(), output


class StoredEvents:
    """Events of a response in the background: a function of its run and its deltas, so that every read is the same."""

    def __init__(self, prepared: PreparedCompletion, starting_after: int = -1) -> None:
        """Create the events of a response that `restored` returned; those up to `starting_after` are left out."""
        assert isinstance(prepared.format, ResponseFormat)
        self._format = prepared.format
        self._after = starting_after
        self._num_tokens = 0

    def opening(self) -> bytes:
        """Return the first events."""
        return self._written(self._format.opening(0))

    def add(self, token_ids: bytes, text: str, finish: str | None) -> bytes:
        """Return the events of the next delta."""
        delta = stored_delta(self._num_tokens, token_ids, text, finish)
        self._num_tokens += len(delta.token_ids)
        return self._written(self._format.chunks(IndexedDelta(0, delta)))

    def end(self, response: JsonObject) -> bytes:
        """Return the last event, with the whole response."""
        return self._written(self._format.last(response))

    def _written(self, events: Sequence[JsonObject]) -> bytes:
        return b"".join(event(item) for item in events if item["sequence_number"] > self._after)
