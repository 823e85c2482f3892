"""Room for lines: the slots that urgent work leaves free, and a few lines more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replicas.protocol import Band
from router.flow.flow_queue import FlowQueue
from router.types import ReplicaView

_AHEAD_SHARE = 4
"""One line waits here for so many slots: it is leased and tokenized when a slot gets free, and one lease serves
several lines."""


class LineCapacity:
    """Number of lines to lease, by the load of the replicas; flow control decides when each goes to one."""

    def __init__(self, load: Callable[[], Sequence[ReplicaView]], queue: FlowQueue) -> None:
        self._load = load
        self._queue = queue

    def available(self, band: Band, num_not_sent: int) -> int:
        """Lines of this band that may be leased now.

        `num_not_sent`: leased lines of this band and above that flow control does not know yet. Without any replica
        one line may wait: it has a replica started.
        """
        views = self._load()
        num_free = sum(max(0, view.num_free_slots(band)) for view in views)
        num_waiting = sum(self._queue.num_requests(other) for other in Band if other <= band)
        return num_free + self.num_ahead(views) - num_waiting - num_not_sent

    def minimum(self, band: Band) -> int:
        """Fewest lines of a band that are worth a lease of their own."""
        return max(1, self.num_ahead(self._load()) // 2) if band is Band.BATCH else 1

    @staticmethod
    def num_ahead(views: Sequence[ReplicaView]) -> int:
        """Lines that should wait beside those that run."""
        return max(1, sum(max(1, view.stats.num_slots // _AHEAD_SHARE) for view in views))
