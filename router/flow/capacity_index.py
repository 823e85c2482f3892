"""Indexes of the replicas with capacity for a request, in the orders that decisions need; each change updates one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from replicas.protocol import Band
from router.balancing.load_table import LoadTable
from router.flow.slots import SlotPolicy
from router.types import Candidates, ClusterLoad, PreemptibleSlots, ReplicaView

_ALL_BANDS = frozenset(Band)
_NO_BANDS: frozenset[Band] = frozenset()
_MAX_LISTED = 32
"""Most replicas with preemptible slots for a tenant that are listed before they are ranked."""
_MAX_PENDING = 64
"""Changed replicas that an index may have pending, beyond twice the number of known ones."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of one replica for requests of a band."""

    max_tokens: float
    """Most tokens, prompt and earlier output, of a request for which the replica has blocks."""
    has_free_slot: bool = True
    """True if a request would get a slot at once; replicas on which it would wait come after."""


@dataclass(slots=True)
class _Rank:
    """Replicas of one rank: those with a free slot, or those without. Both lists are sorted."""

    by_tokens: list[tuple[int, str]] = field(default_factory=list)
    by_max_tokens: list[tuple[float, str]] = field(default_factory=list)
    orders: dict[str, tuple[tuple[int, str], tuple[float, str]]] = field(default_factory=dict)
    """Entries of each replica in the two lists."""

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


class BandIndex(_Index):
    """Index of the replicas with capacity for one band.

    Invariant: once the changed replicas are taken in, it holds exactly the known replicas with capacity, in order.
    """

    def __init__(self, table: LoadTable, rule: Callable[[ReplicaView], Capacity | None]) -> None:
        super().__init__(table)
        self._rule = rule
        self._with_slot, self._without_slot = _Rank(), _Rank()

    def __len__(self) -> int:
        self.take_changes()
        return len(self._with_slot.orders) + len(self._without_slot.orders)

    def num_with_free_slot(self, num_tokens: int) -> int:
        """Return the number of replicas with a free slot, and blocks for a request of so many tokens."""
        self.take_changes()
        by_max_tokens = self._with_slot.by_max_tokens
        return len(by_max_tokens) - bisect_left(by_max_tokens, (num_tokens, ""))

    def candidates(self, num_tokens: int) -> Candidates | None:
        """Return the replicas with blocks for a request of so many tokens, those with a free slot alone if any has one.

        None: there is no replica.
        """
        self.take_changes()
        for rank in (self._with_slot, self._without_slot):
            if rank.has_blocks(num_tokens):
                return _Candidates(self._table, rank, rank.by_tokens, num_tokens)
        return None

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        self.take_changes()
        expected: dict[bool, list[tuple[int, str, float]]] = {True: [], False: []}
        for view in self._table.views():
            if (capacity := self._rule(view)) is not None:
                entry = (view.outstanding_tokens, view.stats.replica_id, capacity.max_tokens)
                expected[capacity.has_free_slot].append(entry)
        for has_free_slot, rank in ((True, self._with_slot), (False, self._without_slot)):
            assert rank.by_tokens == sorted(entry[:2] for entry in expected[has_free_slot])
            assert rank.by_max_tokens == sorted((entry[2], entry[1]) for entry in expected[has_free_slot])
            assert rank.orders.keys() == {entry[1] for entry in expected[has_free_slot]}

    def _take(self, replica_id: str, view: ReplicaView | None) -> None:
        self._with_slot.discard(replica_id)
        self._without_slot.discard(replica_id)
        capacity = None if view is None else self._rule(view)
        if view is not None and capacity is not None:
            rank = self._with_slot if capacity.has_free_slot else self._without_slot
            rank.add(replica_id, view.outstanding_tokens, capacity.max_tokens)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Candidates of one rank of an index; valid until the table changes."""

    table: LoadTable
    rank: _Rank
    order: Sequence[tuple[int, str]]
    """Entries of the rank's order by tokens, of all its replicas or of those that can fit."""
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


