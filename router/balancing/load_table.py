"""Load table: this ingress's knowledge of every replica's load, with what decisions need of it kept up to date."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from replicas.protocol import Band, IngressShare, ReplicaStats
from router.balancing.cluster_totals import ClusterTotals
from router.balancing.hash_ring import HashRing
from router.slot_shares import SlotShare, shares_of
from router.types import ClusterLoad, ReplicaView

_MAX_REORDERING_S = 5.0
"""Reports arrive over several streams and by poll. No report is overtaken by one that is this much newer, seconds."""

_NO_SHARE = IngressShare("", (0,) * len(Band), 0)


@dataclass(slots=True, eq=False)
class InFlight:
    """Request of this ingress on a replica, as the table counts it; changed only by the table."""

    replica_id: str
    band: Band
    prompt_tokens: int
    outstanding_tokens: int
    tenant: str
    since_s: float
    """Time of its dispatch, on the table's clock."""
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


class _Entry:
    """Newest report of a replica."""

    __slots__ = ("foreign_by_band", "foreign_tokens", "received_s", "shares", "stats")

    stats: ReplicaStats
    received_s: float
    """Time at which it was taken in; later polls may have repeated it."""
    foreign_by_band: tuple[int, ...]
    """Requests of other ingresses: those reported beyond this ingress's part of the report."""
    foreign_tokens: int
    shares: tuple[SlotShare, ...]
    """This ingress's share in the slots for each band."""

    def take(self, stats: ReplicaStats, own: _Own, ingress_id: str, now_s: float) -> None:
        """Take in a report, by an ingress of this id with its own requests on the replica."""
        part = next((part for part in stats.by_ingress if part.ingress_id == ingress_id), _NO_SHARE)
        self.stats, self.received_s = stats, now_s
        reported = zip(stats.num_running_by_band, stats.num_waiting_by_band, strict=True)
        # The replica may still run requests that this ingress has aborted. They count as foreign until it drops them.
        known = zip(part.num_by_band, own.num_by_band, strict=True)
        self.foreign_by_band = tuple([sum(nums) - min(sent) for nums, sent in zip(reported, known, strict=True)])
        self.foreign_tokens = stats.outstanding_tokens - min(part.outstanding_tokens, own.outstanding_tokens)
        self.shares = shares_of(stats, ingress_id)


class _LastPoll:
    """Answers to the last poll of all replicas: what the next poll is compared with.

    It keeps plain lists in the order of the answers, so that a poll that changes little reads little memory.
    """

    def __init__(self, replica_ids: Sequence[str] = (), before: _LastPoll | None = None) -> None:
        """`before`: the poll before, with other replicas or in another order; what it knows stays."""
        self.replica_ids = list(replica_ids)
        self.answered = frozenset(replica_ids)
        self.answered_s = -math.inf
        """Time at which the answers were taken in."""
        known = {} if before is None else dict(before.known())
        self._versions: list[int | None] = [known.get(replica_id) for replica_id in replica_ids]
        """Versions of the answers that the table holds; None: the next answer may say something new."""
        self._index_of = {replica_id: index for index, replica_id in enumerate(self.replica_ids)}

    def take(self, polled: Collection[ReplicaStats]) -> list[ReplicaStats]:
        """Take in answers of the same replicas in the same order; return those that may say something new."""
        # An engine that is stuck, dead or draining has the version of its last step, and more to say.
        changed = [
            stats
            for known, stats in zip(self._versions, polled, strict=True)
            if known != stats.version or stats.stalled_s or stats.is_draining
        ]
        for stats in changed:
            is_whole = stats.version and not (stats.stalled_s or stats.is_draining)
            self._versions[self._index_of[stats.replica_id]] = stats.version if is_whole else None
        return changed

    def known(self) -> Iterator[tuple[str, int]]:
        """Yield each replica whose answer the table holds, and the answer's version."""
        for replica_id, version in zip(self.replica_ids, self._versions, strict=True):
            if version is not None:
                yield replica_id, version

    def forget(self, replica_id: str) -> None:
        """Note that the table no longer holds the replica's answer."""
        if (index := self._index_of.get(replica_id)) is not None:
            self._versions[index] = None


@dataclass(frozen=True, slots=True)
class PollChanges:
    """Changes of the table by a poll of all replicas."""

    changed: list[ReplicaStats]
    """Answers that may say something new."""
    answered: Set[str]
    """Replicas that answered."""
    gone: list[str]
    """Replicas that did not answer, which the table has forgotten."""
    joined: Set[str] = frozenset()
    """Replicas that answered, and did not answer the poll before."""
    left: Set[str] = frozenset()
    """Replicas that did not answer, and answered the poll before."""


