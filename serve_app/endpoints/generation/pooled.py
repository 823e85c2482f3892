"""Endpoints of pooled outputs: POST /v1/embeddings, and scores and ranks at the paths that vLLM has for them."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from serve_app.endpoints.generation.responder import Completions
from serve_app.http.bodies import BodyReader
from serve_app.http.exchange import caller_of
from serve_app.openai.reply.pooled_format import EmbeddingList, RankList, ScoreList
from serve_app.openai.request.parsing import parse_body
from serve_app.openai.request.pooled_schema import POOLED_IGNORED, EmbeddingBody, RerankBody, ScoreBody
from serve_app.openai.request.unknown_fields import POOLED_LEVEL
from serve_app.reference.operations import COMPLETION_FAILURES, URGENCY_HEADERS, Access, Fields, Operation

Body = TypeVar("Body", EmbeddingBody, ScoreBody, RerankBody)


def _operation(path: str, answer: Any, schema: type[Body]) -> Operation:
    return Operation(
        "POST",
        path,
        "Embeddings",
        answer,
        access=Access.LIMITED,
        failures=COMPLETION_FAILURES,
        bodies=(Fields(schema, POOLED_IGNORED),),
        headers=URGENCY_HEADERS,
        answer_headers=("x-model-replica", "x-ratelimit"),
    )


class PooledEndpoints:
    """Endpoints of embeddings, scores and ranks; a client's disconnect aborts its texts."""

    def __init__(self, bodies: BodyReader, completions: Completions) -> None:
        self._bodies = bodies
        self._completions = completions

    @_operation("/v1/embeddings", EmbeddingList, EmbeddingBody)
    async def embeddings(self, request: Request) -> Response:
        """Make a vector of each text."""
        return await self._respond(request, EmbeddingBody)

    @_operation("/v1/score", ScoreList, ScoreBody)
    async def score(self, request: Request) -> Response:
        """Score pairs of texts."""
        return await self._respond(request, ScoreBody)

    @_operation("/score", ScoreList, ScoreBody)
    async def score_at_root(self, request: Request) -> Response:
        """Score pairs of texts, at vLLM's other path."""
        return await self._respond(request, ScoreBody)

    @_operation("/v1/rerank", RankList, RerankBody)
    async def rerank(self, request: Request) -> Response:
        """Order documents by their scores for a query."""
        return await self._respond(request, RerankBody)

    @_operation("/v2/rerank", RankList, RerankBody)
    async def rerank_as_cohere(self, request: Request) -> Response:
        """Order documents by their scores for a query, at Cohere's path."""
        return await self._respond(request, RerankBody)

    @_operation("/rerank", RankList, RerankBody)
    async def rerank_at_root(self, request: Request) -> Response:
        """Order documents by their scores for a query, at vLLM's other path."""
        return await self._respond(request, RerankBody)

    async def _respond(self, request: Request, schema: type[Body]) -> Response:
        caller, make = caller_of(request), partial(parse_body, schema, ignored=POOLED_IGNORED)
        body = await self._bodies.convert(request, make, caller.owner_before_parsing, POOLED_LEVEL)
        preparing = self._completions.service.pooled(body, caller)
        return await self._completions.respond(request, caller, body, preparing)
