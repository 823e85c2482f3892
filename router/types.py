"""What the router's parts say to each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from replicas.protocol import EngineMetrics, GenerateRequest, ModelCard, ReplicaStats, TokenDelta


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a policy knows of one replica when it ranks."""

    stats: ReplicaStats
    age_s: float
    """Seconds since `stats` was taken."""
    num_in_flight: int
    """Requests that this ingress has given the replica and that have not ended."""


class RoutingPolicy(Protocol):
    """Chooses where a request goes. Synchronous, no I/O, deterministic given its RNG."""

    def rank(self, request: GenerateRequest, views: list[ReplicaView]) -> list[str]:
        """Replica ids, best first."""
        ...


class ReplicaClient(Protocol):
    """Reaches the model replicas; the Ray adapter is `serve_router.ServeReplicaClient`.

    Every method raises only `ServingError`s.
    """

    def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of one request, served by the first replica of `ranking` that takes it.

        Replicas that are not in `ranking` are tried last. Closing the generator aborts the request.
        """
        ...

    async def poll_stats(self) -> list[ReplicaStats]:
        """The present load of every replica that answers."""
        ...

    async def poll_metrics(self) -> list[EngineMetrics]:
        """Everything that every replica's engine counts."""
        ...

    async def describe(self) -> ModelCard:
        """What the replicas serve.

        Raises:
            NoReplicaAvailable: none is ready yet.
        """
        ...