class LoadTable:
    """Table of the newest report of each replica, and of this ingress's own requests on each one.

    A change of a replica's load costs the same however many replicas there are. It only marks the replica as changed,
    for the totals and for each subscriber. They take in the changed replicas when they are next asked.

    Invariants:
        at most `max_replicas` entries;
        the stats of an entry never go back in time, unless the replica's clock does;
        a replica's own counts are the sums over this ingress's requests in flight on it;
        the load kept of a replica is that of its entry and its own counts.
    """

    def __init__(self, clock: Callable[[], float], ingress_id: str = "", max_replicas: int = 4096) -> None:
        """`clock` gives monotonic seconds."""
        self.ingress_id = ingress_id
        self._clock = clock
        self._max_replicas = max_replicas
        self._entries: dict[str, _Entry] = {}
        self._own: dict[str, _Own] = {}
        self._no_own = _Own()
        """Counts of a replica without own requests; never changed."""
        self._loads: dict[str, ReplicaView] = {}
        """Loads computed since their replicas' last change, with an age of zero."""
        self._last_poll = _LastPoll()
        self._changed: set[str] = set()
        self._subscribers = [self._changed]
        self._totals = ClusterTotals()
        self.ring = HashRing()
        """Ring of the known replicas, and for a while of forgotten ones."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._entries

    def now(self) -> float:
        """Return the time of the table's clock, in monotonic seconds."""
        return self._clock()

    def record(self, stats: ReplicaStats) -> bool:
        """Store a snapshot, unless a newer one of the same replica is known; return False if it was stored before.

        A snapshot that is more than 5 s older than the known one is stored: the replica's clock was set back. A full
        table forgets the replica whose last report is oldest.
        """
        known = self._entries.get(stats.replica_id)
        if known is not None and known.stats is stats:
            return False
        if self._store(stats):
            # A delta's report lacks the served tokens. The next poll brings them, so its answer is new.
            self._last_poll.forget(stats.replica_id)
        return True

    def replace(self, polled: Collection[ReplicaStats], asked_s: float) -> PollChanges:
        """Store the answers to a poll of all replicas, and forget the replicas that did not answer.

        `asked_s` is `now()` before the poll: a replica that has reported since then stays.
        """
        replica_ids = [stats.replica_id for stats in polled]
        before = self._last_poll.answered
        if replica_ids != self._last_poll.replica_ids:
            self._last_poll = _LastPoll(replica_ids, self._last_poll)
        answered, changed = self._last_poll.answered, self._last_poll.take(polled)
        self._last_poll.answered_s = self._clock()
        for stats in changed:
            if not self._store(stats):
                self._last_poll.forget(stats.replica_id)
        gone = self._forget_silent(answered, asked_s)
        if answered is before:
            return PollChanges(changed, answered, gone)
        return PollChanges(changed, answered, gone, joined=answered - before, left=before - answered)

    def forget(self, replica_id: str) -> None:
        """Drop the report of a replica. This ingress's requests on it are counted until they end."""
        if self._entries.pop(replica_id, None) is not None:
            self._last_poll.forget(replica_id)
            self._mark(replica_id)

    def begin(
        self, replica_id: str, band: Band, prompt_tokens: int, output_tokens: int, tenant: str = "anonymous"
    ) -> InFlight:
        """Count one more request of this ingress on a replica, with the tokens that it is expected to need."""
        in_flight = InFlight(replica_id, band, prompt_tokens, prompt_tokens + output_tokens, tenant, self._clock())
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
        self._mark(in_flight.replica_id)

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
        self._mark(in_flight.replica_id)
        if not own.requests:
            del self._own[in_flight.replica_id]

    def waiting(self, band: Band, for_s: float) -> list[InFlight]:
        """Return this ingress's requests that wait on full replicas at least `for_s` seconds after their dispatch.

        A report tells how many requests wait on a replica. The newest ones without output count as those.
        """
        in_flights = []
        for replica_id, own in self._own.items():
            load = self.load_of(replica_id) if own.unseen_tokens else None
            if load is not None and load.stats.num_waiting_by_band[band] and load.num_unused_slots(band) <= 0:
                unseen = [request for request in reversed(own.requests) if request.band is band and not request.is_seen]
                waiting = unseen[: load.stats.num_waiting_by_band[band]]
                latest_s = self._heard_s(replica_id) - for_s
                in_flights += [request for request in waiting if request.since_s <= latest_s]
        return in_flights

    def views(self) -> list[ReplicaView]:
        """Return a view of every known replica, sorted by id. Its cost grows with their number."""
        now = self._clock()
        return [
            replace(self._view(entry), age_s=max(0.0, now - self._heard_s(replica_id)))
            for replica_id, entry in sorted(self._entries.items())
        ]

    def ages_s(self) -> dict[str, float]:
        """Return the seconds since each replica's last report, by id."""
        now = self._clock()
        return {replica_id: max(0.0, now - self._heard_s(replica_id)) for replica_id in self._entries}

    def load_of(self, replica_id: str) -> ReplicaView | None:
        """Return the load of a replica, with an age of zero; None: it is not known."""
        load = self._loads.get(replica_id)
        if load is None and (entry := self._entries.get(replica_id)) is not None:
            load = self._loads[replica_id] = self._view(entry)
        return load

    def cluster(self) -> ClusterLoad:
        """Return the load of all known replicas together."""
        while self._changed:
            replica_id = self._changed.pop()
            self._totals.update(replica_id, self.load_of(replica_id))
        return self._totals.load()

    def block_size(self) -> int | None:
        """Return the number of tokens in a block of any replica; None: no replica is known."""
        return next((entry.stats.block_size for entry in self._entries.values()), None)

    def subscribe(self) -> set[str]:
        """Return a set to which the id of each replica is added that changes, comes or goes; its owner empties it."""
        changed = set(self._entries)
        self._subscribers.append(changed)
        return changed

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        assert len(self._entries) <= self._max_replicas
        assert all(load == self._view(self._entries[replica_id]) for replica_id, load in self._loads.items())
        assert all(replica_id in self.ring for replica_id in self._entries)
        for replica_id, version in self._last_poll.known():
            assert self._entries[replica_id].stats.version == version
        expected = ClusterTotals()
        for replica_id, entry in self._entries.items():
            expected.update(replica_id, self._view(entry))
        assert self.cluster() == expected.load()
        assert all(replica_id == entry.stats.replica_id for replica_id, entry in self._entries.items())
        for replica_id, own in self._own.items():
            assert own.requests
            assert all(in_flight.replica_id == replica_id for in_flight in own.requests)
            assert own.num_by_band == [sum(r.band is band for r in own.requests) for band in Band]
            assert own.num_by_tenant == Counter((r.band, r.tenant) for r in own.requests)
            assert own.outstanding_tokens == sum(r.outstanding_tokens for r in own.requests)
            assert own.unseen_tokens == sum(r.prompt_tokens for r in own.requests if not r.is_seen)

    def _store(self, stats: ReplicaStats) -> bool:
        """Store a snapshot; return False if a newer one is known."""
        known = self._entries.get(stats.replica_id)
        if known is not None and 0 < known.stats.taken_unix_s - stats.taken_unix_s < _MAX_REORDERING_S:
            return False
        if known is None:
            self._make_place(stats.replica_id)
            known = self._entries[stats.replica_id] = _Entry()
        own = self._own.get(stats.replica_id, self._no_own)
        known.take(stats, own, self.ingress_id, self._clock())
        self._mark(stats.replica_id)
        return True

    def _heard_s(self, replica_id: str) -> float:
        """Return the time of a replica's last report or answer to a poll."""
        received_s = self._entries[replica_id].received_s
        return max(received_s, self._last_poll.answered_s) if replica_id in self._last_poll.answered else received_s

    def _forget_silent(self, answered: Set[str], asked_s: float) -> list[str]:
        """Forget the replicas that did not answer a poll and have not reported since; return them."""
        # Each replica that answered is in the table, unless there are more of them than it may hold.
        silent = sorted(self._entries.keys() - answered) if len(self._entries) != len(answered) else []
        gone = [replica_id for replica_id in silent if self._heard_s(replica_id) <= asked_s]
        # Those that were forgotten before, as a lost or a hung replica is, and have not come back.
        if len(self.ring) > len(self._entries):
            gone += sorted(set(self.ring) - answered - self._entries.keys())
        for replica_id in gone:
            self.forget(replica_id)
            if replica_id in self.ring:
                self.ring.remove(replica_id)
        return gone

    def _mark(self, replica_id: str) -> None:
        self._loads.pop(replica_id, None)
        for changed in self._subscribers:
            changed.add(replica_id)

    def _make_place(self, replica_id: str) -> None:
        """Prepare for the first report of a replica."""
        if len(self._entries) >= self._max_replicas:
            self.forget(min(self._entries, key=self._heard_s))
        if len(self.ring) >= 2 * self._max_replicas:
            for gone in [known for known in self.ring if known not in self._entries]:
                self.ring.remove(gone)
        if replica_id not in self.ring:
            self.ring.add(replica_id)

    def _add(self, in_flight: InFlight) -> None:
        own = self._own.setdefault(in_flight.replica_id, _Own())
        own.requests[in_flight] = None
        own.num_by_band[in_flight.band] += 1
        own.num_by_tenant[in_flight.band, in_flight.tenant] += 1
        own.outstanding_tokens += in_flight.outstanding_tokens
        if not in_flight.is_seen:
            own.unseen_tokens += in_flight.prompt_tokens
        self._mark(in_flight.replica_id)

    def _view(self, entry: _Entry) -> ReplicaView:
        own = self._own.get(entry.stats.replica_id, self._no_own)
        return ReplicaView(
            stats=entry.stats,
            age_s=0.0,
            num_by_band=tuple([f + o for f, o in zip(entry.foreign_by_band, own.num_by_band, strict=True)]),
            own_by_band=tuple(own.num_by_band),
            own_by_tenant=dict(own.num_by_tenant),
            outstanding_tokens=entry.foreign_tokens + own.outstanding_tokens,
            unseen_tokens=own.unseen_tokens,
            shares=entry.shares,
        )
