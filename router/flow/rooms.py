"""Replicas with room for a request, in the orders that decisions need, kept up to date replica by replica."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from replicas.protocol import Band, GenerateRequest
from router.balancing.load_table import LoadTable
from router.flow.slots import SlotPolicy
from router.types import Candidates, ClusterLoad, ReplicaView

_ALL_BANDS = frozenset(Band)
_NO_BANDS: frozenset[Band] = frozenset()
_MAX_PENDING = 64
"""Changed replicas that an index may have pending, beyond twice the number of known ones."""


@dataclass(frozen=True, slots=True)
class Room:
    """Room on one replica."""

    max_tokens: float
    """Most tokens, prompt and earlier output, of a request for which the replica has blocks."""
    is_ready: bool = True
    """True if the replica goes before those that have only places beyond their slots."""


@dataclass(slots=True)
class _Rank:
    """Replicas of one rank: ready ones, or the others. Both lists are sorted."""

    by_tokens: list[tuple[int, str]] = field(default_factory=list)
    by_max_tokens: list[tuple[float, str]] = field(default_factory=list)
    orders: dict[str, tuple[tuple[int, str], tuple[float, str]]] = field(default_factory=dict)
    """Place of each replica in the two lists."""

    def add(self, replica_id: str, outstanding_tokens: int, max_tokens: float) -> None:
        orders = ((outstanding_tokens, replica_id), (max_tokens, replica_id))
        self.orders[replica_id] = orders
        insort(self.by_tokens, orders[0])
        insort(self.by_max_tokens, orders[1])

    def discard(self, replica_id: str) -> None:
        orders = self.orders.pop(replica_id, None)
        if orders is not None:
            del self.by_tokens[bisect_left(self.by_tokens, orders[0])]
            del self.by_max_tokens[bisect_left(self.by_max_tokens, orders[1])]

    def has_blocks(self, num_tokens: int) -> bool:
        return bool(self.by_max_tokens) and self.by_max_tokens[-1][0] >= num_tokens


class RoomIndex:
    """Index of the replicas with room by one rule.

    Invariant: once the changed replicas are taken in, it holds exactly the known replicas that have room, in order.
    """

    def __init__(self, table: LoadTable, rule: Callable[[ReplicaView], Room | None]) -> None:
        self._table = table
        self._rule = rule
        self._changed = table.subscribe()
        self._ready, self._others = _Rank(), _Rank()

    @property
    def num_pending(self) -> int:
        """Number of changed replicas that are not taken in yet, known and forgotten ones."""
        return len(self._changed)

    def __len__(self) -> int:
        self.take_changes()
        return len(self._ready.orders) + len(self._others.orders)

    def num_ready(self, num_tokens: int) -> int:
        """Return the number of ready replicas with blocks for a request of so many tokens."""
        self.take_changes()
        by_max_tokens = self._ready.by_max_tokens
        return len(by_max_tokens) - bisect_left(by_max_tokens, (num_tokens, ""))

    def candidates(self, num_tokens: int, is_fit: Callable[[ReplicaView], bool] | None = None) -> Candidates | None:
        """Return the replicas with blocks for a request of so many tokens, the ready ones alone if there are any.

        `is_fit` leaves out others. None: there is no replica.
        """
        self.take_changes()
        for rank in (self._ready, self._others):
            if rank.has_blocks(num_tokens):
                found = _Candidates(self._table, rank, num_tokens, is_fit)
                if next(found.by_tokens(), None) is not None:
                    return found
        return None

    def views(self) -> Iterator[ReplicaView]:
        """Yield the load of each replica with room. The table must not change during the iteration."""
        self.take_changes()
        for rank in (self._ready, self._others):
            for replica_id in rank.orders:
                view = self._table.load_of(replica_id)
                assert view is not None
                yield view

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        self.take_changes()
        expected: dict[bool, list[tuple[int, str, float]]] = {True: [], False: []}
        for view in self._table.views():
            if (room := self._rule(view)) is not None:
                expected[room.is_ready].append((view.outstanding_tokens, view.stats.replica_id, room.max_tokens))
        for is_ready, rank in ((True, self._ready), (False, self._others)):
            assert rank.by_tokens == sorted(entry[:2] for entry in expected[is_ready])
            assert rank.by_max_tokens == sorted((entry[2], entry[1]) for entry in expected[is_ready])
            assert rank.orders.keys() == {entry[1] for entry in expected[is_ready]}

    def take_changes(self) -> None:
        """Take in the replicas that have changed, come or gone; each question does so first."""
        while self._changed:
            replica_id = self._changed.pop()
            self._ready.discard(replica_id)
            self._others.discard(replica_id)
            view = self._table.load_of(replica_id)
            room = None if view is None else self._rule(view)
            if view is not None and room is not None:
                rank = self._ready if room.is_ready else self._others
                rank.add(replica_id, view.outstanding_tokens, room.max_tokens)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Candidates of one rank of an index; valid until the table changes."""

    table: LoadTable
    rank: _Rank
    num_tokens: int
    is_fit: Callable[[ReplicaView], bool] | None

    @property
    def cluster(self) -> ClusterLoad:
        return self.table.cluster()

    def get(self, replica_id: str) -> ReplicaView | None:
        orders = self.rank.orders.get(replica_id)
        if orders is None or orders[1][0] < self.num_tokens:
            return None
        view = self.table.load_of(replica_id)
        return view if view is None or self.is_fit is None or self.is_fit(view) else None

    def by_tokens(self) -> Iterator[ReplicaView]:
        for _, replica_id in self.rank.by_tokens:
            if (view := self.get(replica_id)) is not None:
                yield view

    def clockwise(self, position: int) -> Iterator[ReplicaView]:
        for replica_id in self.table.ring.clockwise(position):
            if (view := self.get(replica_id)) is not None:
                yield view

    def distance(self, replica_id: str, position: int) -> int:
        return self.table.ring.distance(replica_id, position)


