"""Number of lines to lease: the slots that urgent work leaves free, and a few more lines to wait for a slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replicas.protocol import Band
from router.flow.flow_queue import FlowQueue
from router.types import ReplicaView

_AHEAD_SHARE = 4
"""Slots per line that waits ahead. Such a line is already leased and tokenized when a slot becomes free, and one
lease transaction serves several lines."""


class LineCapacity:
    """Number of lines to lease, from the load of the replicas. Flow control decides when each is sent to one."""

    def __init__(self, load: Callable[[], Sequence[ReplicaView]], queue: FlowQueue) -> None:
        self._load = load
        self._queue = queue

    def available(self, band: Band, num_not_sent: int) -> int:
        """Return the number of lines of this band that may be leased now.

        `num_not_sent`: leased lines of this band and more urgent ones that are not in flow control's queue yet.
        Without a replica one line may wait there, so that the autoscaler starts a replica.
        """
        views = self._load()
        num_free = sum(max(0, view.num_free_slots(band)) for view in views)
        num_waiting = sum(self._queue.num_requests(other) for other in Band if other <= band)
        return num_free + self.num_ahead(views) - num_waiting - num_not_sent

    def minimum(self, band: Band) -> int:
        """Return the fewest lines of a band that are worth a lease transaction."""
        return max(1, self.num_ahead(self._load()) // 2) if band is Band.BATCH else 1

    @staticmethod
    def num_ahead(views: Sequence[ReplicaView]) -> int:
        """Return the number of lines that should wait ahead, besides those that run."""
        return max(1, sum(max(1, view.stats.num_slots // _AHEAD_SHARE) for view in views))
