"""Sums over the replicas that serve, as the autoscaler needs them, kept up to date replica by replica."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from replicas.protocol import Band
from router.types import ReplicaView


class ReplicaParts(NamedTuple):
    """Parts of one replica in the sums, or the sums."""

    num_serving: int = 0
    num_requests: int = 0
    num_running: int = 0
    """Running requests, without batch work."""
    urgent_waiting_tokens: int = 0
    """The share of the outstanding tokens of waiting requests but batch work."""
    batch_waiting_tokens: int = 0
    urgent_tokens: int = 0
    """The share of the outstanding tokens of all requests but batch work."""


class ReplicaSums:
    """Sums over replicas; draining ones are left out.

    Invariant: the sums are over the loads that were taken in last, one for each replica.
    """

    def __init__(self) -> None:
        self._parts: dict[str, ReplicaParts] = {}
        self._slots: dict[str, int] = {}
        self._num_with_slots: Counter[int] = Counter()
        self._speeds: dict[str, float] = {}
        self.parts = ReplicaParts()

    def update(self, replica_id: str, load: ReplicaView | None) -> None:
        """Take in the present load of a replica; None: it is gone."""
        before = self._parts.pop(replica_id, ReplicaParts())
        self._speeds.pop(replica_id, None)
        if num_slots := self._slots.pop(replica_id, 0):
            self._num_with_slots[num_slots] -= 1
            if not self._num_with_slots[num_slots]:
                del self._num_with_slots[num_slots]
        after = ReplicaParts()
        if load is not None and not load.stats.is_draining:
            after = self._parts[replica_id] = _parts_of(load)
            self._slots[replica_id] = load.stats.num_slots
            self._num_with_slots[load.stats.num_slots] += 1
            if load.stats.saturated_tokens_per_s > 0:
                self._speeds[replica_id] = load.stats.saturated_tokens_per_s
        if after != before:
            changes = zip(self.parts, before, after, strict=True)
            self.parts = ReplicaParts(*(total - old + new for total, old, new in changes))

    def num_slots(self) -> int:
        """Return the fewest slots of a replica; 1 without one."""
        return min(self._num_with_slots, default=1)

    def saturated_tokens_per_s(self) -> tuple[float, ...]:
        """Return the measured speed under load of each replica that has one."""
        return tuple(self._speeds.values())


def _parts_of(load: ReplicaView) -> ReplicaParts:
    stats, num_requests = load.stats, sum(load.num_by_band)
    num_reported, num_batch = stats.num_running + stats.num_waiting, stats.num_waiting_by_band[Band.BATCH]
    tokens_per_request = stats.outstanding_tokens / num_reported if stats.num_waiting else 0.0
    return ReplicaParts(
        num_serving=1,
        num_requests=num_requests,
        num_running=sum(stats.num_running_by_band[: Band.BATCH]),
        urgent_waiting_tokens=int(tokens_per_request * (stats.num_waiting - num_batch)),
        batch_waiting_tokens=int(tokens_per_request * num_batch),
        urgent_tokens=load.outstanding_tokens * sum(load.num_by_band[: Band.BATCH]) // max(1, num_requests),
    )