class PreemptionIndex(_Index):
    """Index of the replicas on which tenants of one band yield slots to others.

    A tenant that has its fair share on each of them gets a slot on none, which is known without looking at them.

    Invariant: once the changed replicas are taken in, it holds exactly the known replicas with preemptible slots, in
    order; `_refusing` holds those of them, by tenant, on which the tenant has requests and gets no slot.
    """

    def __init__(self, table: LoadTable, rule: Callable[[ReplicaView], PreemptibleSlots | None]) -> None:
        super().__init__(table)
        self._rule = rule
        self._rank = _Rank()
        self._preemptible: dict[str, PreemptibleSlots] = {}
        self._refused: dict[str, frozenset[str]] = {}
        """Tenants that each replica refuses a slot."""
        self._refusing: dict[str, set[str]] = {}

    def __len__(self) -> int:
        self.take_changes()
        return len(self._preemptible)

    def num_replicas(self, tenant: str) -> int:
        """Return the number of replicas with a slot for a tenant, whatever blocks its request needs."""
        return len(self) - len(self._refusing.get(tenant, ()))

    def candidates(self, tenant: str, num_tokens: int) -> Candidates | None:
        """Return the replicas with a slot for a tenant and blocks for its request; None: there is none."""
        num_replicas = self.num_replicas(tenant)
        if not num_replicas or not self._rank.has_blocks(num_tokens):
            return None

        def is_fit(view: ReplicaView) -> bool:
            slots = self._preemptible[view.stats.replica_id]
            return (num_slots := slots.of(tenant)) > 0 and num_tokens <= slots.max_tokens(num_slots)

        order = self._rank.by_tokens
        if num_replicas <= _MAX_LISTED:
            # A few among many are found one by one; else the first ones in the order are soon found.
            few = self._preemptible.keys() - self._refusing.get(tenant, ())
            order = sorted([self._rank.orders[replica_id][0] for replica_id in few])
        candidates = _Candidates(self._table, self._rank, order, num_tokens, is_fit)
        return candidates if next(candidates.by_tokens(), None) is not None else None

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        self.take_changes()
        loads = {view.stats.replica_id: replace(view, age_s=0.0) for view in self._table.views()}
        expected = {name: slots for name, load in loads.items() if (slots := self._rule(load)) is not None}
        assert self._preemptible == expected
        assert self._rank.by_tokens == sorted((loads[name].outstanding_tokens, name) for name in expected)
        assert self._rank.by_max_tokens == sorted((_most_tokens(slots), name) for name, slots in expected.items())
        refusing = [(t, name) for name, slots in expected.items() for t in slots.by_tenant if not slots.of(t)]
        assert sorted(refusing) == sorted((t, name) for t, names in self._refusing.items() for name in names)
        assert all(self._refusing.values())

    def _take(self, replica_id: str, view: ReplicaView | None) -> None:
        self._rank.discard(replica_id)
        slots = None if view is None else self._rule(view)
        if view is None or slots is None:
            self._preemptible.pop(replica_id, None)
            self._refuse(replica_id, frozenset())
        else:
            self._preemptible[replica_id] = slots
            self._rank.add(replica_id, view.outstanding_tokens, _most_tokens(slots))
            self._refuse(replica_id, frozenset([tenant for tenant, num in slots.by_tenant.items() if not num]))

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


def _most_tokens(slots: PreemptibleSlots) -> int:
    """Return the most tokens of any tenant's request that finds blocks."""
    return slots.max_tokens(max(slots.of_newcomer, max(slots.by_tenant.values(), default=0)))


class CapacityIndex:
    """Indexes of the replicas with capacity by a slot policy: for each band, and by the slots that tenants yield."""

    def __init__(self, table: LoadTable, slots: SlotPolicy) -> None:
        self._table = table
        self._slots = slots
        self._of_band: dict[tuple[Band, bool, bool], BandIndex] = {}
        self._yielding = {band: PreemptionIndex(table, self._fair_rule(band)) for band in Band}

    def of_band(self, band: Band, is_starved: bool) -> BandIndex:
        """Return the replicas with capacity for a band; `is_starved`: the band is."""
        key = (band, is_starved, self._table.cluster().num_serving == 1)
        if key not in self._of_band:
            self._of_band[key] = BandIndex(self._table, self._rule(*key))
        return self._of_band[key]

    def yielding(self, band: Band) -> PreemptionIndex:
        """Return the replicas without an unused slot for a band on which its tenants yield slots to others."""
        return self._yielding[band]

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
        return [*self._of_band.values(), *self._yielding.values()]

    def _rule(self, band: Band, is_starved: bool, is_only: bool) -> Callable[[ReplicaView], Capacity | None]:
        starved = _ALL_BANDS if is_starved else _NO_BANDS

        def capacity(view: ReplicaView) -> Capacity | None:
            if self._slots.num_assignable(view, band, starved, is_only) <= 0:
                return None
            return Capacity(self._slots.max_tokens(view, band, starved), self._slots.has_free_slot(view, band))

        return capacity

    def _fair_rule(self, band: Band) -> Callable[[ReplicaView], PreemptibleSlots | None]:
        return lambda view: self._slots.preemptible_slots(view, band)
