"""Routing baselines for comparison: simple policies, and early binding of requests to a replica."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from replicas.protocol import Band
from router.balancing.load_table import LoadTable
from router.flow.flow_control import FlowController
from router.types import (
    Candidates,
    PreemptibleSlots,
    Ranking,
    Reason,
    ReplicaView,
    RouterObserver,
    RoutingPolicy,
    RoutingRequest,
)
from serve_app.process_settings import RoutingSettings


class _PrefixBlindPolicy:
    """Base of policies without a prefix index: every prompt token counts as uncomputed."""

    def placed(self, routing: RoutingRequest, replica_id: str) -> int:
        """Return the number of prompt tokens of the request."""
        return len(routing.request.prompt_token_ids)

    def forget(self, replica_id: str) -> None:
        """Do nothing: no state is kept per replica."""


@dataclass
class LeastRequests(_PrefixBlindPolicy):
    """Policy that prefers the replica with the fewest requests, ties at random; it ignores lengths and prefixes."""

    rng: random.Random

    def rank(self, routing: RoutingRequest, candidates: Candidates) -> Ranking:
        """Rank replicas by number of requests, fewest first."""
        keyed = [(sum(view.num_by_band), self.rng.random(), view.stats.replica_id) for view in candidates.by_tokens()]
        return Ranking([replica_id for *_, replica_id in sorted(keyed)], Reason.LEAST_LOADED)


@dataclass
class PowerOfTwo(_PrefixBlindPolicy):
    """Policy that draws two replicas and prefers the less loaded (Mitzenmacher, 2001): Ray Serve's default."""

    rng: random.Random

    def rank(self, routing: RoutingRequest, candidates: Candidates) -> Ranking:
        """Rank the two drawn replicas first, then the others at random."""
        views = list(candidates.by_tokens())
        order = self.rng.sample(views, len(views))
        order[:2] = sorted(order[:2], key=lambda view: sum(view.num_by_band))
        return Ranking([view.stats.replica_id for view in order], Reason.LEAST_LOADED)


@dataclass
class RoundRobin(_PrefixBlindPolicy):
    """Policy that takes each replica in turn, by id; it ignores load."""

    _num_ranked: int = 0

    def rank(self, routing: RoutingRequest, candidates: Candidates) -> Ranking:
        """Rank the next replica in turn first."""
        replica_ids = sorted(view.stats.replica_id for view in candidates.by_tokens())
        start = self._num_ranked % len(replica_ids)
        self._num_ranked += 1
        return Ranking(replica_ids[start:] + replica_ids[:start], Reason.ROUND_ROBIN)


@dataclass
class Random(_PrefixBlindPolicy):
    """Policy of random order; it ignores load."""

    rng: random.Random

    def rank(self, routing: RoutingRequest, candidates: Candidates) -> Ranking:
        """Rank replicas in random order."""
        replica_ids = sorted(view.stats.replica_id for view in candidates.by_tokens())
        self.rng.shuffle(replica_ids)
        return Ranking(replica_ids, Reason.RANDOM)


POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {
    "least_requests": lambda: LeastRequests(random.Random()),
    "power_of_two": lambda: PowerOfTwo(random.Random()),
    "round_robin": RoundRobin,
    "random": lambda: Random(random.Random()),
}


@dataclass(frozen=True, slots=True)
class EarlyBinding:
    """Slot policy that sends each replica up to `num_ahead` requests per band beyond its slots, free blocks or not.

    This is early binding: a router that chooses a replica as soon as a request comes.
    """

    num_ahead: int

    def num_assignable(self, view: ReplicaView, band: Band, starved: Set[Band], is_only: bool) -> int:
        """Return the number of free slots plus `num_ahead`; 0 for a draining replica."""
        return 0 if view.stats.is_draining else view.num_free_slots(band) + self.num_ahead

    def max_tokens(self, view: ReplicaView, band: Band, starved: Set[Band]) -> float:
        """Return no limit: the request waits for blocks at the replica."""
        return float("inf")

    def has_free_slot(self, view: ReplicaView, band: Band) -> bool:
        """Return True: all replicas are alike, full or not."""
        return True

    def preemptible_slots(self, view: ReplicaView, band: Band) -> PreemptibleSlots | None:
        """Return None: the replica has room as long as `num_assignable` says so."""
        return None


@dataclass(frozen=True, slots=True)
class BaselineFlow:
    """Factory of an ingress's flow control with a baseline policy; its two fields cross processes."""

    policy: str
    max_queued_per_replica: int

    def __call__(self, settings: RoutingSettings, table: LoadTable, observer: RouterObserver) -> FlowController:
        """Return the controller; `max_queued_per_replica` 0 means late binding, as in the product."""
        slots = EarlyBinding(self.max_queued_per_replica) if self.max_queued_per_replica else None
        return FlowController(settings.flow, table, POLICIES[self.policy](), observer, slots)
