"""Baselines of routing, for experiments to compare with: blind policies, and requests bound to a replica early."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from replicas.protocol import Band, GenerateRequest
from router.flow_control import FlowController
from router.load_table import LoadTable
from router.types import Ranking, Reason, ReplicaView, RouterObserver, RoutingPolicy, RoutingRequest
from serve_app.config import HeadwayConfig


class _Blind:
    """Base of policies that know nothing of prefixes: every prompt is computed anew, as far as they know."""

    def placed(self, routing: RoutingRequest, replica_id: str) -> int:
        """Prompt tokens of the request."""
        return len(routing.request.prompt_token_ids)

    def forget(self, replica_id: str) -> None:
        """Nothing is remembered of a replica."""


class LeastRequests(_Blind):
    """The replica with the fewest requests; ties are drawn. A baseline: blind to their lengths and prefixes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, routing: RoutingRequest, views: list[ReplicaView]) -> Ranking:
        """Fewest requests first."""
        keyed = [(sum(view.num_by_band), self._rng.random(), view.stats.replica_id) for view in views]
        return Ranking([replica_id for *_, replica_id in sorted(keyed)], Reason.LEAST_LOADED)


class PowerOfTwo(_Blind):
    """Two replicas drawn, the one with fewer requests first (Mitzenmacher, 2001): Ray Serve's own default."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, routing: RoutingRequest, views: list[ReplicaView]) -> Ranking:
        """The two drawn, then the others at random."""
        order = self._rng.sample(views, len(views))
        order[:2] = sorted(order[:2], key=lambda view: sum(view.num_by_band))
        return Ranking([view.stats.replica_id for view in order], Reason.LEAST_LOADED)


class RoundRobin(_Blind):
    """Each replica in turn, in order of id: a baseline, blind to load."""

    def __init__(self) -> None:
        self._num_ranked = 0

    def rank(self, routing: RoutingRequest, views: list[ReplicaView]) -> Ranking:
        """The next in turn first."""
        replica_ids = sorted(view.stats.replica_id for view in views)
        start = self._num_ranked % len(replica_ids)
        self._num_ranked += 1
        return Ranking(replica_ids[start:] + replica_ids[:start], Reason.IN_TURN)


class Random(_Blind):
    """A random order: a baseline, blind to load."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, routing: RoutingRequest, views: list[ReplicaView]) -> Ranking:
        """In random order."""
        replica_ids = sorted(view.stats.replica_id for view in views)
        self._rng.shuffle(replica_ids)
        return Ranking(replica_ids, Reason.DRAWN)


POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {
    "least_requests": lambda: LeastRequests(random.Random()),
    "power_of_two": lambda: PowerOfTwo(random.Random()),
    "round_robin": RoundRobin,
    "random": lambda: Random(random.Random()),
}


@dataclass(frozen=True, slots=True)
class EarlyBinding:
    """Gives every replica up to `num_ahead` requests of each band beyond its slots, whatever blocks they need.

    That is how a router works that only chooses a replica, when a request comes.
    """

    num_ahead: int

    def places(self, view: ReplicaView, band: Band, starved: Set[Band], is_only: bool) -> int:
        """The free slots and `num_ahead` more."""
        return 0 if view.stats.is_draining else view.num_free_slots(band) + self.num_ahead

    def has_blocks(self, view: ReplicaView, request: GenerateRequest, starved: Set[Band]) -> bool:
        """Always: the request waits there for blocks."""
        return True

    def best(self, views: Sequence[ReplicaView], band: Band) -> list[ReplicaView]:
        """All of them, full or not."""
        return list(views)


@dataclass(frozen=True, slots=True)
class BaselineFlow:
    """Makes the flow control of an ingress that follows a baseline; crosses processes as its two values."""

    policy: str
    num_bound_early: int

    def __call__(self, config: HeadwayConfig, table: LoadTable, observer: RouterObserver) -> FlowController:
        """The controller; with `num_bound_early` 0 requests are bound late, as they are in the product."""
        slots = EarlyBinding(self.num_bound_early) if self.num_bound_early else None
        return FlowController(config.flow_limits(), table, POLICIES[self.policy](), observer, slots)
