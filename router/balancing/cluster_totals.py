"""Totals over all replicas, kept up to date replica by replica."""

from __future__ import annotations

from replicas.protocol import Band
from router.types import ClusterLoad, ReplicaView

_RATE_STEPS = 1000
"""Speeds are summed in thousandths of a token a second. Sums of integers have no rounding errors to gather."""


class ClusterTotals:
    """Sums of replicas' loads.

    Invariant: the sums are over the loads that were taken in last, one for each replica.
    """

    def __init__(self) -> None:
        self._parts: dict[str, tuple[int, ...]] = {}
        self._sums = (0,) * len(_parts_of(None))

    def update(self, replica_id: str, load: ReplicaView | None) -> None:
        """Take in the present load of a replica; None: it is gone."""
        before = self._parts.pop(replica_id, None) or _parts_of(None)
        after = _parts_of(load)
        if load is not None:
            self._parts[replica_id] = after
        if after != before:
            changes = zip(self._sums, before, after, strict=True)
            self._sums = tuple([total - old + new for total, old, new in changes])

    def load(self) -> ClusterLoad:
        """Return the sums."""
        num_replicas, num_serving, outstanding_tokens, num_blocks, num_free_slots, rate = self._sums
        return ClusterLoad(
            num_replicas, num_serving, outstanding_tokens, num_blocks, num_free_slots, rate / _RATE_STEPS
        )


def _parts_of(load: ReplicaView | None) -> tuple[int, ...]:
    """Return the parts of one replica in the sums, in the order of the fields of `ClusterLoad`."""
    if load is None:
        return (0, 0, 0, 0, 0, 0)
    stats = load.stats
    return (
        1,
        not stats.is_draining,
        load.outstanding_tokens,
        stats.num_blocks,
        max(0, load.num_free_slots(Band.BATCH)),
        round(stats.saturated_tokens_per_s * _RATE_STEPS),
    )