class Rooms:
    """Indexes of the replicas with room by a slot policy: for each band, and for other tenants that give way."""

    def __init__(self, table: LoadTable, slots: SlotPolicy) -> None:
        self._table = table
        self._slots = slots
        self._places: dict[tuple[Band, bool, bool], RoomIndex] = {}
        self._giving_way = {band: RoomIndex(table, self._fair_rule(band)) for band in Band}

    def of_band(self, band: Band, is_starved: bool) -> RoomIndex:
        """Return the replicas with places for a band; `is_starved`: the band is."""
        key = (band, is_starved, self._table.cluster().num_serving == 1)
        if key not in self._places:
            self._places[key] = RoomIndex(self._table, self._rule(*key))
        return self._places[key]

    def giving_way(self, band: Band) -> RoomIndex:
        """Return the replicas without a place for a band on which its tenants give way to one that has none there."""
        return self._giving_way[band]

    def fair_candidates(self, request: GenerateRequest) -> Candidates | None:
        """Return the replicas on which other tenants of the band give way to a request; None: there is none."""
        band = request.band
        return self._giving_way[band].candidates(0, lambda view: self._slots.gives_way(view, band, request))

    def has_fair_place(self, band: Band, tenant: str) -> bool:
        """Return True if on any replica other tenants of the band give way to a tenant."""
        return any(view.num_fair_places(band, tenant) > 0 for view in self._giving_way[band].views())

    def trim(self) -> None:
        """Bound what the indexes that are not asked remember of forgotten replicas. Called once in a while."""
        for index in (*self._places.values(), *self._giving_way.values()):
            if index.num_pending > 2 * len(self._table) + _MAX_PENDING:
                index.take_changes()

    def check_invariants(self) -> None:
        """Fail if an invariant of an index does not hold."""
        for index in (*self._places.values(), *self._giving_way.values()):
            index.check_invariants()

    def _rule(self, band: Band, is_starved: bool, is_only: bool) -> Callable[[ReplicaView], Room | None]:
        starved = _ALL_BANDS if is_starved else _NO_BANDS

        def room(view: ReplicaView) -> Room | None:
            if self._slots.places(view, band, starved, is_only) <= 0:
                return None
            return Room(self._slots.max_tokens(view, band, starved), self._slots.is_ready(view, band))

        return room

    def _fair_rule(self, band: Band) -> Callable[[ReplicaView], Room | None]:
        return lambda view: Room(float("inf")) if self._slots.gives_way(view, band, None) else None
