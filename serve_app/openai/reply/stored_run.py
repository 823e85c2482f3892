"""Completion that is fixed when it is accepted, so that it can be run and shown at any time, by any process."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from replicas.protocol import GenerateRequest
from serve_app.openai.reply.format import JsonObject, ReplyHead
from serve_app.openai.reply.prepared_completion import ParserOptions, PreparedCompletion

_INT32 = "i"


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Request for one sequence, with all that its events follow from beside its output."""

    fields: JsonObject
    """Body of the request, without its input."""
    head: ReplyHead
    request: GenerateRequest
    """Request with its seed; the tokens of the prompt are stored apart."""
    account: str
    """Tenant of the API key, to which the work is charged."""
    parser: ParserOptions | None
    compaction: str | None = None
    """Encrypted summary with which the output begins; None: there is none."""

    @classmethod
    def of(
        cls, fields: JsonObject, head: ReplyHead, prepared: PreparedCompletion, compaction: str | None = None
    ) -> StoredRun:
        """Return the run of a completion that was prepared and not started."""
        (request,) = prepared.requests
        request = replace(request, prompt_token_ids=())
        return cls(fields, head, request, prepared.account, prepared.parser, compaction)

    def to_json(self) -> str:
        """Return the run as JSON."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def of_json(cls, text: str) -> StoredRun:
        """Return the run in what `to_json` returned."""
        return _ADAPTER.validate_json(text)


_ADAPTER = TypeAdapter(StoredRun)


def packed(token_ids: Sequence[int]) -> bytes:
    """Return token ids as bytes, 4 each, little endian."""
    numbers = array(_INT32, token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpacked(data: bytes) -> tuple[int, ...]:
    """Return the token ids in what `packed` returned."""
    numbers = array(_INT32, data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)
