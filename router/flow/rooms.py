"""Replicas with room for a request, in the orders that decisions need, kept up to date replica by replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from replicas.protocol import Band
from router.balancing.load_table import LoadTable
from router.flow.slots import SlotPolicy
from router.types import Candidates, ClusterLoad, FairPlaces, ReplicaView

_ALL_BANDS = frozenset(Band)
_NO_BANDS: frozenset[Band] = frozenset()
_MAX_LISTED = 32
"""Most replicas with fair places for a tenant that are listed before they are ranked."""
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


class _Index(ABC):
    """Index of the known replicas, which takes in the changed ones when it is next asked."""

    def __init__(self, table: LoadTable) -> None:
        self._table = table
        self._changed = table.subscribe()

    @property
    def num_pending(self) -> int:
        """Number of changed replicas that are not taken in yet, known and forgotten ones."""
        return len(self._changed)

    def take_changes(self) -> None:
        """Take in the replicas that have changed, come or gone; each question does so first."""
        while self._changed:
            replica_id = self._changed.pop()
            self._take(replica_id, self._table.load_of(replica_id))

    @abstractmethod
    def _take(self, replica_id: str, view: ReplicaView | None) -> None:
        """Take in the load of a replica; None: it is gone."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""


class RoomIndex(_Index):
    """Index of the replicas with room by one rule.

    Invariant: once the changed replicas are taken in, it holds exactly the known replicas that have room, in order.
    """

    def __init__(self, table: LoadTable, rule: Callable[[ReplicaView], Room | None]) -> None:
        super().__init__(table)
        self._rule = rule
        self._ready, self._others = _Rank(), _Rank()

    def __len__(self) -> int:
        self.take_changes()
        return len(self._ready.orders) + len(self._others.orders)

    def num_ready(self, num_tokens: int) -> int:
        """Return the number of ready replicas with blocks for a request of so many tokens."""
        self.take_changes()
        by_max_tokens = self._ready.by_max_tokens
        return len(by_max_tokens) - bisect_left(by_max_tokens, (num_tokens, ""))

    def candidates(self, num_tokens: int) -> Candidates | None:
        """Return the replicas with blocks for a request of so many tokens, the ready ones alone if there are any.

        None: there is no replica.
        """
        self.take_changes()
        for rank in (self._ready, self._others):
            if rank.has_blocks(num_tokens):
                return _Candidates(self._table, rank, rank.by_tokens, num_tokens)
        return None

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

    def _take(self, replica_id: str, view: ReplicaView | None) -> None:
        self._ready.discard(replica_id)
        self._others.discard(replica_id)
        room = None if view is None else self._rule(view)
        if view is not None and room is not None:
            rank = self._ready if room.is_ready else self._others
            rank.add(replica_id, view.outstanding_tokens, room.max_tokens)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Candidates of one rank of an index; valid until the table changes."""

    table: LoadTable
    rank: _Rank
    order: Sequence[tuple[int, str]]
    """Places in the rank's order by tokens, of all its replicas or of those that can fit."""
    num_tokens: int
    is_fit: Callable[[ReplicaView], bool] | None = None
    """Condition beside the blocks; None: there is no other."""

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
        for _, replica_id in self.order:
            if (view := self.get(replica_id)) is not None:
                yield view

    def clockwise(self, position: int) -> Iterator[ReplicaView]:
        for replica_id in self.table.ring.clockwise(position):
            if (view := self.get(replica_id)) is not None:
                yield view

    def distance(self, replica_id: str, position: int) -> int:
        return self.table.ring.distance(replica_id, position)


