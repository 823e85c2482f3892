"""Slots and KV blocks that each tenant holds, and the fair share of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, KeysView

from replicas.engine.sequence import Sequence
from replicas.protocol import BANDS, Band, fair_share


class TenantSlots:
    """Slots that each tenant's running sequences hold, by the band they are scheduled in.

    A tenant's share in a band = slots left by more urgent bands / tenants that run or wait in the band. It is rounded
    down, and at least one.

    Invariant: a tenant is listed in a band if and only if it holds a slot there.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._held: dict[Band, Counter[str]] = {band: Counter() for band in Band}
        self._num_held = dict.fromkeys(Band, 0)

    def take(self, sequence: Sequence) -> None:
        """Count the slot that `sequence` has got."""
        band = sequence.effective_band
        self._held[band][sequence.request.tenant] += 1
        self._num_held[band] += 1

    def give_back(self, sequence: Sequence) -> None:
        """Stop counting the slot of `sequence`."""
        band, tenant = sequence.effective_band, sequence.request.tenant
        held = self._held[band]
        held[tenant] -= 1
        self._num_held[band] -= 1
        if not held[tenant]:
            del held[tenant]

    def of(self, band: Band, tenant: str) -> int:
        """Return the number of slots that a tenant holds."""
        return self._held[band][tenant]

    def num_tenants(self, band: Band, waiting: KeysView[str]) -> int:
        """Return the number of tenants that run in the band or are in `waiting`."""
        return len(self._held[band].keys() | waiting)

    def share(self, band: Band, waiting: KeysView[str]) -> int:
        """Return the share of each tenant, with the tenants in `waiting`."""
        num_slots = self._num_slots - sum(self._num_held[other] for other in BANDS[:band])
        return fair_share(num_slots, self.num_tenants(band, waiting))

    def below_share(self, band: Band, waiting: KeysView[str]) -> frozenset[str]:
        """Return the tenants in `waiting` that hold fewer slots than their share; none while there is one tenant."""
        held = self._held[band]
        if len(waiting) < 2 and held.keys() <= waiting:
            return frozenset()  # The usual case; this runs for every admission.
        share = self.share(band, waiting)
        return frozenset(tenant for tenant in waiting if held[tenant] < share)

    def surplus(self, band: Band, waiting: KeysView[str]) -> Counter[str]:
        """Return the number of slots that each tenant holds beyond its share, for those that do."""
        share = self.share(band, waiting)
        return Counter({tenant: num - share for tenant, num in self._held[band].items() if num > share})

    def check_invariants(self, running: Iterable[Sequence]) -> None:
        """Assert that the counts are those of `running`."""
        held: dict[Band, Counter[str]] = {band: Counter() for band in Band}
        for sequence in running:
            held[sequence.effective_band][sequence.request.tenant] += 1
        assert held == self._held and all(all(counts.values()) for counts in self._held.values())
        assert self._num_held == {band: counts.total() for band, counts in held.items()}


class TenantBlocks:
    """KV blocks that the tenants of one band hold at one moment. A shared block counts for each sequence.

    A tenant's share = blocks left by more urgent bands / tenants that run or wait in the band, rounded down.

    Invariants:
        A tenant that yields the sequences of `yielding` to others holds at least its share afterwards. So two tenants
        never take blocks from each other in turn.
        A tenant's only sequence never yields, and of several the least urgent does. So the most urgent sequence of all
        runs to its end.
    """

    def __init__(self, running: Iterable[Sequence], band: Band, num_blocks: int, num_tenants: int) -> None:
        """`running` is all running sequences, most urgent first."""
        self._of_band: list[Sequence] = []
        self._held: Counter[str] = Counter()
        for sequence in running:
            if sequence.effective_band is band:
                self._of_band.append(sequence)
                self._held[sequence.request.tenant] += sequence.num_blocks
            elif sequence.effective_band < band:
                num_blocks -= sequence.num_blocks
        self.share = fair_share(num_blocks, num_tenants)

    def is_below_share(self, tenant: str) -> bool:
        """Return True if the tenant holds fewer blocks than its share."""
        return self._held[tenant] < self.share

    def first_to_preempt(self) -> Sequence | None:
        """Return the least urgent sequence of the tenant with most blocks beyond its share; None: there is none.

        A tenant with one sequence is passed over.
        """
        nums = Counter(sequence.request.tenant for sequence in self._of_band)
        beyond = [tenant for tenant, num in self._held.items() if num > self.share and nums[tenant] > 1]
        if not beyond:
            return None
        most = max(beyond, key=self._held.__getitem__)
        return next(sequence for sequence in reversed(self._of_band) if sequence.request.tenant == most)

    def yielding(self, may_yield: Callable[[Sequence], bool]) -> list[Sequence]:
        """Return the sequences that may be preempted for another tenant's share.

        The first to be preempted is last: of the tenant with most blocks, the least urgent that leaves it its share.
        """
        left, yielding = self._held.copy(), []
        for sequence in reversed(self._of_band):
            tenant, num_blocks = sequence.request.tenant, sequence.num_blocks
            if left[tenant] - num_blocks >= self.share and may_yield(sequence):
                left[tenant] -= num_blocks
                yielding.append(sequence)
        yielding.sort(key=lambda sequence: -self._held[sequence.request.tenant])
        yielding.reverse()
        return yielding
