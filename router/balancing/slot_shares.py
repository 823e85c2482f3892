"""Sharing out of a replica's free slots among the ingresses."""

from __future__ import annotations

from replicas.protocol import Band, ReplicaStats

_NONE = (0,) * len(Band)
_MIXER = 0x9E3779B1
"""Factor of multiplicative hashing (Knuth, 1973)."""


def others_slots(stats: ReplicaStats, ingress_id: str) -> tuple[int, ...]:
    """Return the number of free slots of a report, for each band, that an ingress leaves to other ingresses.

    Ingresses that hear of the same free slots would all give them away. So each one with requests of the band or a more
    urgent one on the replica takes an equal part of them. Who takes one more changes with the report's version. An
    ingress without such requests takes a part beside them, at least one slot: it hears of the replica by polls alone.
    """
    if all(part.ingress_id == ingress_id for part in stats.by_ingress):
        return _NONE
    left, num_free = [], stats.num_slots
    for band in Band:
        num_free -= stats.num_running_by_band[band] + stats.num_waiting_by_band[band]
        sharing = [part.ingress_id for part in stats.by_ingress if any(part.num_by_band[: band + 1])]
        is_new = ingress_id not in sharing
        if is_new:
            sharing.append(ingress_id)
        turn = (sharing.index(ingress_id) + _mixed(stats.version, len(sharing))) % len(sharing)
        num_own = (num_free + len(sharing) - 1 - turn) // len(sharing)
        left.append(max(0, num_free - max(num_own, is_new)))
    return tuple(left)


def _mixed(version: int, num: int) -> int:
    """Return a number below `num` that each version has, whether or not all versions are seen."""
    return (version * _MIXER & 0xFFFFFFFF) * num >> 32
