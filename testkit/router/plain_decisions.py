"""Reference of the router's decisions: the same choices as the product's, computed from every replica's load."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from replicas.protocol import Band, GenerateRequest, fair_share
from router.balancing.hash_ring import CIRCLE, distance, points_of, position_of
from router.balancing.policy import PrefixIndex
from router.flow.flow_queue import FlowQueue, QueuedRequest
from router.flow.slots import LateBinding
from router.types import ClusterLoad, Reason, ReplicaView, RoutingRequest

_NUM_LISTED = 32
"""Most equal replicas among which a request without a key is drawn evenly."""


def cluster_of(views: Sequence[ReplicaView]) -> ClusterLoad:
    """Return the sums over all replicas."""
    return ClusterLoad(
        num_replicas=len(views),
        num_serving=sum(not view.stats.is_draining for view in views),
        outstanding_tokens=sum(view.outstanding_tokens for view in views),
        num_blocks=sum(view.stats.num_blocks for view in views),
        num_free_slots=sum(max(0, view.num_free_slots(Band.BATCH)) for view in views),
        saturated_tokens_per_s=sum(round(1000 * view.stats.saturated_tokens_per_s) for view in views) / 1000,
    )


class ListedCandidates:
    """Candidates of a policy from a list of views."""

    def __init__(self, views: Sequence[ReplicaView], cluster: ClusterLoad | None = None) -> None:
        """`cluster`: None if the candidates are all replicas."""
        self.cluster = cluster_of(views) if cluster is None else cluster
        self._views = {view.stats.replica_id: view for view in views}

    def get(self, replica_id: str) -> ReplicaView | None:
        return self._views.get(replica_id)

    def by_tokens(self) -> Iterator[ReplicaView]:
        yield from sorted(self._views.values(), key=lambda view: (view.outstanding_tokens, view.stats.replica_id))

    def clockwise(self, position: int) -> Iterator[ReplicaView]:
        yield from sorted(self._views.values(), key=lambda view: self.distance(view.stats.replica_id, position))

    def distance(self, replica_id: str, position: int) -> int:
        return distance(points_of(replica_id), position)


def yields(view: ReplicaView, request: GenerateRequest) -> bool:
    """Return True if tenants of the request's band yield a slot to it on a replica without a free one."""
    band, num_slots = request.band, view.stats.num_slots - sum(view.num_by_band[: request.band])
    if view.stats.is_draining or view.num_unused_slots(band) > 0 or num_slots <= 0:
        return False
    if view.own_by_band[band] == view.num_by_band[band] and max(view.own_by_tenant.values(), default=0) <= 1:
        return False
    held = {tenant: num for (its_band, tenant), num in view.own_by_tenant.items() if its_band is band}
    num_foreign = view.num_by_band[band] - view.own_by_band[band]
    share = fair_share(num_slots, len(held.keys() | {request.tenant}))
    num_own = held.get(request.tenant, 0)
    num_kept = num_foreign + sum(min(num, share) for num in held.values())
    is_new_beside_foreign = num_own == 0 and num_foreign > 0 and view.num_by_band[band] <= num_slots
    num_yielded = max(0, min(share - num_own, num_slots - num_kept), is_new_beside_foreign)
    return num_yielded > 0 and request.num_known_tokens <= view.num_free_tokens(
        band
    ) + num_yielded * view.num_mean_tokens(band)


@dataclass(frozen=True)
class Choice:
    """Choice of the next dispatch: the request, its replica, and the reasons."""

    arrival_index: int
    replica_id: str
    reason: Reason
    is_promoted: bool


@dataclass
class PlainDecisions:
    """Late binding and least tokens without any kept order."""

    slots: LateBinding
    index: PrefixIndex
    rng: random.Random
    routings: dict[int, RoutingRequest] = field(default_factory=dict)
    """Routing requests by arrival index."""

    def next(self, queue: FlowQueue, starved: Set[Band], views: Sequence[ReplicaView]) -> Choice | None:
        """Return the next dispatch; None: no waiting request finds room."""
        is_only = sum(not view.stats.is_draining for view in views) == 1
        for band in queue.bands_in_order(starved):
            queued = next(queue.in_order(band))
            with_slots = [view for view in views if self.slots.num_assignable(view, band, starved, is_only) > 0]
            with_room = [view for view in with_slots if self._has_blocks(view, queued.request, starved)]
            if with_room:
                ready = [view for view in with_room if view.num_free_slots(band) > 0]
                return self._choice(queued, ready or with_room, views, is_promoted=band in starved)
        return self._next_fairly(queue, views)

    def _next_fairly(self, queue: FlowQueue, views: Sequence[ReplicaView]) -> Choice | None:
        for band in Band:
            for queued in queue.in_order(band):
                yielding = [view for view in views if yields(view, queued.request)]
                if yielding:
                    return self._choice(queued, yielding, views, is_promoted=False)
        return None

    def _has_blocks(self, view: ReplicaView, request: GenerateRequest, starved: Set[Band]) -> bool:
        return request.num_known_tokens <= self.slots.max_tokens(view, request.band, starved)

    def _choice(
        self, queued: QueuedRequest, among: Sequence[ReplicaView], views: Sequence[ReplicaView], is_promoted: bool
    ) -> Choice:
        replica_id, reason = self.rank(self.routings[queued.arrival_index], among, cluster_of(views))
        return Choice(queued.arrival_index, replica_id, reason, is_promoted)

    def rank(self, routing: RoutingRequest, among: Sequence[ReplicaView], cluster: ClusterLoad) -> tuple[str, Reason]:
        """Return the replica with the least work, and the reason."""
        self.index.resize(cluster.num_blocks)
        held = self.index.num_blocks_held(routing.block_hashes)
        bound = 1.25 * (cluster.outstanding_tokens + routing.num_tokens) / cluster.num_replicas
        saved = {
            view.stats.replica_id: held.get(view.stats.replica_id, 0) * view.stats.block_size
            if view.outstanding_tokens <= bound
            else 0
            for view in among
        }
        work = {view.stats.replica_id: view.outstanding_tokens - saved[view.stats.replica_id] for view in among}
        equal_up_to = min(work.values()) + 0.1 * routing.num_tokens
        by_tokens = sorted(among, key=lambda view: (view.outstanding_tokens, view.stats.replica_id))
        ordered = [view.stats.replica_id for view in by_tokens]
        equal = [replica_id for replica_id in ordered if work[replica_id] <= equal_up_to]
        key = _key(routing)
        first = self._one_of(equal, key)
        if saved[first]:
            return first, Reason.PREFIX_HIT
        if max(held.values(), default=0) > held.get(first, 0):
            return first, Reason.PREFIX_OVERRIDDEN
        if len(among) == 1:
            return first, Reason.SINGLE_CANDIDATE
        if len(equal) == 1:
            return first, Reason.LEAST_LOADED
        return first, Reason.RANDOM if key is None else Reason.AFFINITY

    def _one_of(self, equal: Sequence[str], key: bytes | None) -> str:
        if key is None and len(equal) <= _NUM_LISTED:
            return equal[self.rng.randrange(len(equal))]
        position = self.rng.randrange(CIRCLE) if key is None else position_of(key)
        return min(equal, key=lambda replica_id: distance(points_of(replica_id), position))


def _key(routing: RoutingRequest) -> bytes | None:
    if routing.request.affinity_key is not None:
        return routing.request.affinity_key.encode()
    return routing.block_hashes[0] if routing.block_hashes else None
