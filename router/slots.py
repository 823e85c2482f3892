"""Room on a replica: how many requests of a band it may be given now. Pure: plain views in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from replicas.protocol import Band, GenerateRequest
from router.types import ReplicaView


class SlotPolicy(Protocol):
    """Decides whether a replica has room for a request; `starved` bands may have a request promoted."""

    def places(self, view: ReplicaView, band: Band, starved: Set[Band], is_only: bool) -> int:
        """Requests of a band that the replica may be given; `is_only`: there is no other to wait for."""
        ...

    def has_blocks(self, view: ReplicaView, request: GenerateRequest, starved: Set[Band]) -> bool:
        """Whether the replica's KV cache lets the request go there."""
        ...

    def best(self, views: Sequence[ReplicaView], band: Band) -> list[ReplicaView]:
        """Those of the replicas with room that the routing policy chooses from, at least one."""
        ...


@dataclass(frozen=True, slots=True)
class LateBinding:
    """Gives a replica what it can run now, and little more, so that an urgent request that comes later is served first.

    1. A replica has a place for each slot that is free or held by a lower band, since the engine preempts.
    2. Beyond those it has `lookahead` places, for the moment between the end of a request and the arrival of the
       next, where a less urgent request would else be begun and broken off again, or where it is the only replica.
       Where it runs nothing less urgent and there are others, a request waits here for whichever has a slot first.
    3. Of batch work it has `batch_lookahead` places more, as a share of its slots and at least one.
    4. A starved band counts as the most urgent one: its promoted request is first in the replica's queue, so it may
       be sent even when every slot is taken.
    5. A replica on which other ingresses run all requests of the band has at least one place: its slots are refilled
       by them before this ingress hears of a free one.
    6. A request needs blocks for its tokens, free or held by lower bands, unless the replica is empty (it refuses
       what never fits), the request comes promoted (the engine keeps freed blocks for it), or 5. holds.
    """

    lookahead: int = 0
    batch_lookahead: float = 0.125

    def places(self, view: ReplicaView, band: Band, starved: Set[Band], is_only: bool) -> int:
        """Requests of a band that the replica may be given, by 1. to 5."""
        if view.stats.is_draining:
            return 0
        is_starved = band in starved
        band = Band.INTERACTIVE if is_starved else band
        has_less_urgent = sum(view.num_by_band[band + 1 :]) > 0
        num_ahead = self.lookahead if is_starved or has_less_urgent or is_only else 0
        if band is Band.BATCH:
            num_ahead = max(1, num_ahead, int(self.batch_lookahead * view.stats.num_slots))
        num_places = view.num_free_slots(band) + num_ahead
        return max(1, num_places) if view.is_kept_by_others(band) else num_places

    def has_blocks(self, view: ReplicaView, request: GenerateRequest, starved: Set[Band]) -> bool:
        """Whether the replica has blocks for the request, by 6."""
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        return (
            num_tokens <= view.num_free_tokens(request.band)
            or sum(view.num_by_band) == 0
            or request.band in starved
            or view.is_kept_by_others(request.band)
        )

    def best(self, views: Sequence[ReplicaView], band: Band) -> list[ReplicaView]:
        """Those where the request starts at once, or else all: it waits for a slot wherever it goes."""
        return [view for view in views if view.num_free_slots(band) > 0] or list(views)
