"""What this ingress knows of every replica's load."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from replicas.protocol import ReplicaStats
from router.types import ReplicaView


@dataclass(frozen=True, slots=True)
class _Entry:
    stats: ReplicaStats
    received_s: float


class LoadTable:
    """The newest stats of each replica, and how many of our own requests each one has.

    Invariants:
        at most `max_replicas` entries;
        every in-flight count is at least 1 (a replica with none has no count);
        the stats of an entry never go back in time.
    """

    def __init__(self, clock: Callable[[], float], max_replicas: int = 4096) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._max_replicas = max_replicas
        self._entries: dict[str, _Entry] = {}
        self._num_in_flight: dict[str, int] = {}

    def now(self) -> float:
        """The moment by the table's own clock, as `replace` wants it."""
        return self._clock()

    def record(self, stats: ReplicaStats) -> None:
        """Take in a snapshot, unless a newer one of the same replica is known.

        A table that is full forgets the replica that was heard of longest ago.
        """
        known = self._entries.get(stats.replica_id)
        if known is not None and known.stats.taken_unix_s > stats.taken_unix_s:
            return
        if known is None and len(self._entries) >= self._max_replicas:
            del self._entries[min(self._entries, key=lambda replica_id: self._entries[replica_id].received_s)]
        self._entries[stats.replica_id] = _Entry(stats, self._clock())

    def replace(self, polled: Iterable[ReplicaStats], asked_s: float) -> None:
        """Take in what a poll of all replicas answered, and forget the replicas that did not.

        `asked_s` is `now()` before the poll: a replica heard of since then stays.
        """
        answered = set()
        for stats in polled:
            self.record(stats)
            answered.add(stats.replica_id)
        self._entries = {
            replica_id: entry
            for replica_id, entry in self._entries.items()
            if replica_id in answered or entry.received_s > asked_s
        }

    def forget(self, replica_id: str) -> None:
        """Drop a replica that was found dead; its in-flight count ends with its requests."""
        self._entries.pop(replica_id, None)

    def begin(self, replica_id: str) -> None:
        """Count one more of our requests on a replica."""
        self._num_in_flight[replica_id] = self._num_in_flight.get(replica_id, 0) + 1

    def end(self, replica_id: str) -> None:
        """Count one less; exactly once for each `begin`."""
        left = self._num_in_flight[replica_id] - 1
        if left:
            self._num_in_flight[replica_id] = left
        else:
            del self._num_in_flight[replica_id]

    def views(self) -> list[ReplicaView]:
        """Every known replica, by id."""
        now = self._clock()
        return [
            ReplicaView(entry.stats, max(0.0, now - entry.received_s), self._num_in_flight.get(replica_id, 0))
            for replica_id, entry in sorted(self._entries.items())
        ]

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        assert len(self._entries) <= self._max_replicas
        assert all(count >= 1 for count in self._num_in_flight.values())
        assert all(replica_id == entry.stats.replica_id for replica_id, entry in self._entries.items())
