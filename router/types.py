"""What the router's parts say to each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from replicas.protocol import Band, EngineMetrics, GenerateRequest, ModelCard, ReplicaStats, TokenDelta


class Outcome(Enum):
    """How waiting for a replica ended; the words of llm-d's flow control."""

    DISPATCHED = "Dispatched"
    REJECTED_CAPACITY = "RejectedCapacity"
    REJECTED_OTHER = "RejectedOther"
    EVICTED_TTL = "EvictedTTL"
    EVICTED_NO_ENDPOINTS = "EvictedNoEndpoints"
    EVICTED_CONTEXT_CANCELLED = "EvictedContextCancelled"
    EVICTED_OTHER = "EvictedOther"


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What this ingress knows of one replica: its last report, and what we and others have there since."""

    stats: ReplicaStats
    age_s: float
    """Seconds since `stats` came."""
    num_in_flight: int = 0
    """Requests that this ingress has given the replica and that have not ended."""
    num_by_band: tuple[int, ...] = (0,) * len(Band)
    """Requests there, running and waiting: ours exactly, those of others as last reported."""
    outstanding_tokens: int = 0
    """Tokens that those requests are expected to need still."""
    unseen_tokens: int = 0
    """Prompt tokens of requests of ours that the last report cannot have counted yet."""

    def num_free_slots(self, band: Band) -> int:
        """Slots that a request of `band` would find, since it takes those of lower bands."""
        return 0 if self.stats.is_draining else self.stats.num_slots - sum(self.num_by_band[: band + 1])

    def num_free_tokens(self, band: Band) -> int:
        """KV cache slots that a request of `band` would find: free ones, and those held by lower bands."""
        held_below = sum(self.stats.num_held_blocks_by_band[band + 1 :])
        num_blocks = min(self.stats.num_blocks, self.stats.num_free_blocks + held_below)
        return num_blocks * self.stats.block_size - self.unseen_tokens


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What a policy knows of a request."""

    request: GenerateRequest
    expected_output_tokens: int
    block_hashes: Sequence[bytes]
    """Of the prompt's full blocks, as the engine computes them."""

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and the output expected."""
        return len(self.request.prompt_token_ids) + self.expected_output_tokens


class RoutingPolicy(Protocol):
    """Chooses where a request goes. Synchronous, no I/O, deterministic given its RNG."""

    def rank(self, routing: RoutingRequest, views: list[ReplicaView]) -> list[str]:
        """Replica ids, best first."""
        ...

    def placed(self, routing: RoutingRequest, replica_id: str) -> int:
        """Learn that a request was given to a replica; prompt tokens that it will have to compute there."""
        ...

    def forget(self, replica_id: str) -> None:
        """Learn that a replica is gone."""
        ...


class RouterObserver(Protocol):
    """Hears what the router does; metrics are made of it."""

    def waited(self, band: Band, outcome: Outcome, seconds: float) -> None:
        """A request's waiting ended."""
        ...

    def promoted(self, band: Band) -> None:
        """A band that had starved was served first."""
        ...

    def migrated(self, outcome: str) -> None:
        """A request whose replica was lost went on elsewhere (`resumed`, `restarted`) or did not (`failed`)."""
        ...

    def finished(self, band: Band, ttft_s: float | None, duration_s: float, num_tokens: int) -> None:
        """A request ended well."""
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
