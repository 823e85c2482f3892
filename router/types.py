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
    num_by_band: tuple[int, ...] = (0,) * len(Band)
    """Requests there, running and waiting: ours exactly, those of others as last reported."""
    own_by_band: tuple[int, ...] = (0,) * len(Band)
    """Ours among them: those that this ingress has given the replica and that have not ended."""
    outstanding_tokens: int = 0
    """Tokens that those requests are expected to need still."""
    unseen_tokens: int = 0
    """Prompt tokens of requests of ours that the last report cannot have counted yet."""

    @property
    def num_in_flight(self) -> int:
        """Requests of ours there, of any band."""
        return sum(self.own_by_band)

    def num_free_slots(self, band: Band) -> int:
        """Slots that a request of `band` would find, since it takes those of lower bands."""
        return 0 if self.stats.is_draining else self.stats.num_slots - sum(self.num_by_band[: band + 1])

    def num_free_tokens(self, band: Band) -> int:
        """KV cache slots that a request of `band` would find: free ones, and those held by lower bands."""
        held_below = sum(self.stats.num_held_blocks_by_band[band + 1 :])
        num_blocks = min(self.stats.num_blocks, self.stats.num_free_blocks + held_below)
        return num_blocks * self.stats.block_size - self.unseen_tokens

    def is_filled_by_other_ingresses(self, band: Band) -> bool:
        """Whether requests of `band` run there and none is ours.

        An ingress fills a slot that its own request leaves before any other hears of it, and so may keep them all.
        """
        has_running = self.stats.num_running_by_band[band] > 0
        return has_running and self.own_by_band[band] == 0 and not self.stats.is_draining


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


class Reason(Enum):
    """Why a replica comes first in a ranking."""

    SAME_PROMPT = "same_prompt"
    """A request with the same prompt, of one client's call, went there."""
    PREFIX_HIT = "prefix_hit"
    """It holds the beginning of the prompt, and has not too much to do for that to count."""
    PREFIX_OVERRIDDEN = "prefix_overridden"
    """Another one holds more of the prompt, but has no room or too much to do."""
    AFFINITY = "affinity"
    """Several have equally little to do; the request's key, or its first block, always chooses the same of them."""
    LEAST_LOADED = "least_loaded"
    """It has less to do than the others."""
    ROUND_ROBIN = "in_turn"
    """It is its turn."""
    RANDOM = "drawn"
    """It was drawn by lot."""
    SINGLE_CANDIDATE = "only_one"
    """No other has room."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Replica ids, best first, at least one; and why the first is."""

    replica_ids: list[str]
    reason: Reason

    @property
    def first(self) -> str:
        """The replica that the request is meant for."""
        return self.replica_ids[0]

    def with_first(self, replica_id: str | None, reason: Reason) -> Ranking:
        """The ranking with this replica first, for this reason; unchanged where it is not ranked at all."""
        if replica_id not in self.replica_ids:
            return self
        return Ranking(sorted(self.replica_ids, key=lambda other: other != replica_id), reason)


@dataclass(frozen=True, slots=True)
class Headroom:
    """What may wait in one band of this ingress, and what does."""

    max_requests: int
    num_requests: int
    max_tokens: int
    """Prompt and output expected."""
    num_tokens: int
    wait_s: float | None
    """Until a request that came now would start, seconds; None: nothing is known of the replicas' speed."""
    max_wait_s: float | None = None
    """Nothing is accepted that is predicted to wait longer, seconds; None: however long."""

    @property
    def num_requests_left(self) -> int:
        """How many more would be accepted."""
        # What comes back after a dispatch waits beyond the limits.
        return 0 if self._is_too_late else max(0, self.max_requests - self.num_requests)

    @property
    def num_tokens_left(self) -> int:
        """How many more would be accepted."""
        return 0 if self._is_too_late else max(0, self.max_tokens - self.num_tokens)

    @property
    def reset_s(self) -> float | None:
        """Until all that may wait is left again, seconds, if nothing more comes; None: unknown."""
        return self.wait_s if self.num_requests or self._is_too_late else 0.0

    @property
    def _is_too_late(self) -> bool:
        return self.wait_s is not None and self.max_wait_s is not None and self.wait_s > self.max_wait_s


class RoutingPolicy(Protocol):
    """Chooses where a request goes. Synchronous, no I/O, deterministic given its RNG."""

    def rank(self, routing: RoutingRequest, views: list[ReplicaView]) -> Ranking:
        """The replicas in `views`, of which there is at least one."""
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

    def decided(self, reason: Reason) -> None:
        """A request was given to the first replica of a ranking."""
        ...

    def promoted(self, band: Band) -> None:
        """A band that had starved was served first."""
        ...

    def migrated(self, outcome: str) -> None:
        """A request whose replica was lost went on elsewhere (`resumed`, `restarted`) or did not (`failed`)."""
        ...

    def finished(self, band: Band, ttft_s: float | None, duration_s: float, num_tokens: int) -> None:
        """A request ended well, so long after it came; `ttft_s` is when its first delta came, None: there was none."""
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
