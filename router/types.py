"""Values and interfaces that the router's folders share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from replicas.protocol import (
    Auto,
    Band,
    EngineMetrics,
    GenerateRequest,
    ModelCard,
    ReplicaStats,
    TokenDelta,
    fair_share,
)
from router.slot_shares import ALONE, SlotShare


class Outcome(Enum):
    """Outcome of a request's wait for a replica, in the terms of llm-d's flow control."""

    DISPATCHED = "Dispatched"
    REJECTED_CAPACITY = "RejectedCapacity"
    EVICTED_TTL = "EvictedTTL"
    EVICTED_NO_ENDPOINTS = "EvictedNoEndpoints"
    EVICTED_CONTEXT_CANCELLED = "EvictedContextCancelled"
    EVICTED_OTHER = "EvictedOther"


@dataclass(frozen=True, slots=True)
class PreemptibleSlots:
    """Slots on a full replica that tenants with more than their fair share of a band's slots yield to others."""

    of_newcomer: int
    """Slots for a tenant without a request there, at least one."""
    by_tenant: Mapping[str, int]
    """Slots for each tenant with requests there."""
    num_free_tokens: int
    """KV cache positions that a request of the band would find."""
    num_mean_tokens: int
    """KV cache positions that come free with each slot."""

    def of(self, tenant: str) -> int:
        """Return the number of slots for a tenant."""
        return self.by_tenant.get(tenant, self.of_newcomer)

    def max_tokens(self, num_slots: int) -> int:
        """Return the most tokens of a request that finds blocks when so many slots have come free."""
        return self.num_free_tokens + num_slots * self.num_mean_tokens


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """Load of one replica as this ingress knows it: the last report, and the requests counted since."""

    stats: ReplicaStats
    age_s: float
    """Seconds since `stats` arrived."""
    num_by_band: tuple[int, ...] = (0,) * len(Band)
    """Requests on the replica, running and waiting. This ingress's own are exact; the others are as last reported."""
    own_by_band: tuple[int, ...] = (0,) * len(Band)
    """Requests among `num_by_band` that this ingress gave the replica and that have not ended."""
    own_by_tenant: Mapping[tuple[Band, str], int] = field(default_factory=dict)
    """The same requests by band and tenant."""
    outstanding_tokens: int = 0
    """Tokens that the requests in `num_by_band` are expected to need still."""
    unseen_tokens: int = 0
    """Prompt tokens of this ingress's requests that the last report cannot have counted yet."""
    shares: tuple[SlotShare, ...] = ALONE
    """This ingress's share in the slots for each band."""

    @property
    def num_in_flight(self) -> int:
        """Number of this ingress's requests on the replica, of all bands."""
        return sum(self.own_by_band)

    def num_free_slots(self, band: Band) -> int:
        """Return the number of slots for this ingress's next requests of `band`: free ones, and those of lower bands.

        Those that are left to other ingresses are subtracted.
        """
        return 0 if self.stats.is_draining else self.num_unused_slots(band) - self.shares[band].num_left

    def num_unused_slots(self, band: Band) -> int:
        """Return the number of slots that no request of `band` or of a more urgent one has, of any ingress."""
        return self.stats.num_slots - sum(self.num_by_band[: band + 1])

    def num_free_tokens(self, band: Band) -> int:
        """Return the number of KV cache positions for a request of `band`: free ones, and those of lower bands.

        Prompt tokens that the last report has not counted are subtracted.
        """
        held_below = sum(self.stats.num_held_blocks_by_band[band + 1 :])
        num_blocks = min(self.stats.num_blocks, self.stats.num_free_blocks + held_below)
        return self.stats.num_tokens(num_blocks) - self.unseen_tokens

    def preemptible_slots(self, band: Band) -> PreemptibleSlots | None:
        """Return the slots of `band` that other tenants would yield for a tenant's fair share; None: nobody would.

        While a slot is free, no tenant yields one. Only this ingress's requests are known by tenant. Those of other
        ingresses keep their slots. While no request waits on the replica, a new tenant still gets one of them: the
        engine knows all tenants and decides. The cost grows with the number of tenants on the replica.
        """
        if self.stats.is_draining or self.num_unused_slots(band) > 0:
            return None
        num_slots = self.stats.num_slots - sum(self.num_by_band[:band])
        if num_slots <= 0:
            return None
        if self.own_by_band[band] == self.num_by_band[band] and max(self.own_by_tenant.values(), default=0) <= 1:
            return None  # All have one slot each, or none, so nobody has one to yield.
        held = {tenant: num for (request_band, tenant), num in self.own_by_tenant.items() if request_band is band}
        num_foreign = self.num_by_band[band] - self.own_by_band[band]

        def num_yielded(share: int) -> int:
            return num_slots - num_foreign - sum([min(num, share) for num in held.values()])

        share = fair_share(num_slots, len(held) + 1)
        is_new_beside_foreign = num_foreign > 0 and self.num_by_band[band] <= num_slots
        of_newcomer = min(share, num_yielded(share))
        if is_new_beside_foreign:
            of_newcomer = max(1, of_newcomer)
        if of_newcomer <= 0:
            return None
        share = fair_share(num_slots, max(1, len(held)))
        num_left = num_yielded(share)
        by_tenant = {tenant: max(0, min(share - num, num_left)) for tenant, num in held.items()}
        return PreemptibleSlots(of_newcomer, by_tenant, self.num_free_tokens(band), self.num_mean_tokens(band))

    def num_mean_tokens(self, band: Band) -> int:
        """Return the mean number of KV cache positions that a running sequence of `band` holds."""
        num_blocks = self.stats.num_held_blocks_by_band[band] // max(1, self.stats.num_running_by_band[band])
        return self.stats.num_tokens(num_blocks)

    def is_filled_by_other_ingresses(self, band: Band) -> bool:
        """Return True if requests of `band` run on the replica and none is of this ingress.

        When a request ends, its ingress refills the slot before other ingresses learn of it, so one ingress may keep
        every slot.
        """
        has_running = self.stats.num_running_by_band[band] > 0
        return has_running and self.own_by_band[band] == 0 and not self.stats.is_draining


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """Load of all known replicas together."""

    num_replicas: int
    num_serving: int
    """Replicas that are not draining."""
    outstanding_tokens: int
    num_blocks: int
    num_free_slots: int
    """Slots that this ingress's batch requests would find."""
    saturated_tokens_per_s: float
    """Sum of the replicas' speeds under load, prompt and output tokens per second."""


