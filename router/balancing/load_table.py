"""Load table: this ingress's knowledge of every replica's load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from replicas.protocol import Band, ReplicaStats
from router.types import ReplicaView

_MAX_REORDERING_S = 5.0
"""Reports arrive over several streams and by poll. No report is overtaken by one that is this much newer, seconds."""


@dataclass(slots=True, eq=False)
class InFlight:
    """Request of this ingress on a replica, as the table counts it; changed only by the table."""

    replica_id: str
    band: Band
    prompt_tokens: int
    outstanding_tokens: int
    tenant: str
    is_seen: bool = False
    """True if a report that counts the request has arrived."""


@dataclass(slots=True)
class _Own:
    """Requests of this ingress on one replica."""

    requests: dict[InFlight, None] = field(default_factory=dict)
    num_by_band: list[int] = field(default_factory=lambda: [0] * len(Band))
    num_by_tenant: Counter[tuple[Band, str]] = field(default_factory=Counter)
    outstanding_tokens: int = 0
    unseen_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    stats: ReplicaStats
    received_s: float
    foreign_by_band: tuple[int, ...]
    """Requests of other ingresses: those reported beyond this ingress's own at the arrival of the report."""
    foreign_tokens: int


class LoadTable:
    """Table of the newest report of each replica, and of this ingress's own requests on each one.

    Invariants:
        at most `max_replicas` entries;
        the stats of an entry never go back in time, unless the replica's clock does;
        a replica's own counts are the sums over this ingress's requests in flight on it.
    """

    def __init__(self, clock: Callable[[], float], max_replicas: int = 4096) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._max_replicas = max_replicas
        self._entries: dict[str, _Entry] = {}
        self._own: dict[str, _Own] = {}

    def now(self) -> float:
        """Return the time of the table's clock, in monotonic seconds."""
        return self._clock()

    def record(self, stats: ReplicaStats) -> None:
        """Store a snapshot, unless a newer one of the same replica is known.

        A snapshot that is more than 5 s older than the known one is stored: the replica's clock was set back. A full
        table forgets the replica whose last report is oldest.
        """
        known = self._entries.get(stats.replica_id)
        if known is not None and 0 < known.stats.taken_unix_s - stats.taken_unix_s < _MAX_REORDERING_S:
            return
        if known is None and len(self._entries) >= self._max_replicas:
            del self._entries[min(self._entries, key=lambda replica_id: self._entries[replica_id].received_s)]
        own = self._own.get(stats.replica_id, _Own())
        reported = zip(stats.num_running_by_band, stats.num_waiting_by_band, own.num_by_band, strict=True)
        self._entries[stats.replica_id] = _Entry(
            stats,
            self._clock(),
            tuple(max(0, running + waiting - sent) for running, waiting, sent in reported),
            max(0, stats.outstanding_tokens - own.outstanding_tokens),
        )

    def replace(self, polled: Iterable[ReplicaStats], asked_s: float) -> list[str]:
        """Store the answers to a poll of all replicas. Forget the replicas that did not answer, and return their ids.

        `asked_s` is `now()` before the poll: a replica that has reported since then stays.
        """
        answered = set()
        for stats in polled:
            self.record(stats)
            answered.add(stats.replica_id)
        gone = [
            replica_id
            for replica_id, entry in self._entries.items()
            if replica_id not in answered and entry.received_s <= asked_s
        ]
        for replica_id in gone:
            del self._entries[replica_id]
        return gone

    def forget(self, replica_id: str) -> None:
        """Drop the report of a replica. This ingress's requests on it are counted until they end."""
        self._entries.pop(replica_id, None)

    def begin(
        self, replica_id: str, band: Band, prompt_tokens: int, output_tokens: int, tenant: str = "anonymous"
    ) -> InFlight:
        """Count one more request of this ingress on a replica, with the tokens that it is expected to need."""
        in_flight = InFlight(replica_id, band, prompt_tokens, prompt_tokens + output_tokens, tenant)
        self._add(in_flight)
        return in_flight

    def move(self, in_flight: InFlight, replica_id: str) -> None:
        """Move a request's count to the replica that really serves it."""
        self.end(in_flight)
        in_flight.replica_id = replica_id
        self._add(in_flight)

    def progress(self, in_flight: InFlight, num_tokens: int) -> None:
        """Note output: the replica's reports now count the request, and it has `num_tokens` fewer to compute."""
        own = self._own[in_flight.replica_id]
        if not in_flight.is_seen:
            in_flight.is_seen = True
            own.unseen_tokens -= in_flight.prompt_tokens
            num_tokens += in_flight.prompt_tokens
        # At least one token stays outstanding until the end, even if the output is longer than expected.
        done = min(num_tokens, in_flight.outstanding_tokens - 1)
        in_flight.outstanding_tokens -= done
        own.outstanding_tokens -= done

    def end(self, in_flight: InFlight) -> None:
        """Stop counting a request. Called exactly once for each `begin`."""
        own = self._own[in_flight.replica_id]
        del own.requests[in_flight]
        own.num_by_band[in_flight.band] -= 1
        own.num_by_tenant[in_flight.band, in_flight.tenant] -= 1
        if not own.num_by_tenant[in_flight.band, in_flight.tenant]:
            del own.num_by_tenant[in_flight.band, in_flight.tenant]
        own.outstanding_tokens -= in_flight.outstanding_tokens
        if not in_flight.is_seen:
            own.unseen_tokens -= in_flight.prompt_tokens
        if not own.requests:
            del self._own[in_flight.replica_id]

    @property
    def takes_requests(self) -> bool:
        """True if a replica is known that is not draining."""
        return any(not entry.stats.is_draining for entry in self._entries.values())

    def views(self) -> list[ReplicaView]:
        """Return a view of every known replica, sorted by id."""
        now = self._clock()
        return [self._view(entry, now) for _, entry in sorted(self._entries.items())]

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        assert len(self._entries) <= self._max_replicas
        assert all(replica_id == entry.stats.replica_id for replica_id, entry in self._entries.items())
        for replica_id, own in self._own.items():
            assert own.requests
            assert all(in_flight.replica_id == replica_id for in_flight in own.requests)
            assert own.num_by_band == [sum(r.band is band for r in own.requests) for band in Band]
            assert own.num_by_tenant == Counter((r.band, r.tenant) for r in own.requests)
            assert own.outstanding_tokens == sum(r.outstanding_tokens for r in own.requests)
            assert own.unseen_tokens == sum(r.prompt_tokens for r in own.requests if not r.is_seen)

    def _add(self, in_flight: InFlight) -> None:
        own = self._own.setdefault(in_flight.replica_id, _Own())
        own.requests[in_flight] = None
        own.num_by_band[in_flight.band] += 1
        own.num_by_tenant[in_flight.band, in_flight.tenant] += 1
        own.outstanding_tokens += in_flight.outstanding_tokens
        if not in_flight.is_seen:
            own.unseen_tokens += in_flight.prompt_tokens

    def _view(self, entry: _Entry, now: float) -> ReplicaView:
        own = self._own.get(entry.stats.replica_id, _Own())
        return ReplicaView(
            stats=entry.stats,
            age_s=max(0.0, now - entry.received_s),
            num_by_band=tuple(f + o for f, o in zip(entry.foreign_by_band, own.num_by_band, strict=True)),
            own_by_band=tuple(own.num_by_band),
            own_by_tenant=dict(own.num_by_tenant),
            outstanding_tokens=entry.foreign_tokens + own.outstanding_tokens,
            unseen_tokens=own.unseen_tokens,
        )
