"""Common parts of the replies to chat and text completions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from replicas.protocol import FinishReason, ModelCard, TokenDelta, Usage
from serve_app.openai.reply.fan_in import IndexedDelta

JsonObject = dict[str, Any]

MIN_LOGPROB = -9999.0
"""Log probability shown for a probability of zero, as in OpenAI's API: JSON has no infinity."""


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


class ReplyFormat(Protocol):
    """Format of one request's reply, streamed or whole, from the same deltas."""

    def chunk(self, item: IndexedDelta) -> list[JsonObject]:
        """Return the stream's chunks for one delta; the list is empty while there is nothing to show."""
        ...

    def usage_chunk(self, usage: JsonObject) -> JsonObject:
        """Return the last chunk of a stream with usage."""
        ...

    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the whole reply from one merged delta per choice, in order."""
        ...


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


def fingerprint_of(card: ModelCard) -> str:
    """Return a name for the configuration on which the output of a seed depends."""
    decisive = (card.model_id, card.dtype, card.device, card.max_model_len, card.vocab_size)
    return f"fp_{hashlib.sha256(repr(decisive).encode()).hexdigest()[:10]}"


def shown_logprob(logprob: float) -> float:
    """Return a log probability that JSON can express, at least `MIN_LOGPROB`."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
