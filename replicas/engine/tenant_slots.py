"""Slots that each tenant holds, and the fair share of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, KeysView

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

    def share(self, band: Band, waiting: KeysView[str]) -> int:
        """Return the share of each tenant, with the tenants in `waiting`."""
        num_slots = self._num_slots - sum(self._num_held[other] for other in BANDS[:band])
        return fair_share(num_slots, len(self._held[band].keys() | waiting))

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
