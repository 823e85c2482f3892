"""Sharing out of a replica's slots among the ingresses."""

from __future__ import annotations

from dataclasses import dataclass, replace

from replicas.protocol import Band, ReplicaStats

_MIXER = 0x9E3779B1
"""Factor of multiplicative hashing (Knuth, 1973)."""


@dataclass(frozen=True, slots=True)
class SlotShare:
    """Share of one ingress in the slots of a replica that requests of one band may take.

    Ingresses that hear of the same free slots would all give them away. So they are divided equally among the ingresses
    with requests of the band or a more urgent one on the replica. The remainder rotates with the report's version. An
    ingress with no request on the replica gets one extra share of at least one slot: it hears of the replica by polls
    alone.
    """

    num_ingresses: int = 1
    turn: int = 0
    """Place of the ingress in the order in which they get one slot of the remainder, from 0 on."""
    is_new: bool = False
    """True if the ingress has no such requests on the replica."""
    num_left: int = 0
    """Free slots of the report that are left to the other ingresses."""

    def of(self, num_slots: int) -> int:
        """Return this ingress's part of so many slots."""
        num_own = (num_slots + self.num_ingresses - 1 - self.turn) // self.num_ingresses
        if self.is_new:
            num_own = max(1, num_own)
        return min(num_slots, num_own)


ALONE = (SlotShare(),) * len(Band)


def shares_of(stats: ReplicaStats, ingress_id: str) -> tuple[SlotShare, ...]:
    """Return an ingress's share in the slots for each band, by a report of a replica."""
    if all(part.ingress_id == ingress_id for part in stats.by_ingress):
        return ALONE
    shares, num_free = [], stats.num_slots
    for band in Band:
        num_free = num_free - stats.num_running_by_band[band] - stats.num_waiting_by_band[band]
        sharing = [part.ingress_id for part in stats.by_ingress if any(part.num_by_band[: band + 1])]
        is_new = ingress_id not in sharing
        if is_new:
            sharing.append(ingress_id)
        turn = (sharing.index(ingress_id) + _mixed(stats.version, len(sharing))) % len(sharing)
        share = SlotShare(len(sharing), turn, is_new)
        shares.append(replace(share, num_left=max(0, num_free - share.of(num_free))))
    return tuple(shares)


def _mixed(version: int, num: int) -> int:
    """Return a number below `num` that each version has, whether or not all versions are seen."""
    return (version * _MIXER & 0xFFFFFFFF) * num >> 32
