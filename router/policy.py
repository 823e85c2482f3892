"""Where a request goes: policies over plain views of the replicas."""

from __future__ import annotations

import random

from replicas.protocol import GenerateRequest
from router.types import ReplicaView


class LeastOutstanding:
    """The replica with the least work relative to its slots.

    1. A replica's outstanding requests are those that it last reported, running and waiting, or
       those that this ingress has there, whichever is more: its report covers what other ingresses
       sent, our count covers what we sent since.
    2. Replicas that drain come after all others.
    3. Fewer outstanding requests per slot come first; ties are drawn.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, request: GenerateRequest, views: list[ReplicaView]) -> list[str]:
        """Replica ids, least loaded first."""
        keyed = [(view.stats.is_draining, _load(view), self._rng.random(), view.stats.replica_id) for view in views]
        return [replica_id for *_, replica_id in sorted(keyed)]


class RoundRobin:
    """Each replica in turn, blind to load: a baseline.

    1. The replicas in order of id, starting one later with each request.
    """

    def __init__(self) -> None:
        self._num_ranked = 0

    def rank(self, request: GenerateRequest, views: list[ReplicaView]) -> list[str]:
        """Replica ids, the next in turn first."""
        if not views:
            return []
        replica_ids = sorted(view.stats.replica_id for view in views)
        start = self._num_ranked % len(replica_ids)
        self._num_ranked += 1
        return replica_ids[start:] + replica_ids[:start]


class Random:
    """A random order, blind to load: a baseline."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, request: GenerateRequest, views: list[ReplicaView]) -> list[str]:
        """Replica ids in random order."""
        replica_ids = sorted(view.stats.replica_id for view in views)
        self._rng.shuffle(replica_ids)
        return replica_ids


def _load(view: ReplicaView) -> float:
    reported = view.stats.num_running + view.stats.num_waiting
    return max(reported, view.num_in_flight) / view.stats.num_slots
