"""Replicas without an engine, and time that moves when told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from replicas.errors import NoReplicaAvailable, ServingError
from replicas.protocol import (
    Band,
    EngineMetrics,
    FinishReason,
    GenerateRequest,
    ModelCard,
    ReplicaStats,
    SamplingParams,
    TokenDelta,
    Usage,
)
from router.types import Outcome, ReplicaView


@dataclass
class FakeClock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def stats(
    replica_id: str,
    *,
    taken: float = 0.0,
    running: int = 0,
    waiting: int = 0,
    slots: int = 4,
    is_draining: bool = False,
) -> ReplicaStats:
    return ReplicaStats(
        replica_id=replica_id,
        node_id="node",
        pid=1,
        taken_unix_s=taken,
        num_slots=slots,
        num_blocks=8,
        num_free_blocks=8,
        num_running_by_band=(0, running, 0),
        num_waiting_by_band=(0, waiting, 0),
        waiting_tokens=0,
        generated_tokens_per_s=0.0,
        is_draining=is_draining,
    )


def view(replica_id: str, *, requests: int = 0, tokens: int = 0, **of_stats) -> ReplicaView:
    return ReplicaView(
        stats(replica_id, **of_stats), age_s=0.0, num_by_band=(0, requests, 0), outstanding_tokens=tokens
    )


def request(request_id: str = "r", max_tokens: int = 3, prompt: tuple[int, ...] = (1, 2)) -> GenerateRequest:
    return GenerateRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens))


class SilentObserver:
    """A `RouterObserver` that remembers only how requests moved."""

    def __init__(self) -> None:
        self.migrations: list[str] = []

    def waited(self, band: Band, outcome: Outcome, seconds: float) -> None: ...

    def promoted(self, band: Band) -> None: ...

    def migrated(self, outcome: str) -> None:
        self.migrations.append(outcome)

    def finished(self, band: Band, ttft_s: float | None, duration_s: float, num_tokens: int) -> None: ...


@dataclass
class FakeReplica:
    """Emits one token a step, behind what the request has already; fails with `error` once `fail_at` tokens are out."""

    replica_id: str
    fail_at: int | None = None
    error: ServingError | None = None
    is_error_in_delta: bool = False
    has_endless_steps: bool = False
    num_running: int = 0
    num_started: int = 0

    def stats(self) -> ReplicaStats:
        return stats(self.replica_id, running=self.num_running)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        self.num_running += 1
        self.num_started += 1
        try:
            for index in range(len(request.output_token_ids), request.params.max_tokens):
                await asyncio.sleep(0)
                if index == self.fail_at:
                    if self.error is None:
                        return
                    if not self.is_error_in_delta:
                        raise self.error
                    yield self._delta(request, index, None, FinishReason.ERROR, self.error)
                    return
                while self.has_endless_steps and index == 1:
                    await asyncio.sleep(0)
                is_last = index == request.params.max_tokens - 1
                yield self._delta(request, index, index, FinishReason.LENGTH if is_last else None)
        finally:
            self.num_running -= 1

    def _delta(
        self,
        request: GenerateRequest,
        start: int,
        token_id: int | None,
        finish_reason: FinishReason | None,
        error: ServingError | None = None,
    ) -> TokenDelta:
        return TokenDelta(
            request_id=request.request_id,
            start=start,
            token_ids=() if token_id is None else (token_id,),
            text="" if token_id is None else f"{token_id} ",
            usage=Usage(len(request.prompt_token_ids), start + 1, 0),
            finish_reason=finish_reason,
            error=error,
            stats=self.stats(),
        )


@dataclass
class FakeClient:
    """A `ReplicaClient` over fake replicas: serves from the first of the ranking that is there."""

    replicas: dict[str, FakeReplica]
    poll_error: ServingError | None = None
    num_polls: int = 0
    rankings: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, *replicas: FakeReplica) -> FakeClient:
        return cls({replica.replica_id: replica for replica in replicas})

    async def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        self.rankings.append(ranking)
        chosen = [self.replicas[i] for i in [*ranking, *self.replicas] if i in self.replicas]
        deltas = chosen[0].generate(request)
        try:
            async for delta in deltas:
                yield delta
        finally:
            await deltas.aclose()

    async def poll_stats(self) -> list[ReplicaStats]:
        self.num_polls += 1
        if self.poll_error is not None:
            raise self.poll_error
        return [replica.stats() for replica in self.replicas.values()]

    async def poll_metrics(self) -> list[EngineMetrics]:
        return [EngineMetrics(replica_id, (), ()) for replica_id in self.replicas]

    async def describe(self) -> ModelCard:
        if not self.replicas:
            raise NoReplicaAvailable("none")
        return ModelCard("m", 64, 16, 16, 8, 4, "float32", "cpu")

    def served(self) -> Counter[str]:
        return Counter({replica.replica_id: replica.num_started for replica in self.replicas.values()})
