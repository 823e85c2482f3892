"""Replies with pooled outputs: embeddings as OpenAI has them, scores and ranks as vLLM has them."""

from __future__ import annotations

import base64
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired, Protocol

from typing_extensions import TypedDict

from replicas.protocol import TokenDelta
from serve_app.openai.reply.fan_in import IndexedDelta
from serve_app.openai.reply.format import JsonObject, Parsing
from serve_app.openai.reply.schema import CachedTokens, RequestMetrics, described
from serve_app.openai.request.pooled_schema import EmbeddingBody, RerankBody


@described
class PooledUsage(TypedDict):
    """Token counts of a request without output tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


@described
class EmbeddingObject(TypedDict):
    """Embedding of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of their 4 bytes each, little-endian."""


@described
class PooledReplyFields(TypedDict):
    """Fields of every reply with pooled outputs."""

    id: str
    model: str
    usage: PooledUsage
    warnings: NotRequired[list[str]]
    metrics: NotRequired[RequestMetrics]


@described
class EmbeddingList(PooledReplyFields):
    """Embeddings of the texts, in their order."""

    object: Literal["list"]
    created: int
    data: list[EmbeddingObject]


@described
class ScoreObject(TypedDict):
    """Score of one pair of texts."""

    object: Literal["score"]
    index: int
    score: float


@described
class ScoreList(PooledReplyFields):
    """Scores of the pairs, in their order."""

    object: Literal["list"]
    created: int
    data: list[ScoreObject]


@described
class DocumentText(TypedDict):
    """Text of a document."""

    text: str


@described
class RankedResult(TypedDict):
    """Document with its score for the query."""

    index: int
    document: NotRequired[DocumentText]
    relevance_score: float


@described
class RankList(PooledReplyFields):
    """Documents, best first."""

    results: list[RankedResult]


@dataclass(frozen=True, slots=True)
class PooledHead:
    """Fields of a reply that do not depend on its outputs."""

    id: str
    created: int
    """Time of the request's arrival, whole unix seconds."""
    model: str

    def listed(self, data: list[JsonObject], usage: JsonObject) -> JsonObject:
        """Return a reply that is a list of objects."""
        head = {"id": self.id, "object": "list", "created": self.created, "model": self.model}
        return {**head, "data": data, "usage": _usage(usage)}


class PooledFormat(Protocol):
    """Format of a pooled reply, which is whole: nothing of it is in a stream."""

    ends_with_done: bool = False
    keep_alive: JsonObject | None = None
    parsing: Parsing | None = None
    num_malformed_calls: int = 0

    def opening(self, index: int) -> list[JsonObject]:
        """Return no event."""
        return []

    def chunks(self, item: IndexedDelta) -> list[JsonObject]:
        """Return no event."""
        return []

    def written(self, item: IndexedDelta) -> bytes:
        """Return no event."""
        return b""

    def closing(self, fields: JsonObject, usage: JsonObject) -> list[JsonObject]:
        """Return no event."""
        return []

    def failure(self, error: JsonObject, code: str | None, message: str) -> list[JsonObject]:
        """Return the error."""
        return [error]

    def usage_details(self) -> JsonObject:
        """Return nothing: there is no reasoning."""
        return {}

    @abstractmethod
    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the whole reply from one delta per text."""


class EmbeddingFormat(PooledFormat):
    """Format of embeddings."""

    def __init__(self, head: PooledHead, body: EmbeddingBody) -> None:
        self._head = head
        self._is_base64 = body.encoding_format == "base64"

    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the list of the embeddings."""
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(delta.pooled)}
            for index, delta in enumerate(deltas)
        ]
        return self._head.listed(data, usage)

    def _written(self, pooled: bytes) -> str | list[float]:
        return base64.b64encode(pooled).decode() if self._is_base64 else _numbers(pooled)


class ScoreFormat(PooledFormat):
    """Format of scores."""

    def __init__(self, head: PooledHead) -> None:
        self._head = head

    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the list of the scores."""
        data = [
            {"object": "score", "index": index, "score": _numbers(delta.pooled)[0]}
            for index, delta in enumerate(deltas)
        ]
        return self._head.listed(data, usage)


class RerankFormat(PooledFormat):
    """Format of ranked documents."""

    def __init__(self, head: PooledHead, body: RerankBody) -> None:
        self._head = head
        self._texts = body.texts
        self._num_results = body.top_n or len(body.documents)
        self._has_documents = body.return_documents

    def full_reply(self, deltas: Sequence[TokenDelta], usage: JsonObject) -> JsonObject:
        """Return the documents, best first; of equal ones the earlier is first."""
        scores = [_numbers(delta.pooled)[0] for delta in deltas]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._num_results]
        return {
            "id": self._head.id,
            "model": self._head.model,
            "results": [self._result(index, scores[index]) for index in best],
            "usage": _usage(usage),
        }

    def _result(self, index: int, score: float) -> JsonObject:
        document = {"document": {"text": self._texts[index]}} if self._has_documents else {}
        return {"index": index, **document, "relevance_score": score}


def _numbers(pooled: bytes) -> list[float]:
    """Return the numbers of a pooled output, whose bytes are in the order of every supported machine."""
    return array("f", pooled).tolist()


def _usage(usage: JsonObject) -> JsonObject:
    """Return the usage object without the output tokens, of which there are none."""
    return {name: value for name, value in usage.items() if name != "completion_tokens"}