class Candidates(Protocol):
    """Replicas with room for a request, in the orders that routing policies need.

    A policy takes from an iterator no more than it needs: the cost of a choice must not grow with their number.
    """

    @property
    def cluster(self) -> ClusterLoad:
        """Load of all replicas, also of those without room."""

    def get(self, replica_id: str) -> ReplicaView | None:
        """Return the load of a replica; None: it is no candidate."""

    def by_tokens(self) -> Iterator[ReplicaView]:
        """Yield the candidates, at least one: the fewest outstanding tokens first, then by id."""

    def clockwise(self, position: int) -> Iterator[ReplicaView]:
        """Yield the candidates in the order of their points on the hash ring from a position, some more than once."""

    def distance(self, replica_id: str, position: int) -> int:
        """Return the way on the hash ring from a position to the next point of a candidate."""


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """Request as a routing policy sees it."""

    request: GenerateRequest
    expected_output_tokens: int
    block_hashes: Sequence[bytes]
    """Hashes of the prompt's full blocks, as the engine computes them."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and expected output tokens."""
        return len(self.request.prompt_token_ids) + self.expected_output_tokens


class Reason(Enum):
    """Reason for the first place in a ranking."""

    SAME_PROMPT = "same_prompt"
    """The replica got another request of the same call with the same prompt."""
    PREFIX_HIT = "prefix_hit"
    """The replica holds the beginning of the prompt, and its load is low enough for that to count."""
    PREFIX_OVERRIDDEN = "prefix_overridden"
    """Another replica holds more of the prompt, but has no room or too high a load."""
    AFFINITY = "affinity"
    """Several replicas have equally little load; the hash of the request's key or of its first block chose one."""
    LEAST_LOADED = "least_loaded"
    """The replica has the least load."""
    ROUND_ROBIN = "in_turn"
    """Round robin chose the replica."""
    RANDOM = "drawn"
    """Several replicas have equally little load; one was drawn at random."""
    SINGLE_CANDIDATE = "only_one"
    """No other replica has room."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Ranking of at least one replica, by id and best first, with the reason for the first place.

    A ranking may leave out replicas: they are tried last.
    """

    replica_ids: list[str]
    reason: Reason

    @property
    def first(self) -> str:
        """Replica that the request is meant for."""
        return self.replica_ids[0]

    def with_first(self, replica_id: str, reason: Reason) -> Ranking:
        """Return the ranking with this replica first, for this reason."""
        return Ranking([replica_id, *(other for other in self.replica_ids if other != replica_id)], reason)


