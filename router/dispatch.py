"""Gives requests to replicas and learns their load from what comes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from replicas.errors import EngineDead, NoReplicaAvailable, ReplicaLost, ServingError
from replicas.protocol import EngineMetrics, GenerateRequest, ModelCard, TokenDelta
from router.load_table import LoadTable
from router.types import ReplicaClient, ReplicaView, RoutingPolicy

logger = logging.getLogger(__name__)


class Dispatcher:
    """Starts requests where the policy says, keeps the load table true, and owns the slow poll.

    Invariant: between `begin` and `end` of the load table every request that has been sent and has
    not ended is counted exactly once, on the replica that is known or expected to serve it.
    """

    def __init__(
        self, client: ReplicaClient, policy: RoutingPolicy, table: LoadTable, poll_period_s: float = 1.0
    ) -> None:
        """`poll_period_s` bounds how long load that came by another ingress stays unknown."""
        self._client = client
        self._policy = policy
        self._table = table
        self._poll_period_s = poll_period_s

    def start(self, requests: Sequence[GenerateRequest]) -> list[AsyncGenerator[TokenDelta, None]]:
        """One stream of deltas per request, all on one replica.

        The group is ranked once, when the first stream is first asked for a delta. Closing a stream
        aborts its request. A stream raises ServingError where its request fails, so no delta that it
        yields has an error; a stream that ends otherwise ended with a finish reason.
        """
        group = _Group(self._rank)
        return [self._stream(request, group) for request in requests]

    def load(self) -> list[ReplicaView]:
        """What is known of every replica, by id."""
        return self._table.views()

    async def refresh(self) -> None:
        """Ask every replica for its load now.

        Raises:
            ServingError: the poll failed; the table keeps what it knew, and its ages grow.
        """
        asked_s = self._table.now()
        self._table.replace(await self._client.poll_stats(), asked_s)

    async def metrics(self) -> list[EngineMetrics]:
        """Everything that every replica's engine counts."""
        return await self._client.poll_metrics()

    async def model_card(self) -> ModelCard:
        """What the replicas serve.

        Raises:
            NoReplicaAvailable: none is ready yet.
        """
        return await self._client.describe()

    async def run(self) -> None:
        """Poll all replicas until cancelled, so that new, idle and foreign load is known too."""
        while True:
            try:
                await self.refresh()
            except ServingError as error:
                logger.warning("load poll failed", extra={"error": str(error)})
            await asyncio.sleep(self._poll_period_s)

    async def _rank(self, request: GenerateRequest) -> list[str]:
        if not self._table.views():
            await self.refresh()
        ranking = self._policy.rank(request, self._table.views())
        if not ranking:
            raise NoReplicaAvailable("no model replica is ready")
        return ranking

    async def _stream(self, request: GenerateRequest, group: _Group) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of one request; begins again elsewhere, once, if its replica dies before any output."""
        ranking = await group.ranking(request)
        for may_retry in (True, False):
            try:
                async with aclosing(self._attempt(request, ranking)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except _LostBeforeOutput as lost:
                ranking = [replica_id for replica_id in ranking if replica_id != lost.replica_id]
                if not (may_retry and ranking):
                    raise lost.error from None
                logger.warning("replica lost, trying another", extra={"request_id": request.request_id})

    async def _attempt(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """The deltas that the replicas of one ranking give, counted in flight on the one that serves.

        Raises:
            _LostBeforeOutput: the replica died and nothing was yielded.
        """
        serving = ranking[0]
        self._table.begin(serving)
        has_output = is_finished = False
        try:
            async with aclosing(self._client.generate(request, ranking)) as deltas:
                async for delta in deltas:
                    serving = self._learn(delta, serving)
                    if delta.error is None or delta.token_ids or delta.text:
                        has_output = True
                        is_finished = delta.error is None and delta.finish_reason is not None
                        yield delta if delta.error is None else replace(delta, finish_reason=None, error=None)
                    if delta.error is not None:
                        raise delta.error
            if not is_finished:
                raise ReplicaLost("the replica's stream ended before the sequence did")
        except (ReplicaLost, EngineDead) as error:
            self._table.forget(serving)
            if has_output:
                raise
            raise _LostBeforeOutput(serving, error) from error
        finally:
            self._table.end(serving)

    def _learn(self, delta: TokenDelta, expected: str) -> str:
        """Take in the load that a delta brings; the id of the replica that is serving."""
        if delta.stats is None:
            return expected
        self._table.record(delta.stats)
        actual = delta.stats.replica_id
        if actual != expected:
            self._table.begin(actual)
            self._table.end(expected)
        return actual


class _Group:
    """The one ranking that the requests of a group share, made when the first of them needs it."""

    def __init__(self, rank: Callable[[GenerateRequest], Awaitable[list[str]]]) -> None:
        self._rank = rank
        self._ranking: list[str] | None = None
        self._lock = asyncio.Lock()

    async def ranking(self, request: GenerateRequest) -> list[str]:
        async with self._lock:
            if self._ranking is None:
                self._ranking = await self._rank(request)
            return self._ranking


class _LostBeforeOutput(Exception):
    """A replica died before its request had any output, so the request may begin again elsewhere."""

    def __init__(self, replica_id: str, error: ServingError) -> None:
        super().__init__(replica_id, error)
        self.replica_id = replica_id
        self.error = error