class FairRoomIndex(_Index):
    """Index of the replicas on which tenants of one band give up slots to others.

    A tenant that has its fair share on each of them finds room on none, which is known without looking at them.

    Invariant: once the changed replicas are taken in, it holds exactly the known replicas with fair places, in order;
    `_refusing` holds those of them, by tenant, on which the tenant has requests and gets no slot.
    """

    def __init__(self, table: LoadTable, rule: Callable[[ReplicaView], FairPlaces | None]) -> None:
        super().__init__(table)
        self._rule = rule
        self._rank = _Rank()
        self._places: dict[str, FairPlaces] = {}
        self._refused: dict[str, frozenset[str]] = {}
        """Tenants that each replica refuses a slot."""
        self._refusing: dict[str, set[str]] = {}

    def __len__(self) -> int:
        self.take_changes()
        return len(self._places)

    def num_replicas(self, tenant: str) -> int:
        """Return the number of replicas with a slot for a tenant, whatever blocks its request needs."""
        return len(self) - len(self._refusing.get(tenant, ()))

    def candidates(self, tenant: str, num_tokens: int) -> Candidates | None:
        """Return the replicas with a slot for a tenant and blocks for its request; None: there is none."""
        num_replicas = self.num_replicas(tenant)
        if not num_replicas or not self._rank.has_blocks(num_tokens):
            return None

        def is_fit(view: ReplicaView) -> bool:
            places = self._places[view.stats.replica_id]
            return (num_places := places.of(tenant)) > 0 and num_tokens <= places.max_tokens(num_places)

        order = self._rank.by_tokens
        if num_replicas <= _MAX_LISTED:
            # A few among many are found one by one; else the first ones in the order are soon found.
            few = self._places.keys() - self._refusing.get(tenant, ())
            order = sorted([self._rank.orders[replica_id][0] for replica_id in few])
        found = _Candidates(self._table, self._rank, order, num_tokens, is_fit)
        return found if next(found.by_tokens(), None) is not None else None

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        self.take_changes()
        loads = {view.stats.replica_id: replace(view, age_s=0.0) for view in self._table.views()}
        expected = {
            replica_id: places for replica_id, load in loads.items() if (places := self._rule(load)) is not None
        }
        assert self._places == expected
        assert self._rank.by_tokens == sorted((loads[each].outstanding_tokens, each) for each in expected)
        assert self._rank.by_max_tokens == sorted((_most_tokens(places), each) for each, places in expected.items())
        refusing = [(t, each) for each, places in expected.items() for t in places.by_tenant if not places.of(t)]
        assert sorted(refusing) == sorted((t, each) for t, some in self._refusing.items() for each in some)
        assert all(self._refusing.values())

    def _take(self, replica_id: str, view: ReplicaView | None) -> None:
        self._rank.discard(replica_id)
        places = None if view is None else self._rule(view)
        if view is None or places is None:
            self._places.pop(replica_id, None)
            self._refuse(replica_id, frozenset())
        else:
            self._places[replica_id] = places
            self._rank.add(replica_id, view.outstanding_tokens, _most_tokens(places))
            self._refuse(replica_id, frozenset([tenant for tenant, num in places.by_tenant.items() if not num]))

    def _refuse(self, replica_id: str, tenants: frozenset[str]) -> None:
        """Note the tenants that a replica refuses a slot."""
        before = self._refused.pop(replica_id, frozenset())
        if tenants:
            self._refused[replica_id] = tenants
        for tenant in tenants - before:
            self._refusing.setdefault(tenant, set()).add(replica_id)
        for tenant in before - tenants:
            self._refusing[tenant].remove(replica_id)
            if not self._refusing[tenant]:
                del self._refusing[tenant]


def _most_tokens(places: FairPlaces) -> int:
    """Return the most tokens of any tenant's request that finds blocks."""
    return places.max_tokens(max(places.of_newcomer, max(places.by_tenant.values(), default=0)))


class Rooms:
    """Indexes of the replicas with room by a slot policy: for each band, and for other tenants that give way."""

    def __init__(self, table: LoadTable, slots: SlotPolicy) -> None:
        self._table = table
        self._slots = slots
        self._places: dict[tuple[Band, bool, bool], RoomIndex] = {}
        self._giving_way = {band: FairRoomIndex(table, self._fair_rule(band)) for band in Band}

    def of_band(self, band: Band, is_starved: bool) -> RoomIndex:
        """Return the replicas with places for a band; `is_starved`: the band is."""
        key = (band, is_starved, self._table.cluster().num_serving == 1)
        if key not in self._places:
            self._places[key] = RoomIndex(self._table, self._rule(*key))
        return self._places[key]

    def giving_way(self, band: Band) -> FairRoomIndex:
        """Return the replicas without an unused slot for a band on which its tenants give up slots to others."""
        return self._giving_way[band]

    def trim(self) -> None:
        """Bound what the indexes that are not asked remember of forgotten replicas. Called once in a while."""
        for index in self._indexes():
            if index.num_pending > 2 * len(self._table) + _MAX_PENDING:
                index.take_changes()

    def check_invariants(self) -> None:
        """Fail if an invariant of an index does not hold."""
        for index in self._indexes():
            index.check_invariants()

    def _indexes(self) -> list[_Index]:
        return [*self._places.values(), *self._giving_way.values()]

    def _rule(self, band: Band, is_starved: bool, is_only: bool) -> Callable[[ReplicaView], Room | None]:
        starved = _ALL_BANDS if is_starved else _NO_BANDS

        def room(view: ReplicaView) -> Room | None:
            if self._slots.places(view, band, starved, is_only) <= 0:
                return None
            return Room(self._slots.max_tokens(view, band, starved), self._slots.is_ready(view, band))

        return room

    def _fair_rule(self, band: Band) -> Callable[[ReplicaView], FairPlaces | None]:
        return lambda view: self._slots.fair_places(view, band)