class Slo(Enum):
    """Service level objective that a request can meet."""

    TTFT = "ttft"
    TPOT = "tpot"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Latency targets of one band; None: no target."""

    ttft_s: float | None = None
    """From the request's arrival at the router to its first output, seconds."""
    tpot_s: float | Auto | None = None
    """(last - first output) / (output tokens - 1), seconds; `auto`: the replicas know it."""

    def known_tpot_s(self, auto_s: float | None) -> float | None:
        """Return the target for the time between tokens; `auto_s` is the replica's if it is `auto`."""
        return auto_s if self.tpot_s is Auto.AUTO else self.tpot_s

    def attained(
        self, ttft_s: float | None, duration_s: float, num_tokens: int, auto_tpot_s: float | None = None
    ) -> list[Slo]:
        """Return the targets that a request met which ended without an error.

        A target is met if it is None, or if the request's output is too short to measure it.
        """
        tpot_target_s = self.known_tpot_s(auto_tpot_s)
        tpot_s = None if ttft_s is None or num_tokens < 2 else (duration_s - ttft_s) / (num_tokens - 1)
        met = [
            slo
            for slo, seconds, target_s in ((Slo.TTFT, ttft_s, self.ttft_s), (Slo.TPOT, tpot_s, tpot_target_s))
            if target_s is None or seconds is None or seconds <= target_s
        ]
        return [*met, Slo.ALL] if len(met) == 2 else met


@dataclass(frozen=True, slots=True)
class Headroom:
    """Limits of one tenant in one band's queue in this ingress, and their present use."""

    max_requests: int
    num_requests: int
    max_tokens: int
    """Most tokens that may wait: prompt tokens and expected output tokens."""
    num_tokens: int
    wait_s: float | None
    """Predicted wait of a request that arrives now, seconds; None: the replicas' speed is unknown."""
    max_wait_s: float | None = None
    """Longest predicted wait at which a request is accepted, seconds; None: no limit."""

    @property
    def num_requests_left(self) -> int:
        """Number of requests that the band still accepts."""
        # Requests that come back after a dispatch wait beyond the limits.
        return 0 if self._is_too_late else max(0, self.max_requests - self.num_requests)

    @property
    def num_tokens_left(self) -> int:
        """Number of tokens that the band still accepts."""
        return 0 if self._is_too_late else max(0, self.max_tokens - self.num_tokens)

    @property
    def reset_s(self) -> float | None:
        """Seconds until the band's queue is empty again if no more requests arrive; None: unknown."""
        return self.wait_s if self.num_requests or self._is_too_late else 0.0

    @property
    def _is_too_late(self) -> bool:
        return self.wait_s is not None and self.max_wait_s is not None and self.wait_s > self.max_wait_s


class RoutingPolicy(Protocol):
    """Policy that ranks replicas for a request. Synchronous, without I/O, and deterministic given its RNG."""

    def rank(self, routing: RoutingRequest, candidates: Candidates) -> Ranking:
        """Rank the best candidates."""

    def placed(self, routing: RoutingRequest, replica_id: str) -> int:
        """Note that a request was given to a replica; return the prompt tokens that the replica has to compute."""

    def forget(self, replica_id: str) -> None:
        """Note that a replica is gone."""


class RouterObserver(Protocol):
    """Observer of the router's events; the ingress's metrics are one."""

    def waited(self, band: Band, outcome: Outcome, seconds: float) -> None:
        """Note that a request's wait ended with `outcome` after `seconds`."""

    def decided(self, reason: Reason) -> None:
        """Note that a request was given to the first replica of a ranking."""

    def promoted(self, band: Band) -> None:
        """Note that a request of a starved band was promoted."""

    def migrated(self, outcome: str) -> None:
        """Note the outcome for a request whose replica was lost.

        It went on elsewhere behind its output (`resumed`), began anew elsewhere (`restarted`), or ended (`failed`).
        """

    def finished(
        self, band: Band, ttft_s: float | None, duration_s: float, num_tokens: int, auto_tpot_s: float | None = None
    ) -> None:
        """Note that a request ended without an error, `duration_s` after its arrival.

        `ttft_s` is the time from its arrival to its first delta; None: there was no delta. `auto_tpot_s` is the
        replica's present target for the time between tokens of the band; None: it has none.
        """


class ReplicaClient(Protocol):
    """Client of the model replicas; the Ray adapter is `serve_router.ServeReplicaClient`.

    Every method raises only `ServingError`s.
    """

    def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of one request, served by the first replica of `ranking` that takes it.

        Replicas that are not in `ranking` are tried last. Closing the generator aborts the request.
        """

    async def poll_stats(self) -> list[ReplicaStats]:
        """Return the present load of every replica that answers."""

    async def poll_metrics(self) -> list[EngineMetrics]:
        """Return everything that every replica's engine counts."""

    async def drain(self, replica_id: str) -> bool:
        """Have a replica refuse new requests; return False if it is not running."""

    async def describe(self) -> ModelCard:
        """Return the description of the model that the replicas serve.

        Raises:
            NoReplicaAvailable: no replica is ready yet.
        """
