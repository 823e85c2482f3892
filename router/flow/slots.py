"""Slots of a replica: the number of requests of a band that it may be assigned now. Pure: views in, numbers out."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

from replicas.protocol import Band
from router.types import PreemptibleSlots, ReplicaView


class SlotPolicy(Protocol):
    """Policy that decides whether a replica has capacity for a request; `starved` bands may have a request promoted.

    Each answer depends on its arguments alone, so answers may be kept until a replica's load changes.
    """

    def num_assignable(self, view: ReplicaView, band: Band, starved: Set[Band], is_only: bool) -> int:
        """Return the number of requests of a band that the replica may be assigned; `is_only`: it is the only one."""

    def max_tokens(self, view: ReplicaView, band: Band, starved: Set[Band]) -> float:
        """Return the most tokens, prompt and earlier output, of a request for which the KV cache has room."""

    def has_free_slot(self, view: ReplicaView, band: Band) -> bool:
        """Return True if a request of the band would get a slot at once; such a replica goes before the others."""

    def preemptible_slots(self, view: ReplicaView, band: Band) -> PreemptibleSlots | None:
        """Return the slots that tenants of the band yield on a replica whose slots are all used; None: there is none.

        The replica has no capacity for a request without one of these slots.
        """


@dataclass(frozen=True, slots=True)
class LateBinding:
    """Late binding: a replica gets what it can run now and little more, so that a later urgent request goes first.

    1. A replica takes a request for each slot that is free or held by a lower band, since the engine preempts, less the
       slots that are left to other ingresses.
    2. It takes `lookahead` more if it has less urgent requests, a starved band asks, or it is the only replica.
       When a request ends, the next one is already there. Without it the engine would start a less urgent request, and
       preempt it soon. In all other cases a request waits in the ingress for the first free slot of any replica.
    3. It takes at least `batch_lookahead` more batch requests, as a share of its slots and at least one. Ingresses
       share the requests of 2. and 3. as they do free slots.
    4. A starved band counts as the most urgent one, with those of 2.: its promoted request is first in the
       replica's queue, so it may be sent before a slot is free.
    5. A replica on which only other ingresses run requests of the band takes at least one. Otherwise they would refill
       its slots before this ingress learns of a free one.
    6. The blocks of a request must be free or held by lower bands. They need not be in three cases: the replica is
       empty, since it refuses what never fits; the band is starved, since the engine keeps freed blocks for a promoted
       request; and in case 5.
    7. A replica without a slot has capacity for a tenant below its fair share of the band's slots, until all tenants
       with requests there can have their shares. The request must be on the replica to take a slot: the engine then
       preempts a tenant beyond its share. The blocks of such slots count as free.
    """

    lookahead: int = 0
    batch_lookahead: float = 0.125

    def num_assignable(self, view: ReplicaView, band: Band, starved: Set[Band], is_only: bool) -> int:
        """Return the number of requests of a band that the replica may be assigned, by 1. to 5."""
        if view.stats.is_draining:
            return 0
        is_starved = band in starved
        band = Band.INTERACTIVE if is_starved else band
        has_less_urgent = sum(view.num_by_band[band + 1 :]) > 0
        num_ahead = self.lookahead if is_starved or has_less_urgent or is_only else 0
        if band is Band.BATCH:
            num_ahead = max(1, num_ahead, int(self.batch_lookahead * view.stats.num_slots))
        num_requests = view.num_free_slots(band) + view.shares[band].of(num_ahead)
        return max(1, num_requests) if view.is_filled_by_other_ingresses(band) else num_requests

    def max_tokens(self, view: ReplicaView, band: Band, starved: Set[Band]) -> float:
        """Return the most tokens of a request for which the replica has blocks, by 6."""
        has_exception = sum(view.num_by_band) == 0 or band in starved or view.is_filled_by_other_ingresses(band)
        return float("inf") if has_exception else view.num_free_tokens(band)

    def has_free_slot(self, view: ReplicaView, band: Band) -> bool:
        """Return True if the replica has a free slot; on another one the request waits."""
        return view.num_free_slots(band) > 0

    def preemptible_slots(self, view: ReplicaView, band: Band) -> PreemptibleSlots | None:
        """Return the slots by 7."""
        return view.preemptible_slots(band)
