"""Hash ring: places replicas and keys on a circle, so that a key prefers the same replicas wherever it is looked up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from hashlib import blake2b

_NUM_POINTS = 32
"""Points of each replica. With more of them the shares of the circle differ less: by about a sixth with 32."""
_DIGEST_BYTES, _POINT_BYTES = 64, 8
CIRCLE = 1 << (8 * _POINT_BYTES)
"""Length of the circle; positions are below it."""


def position_of(key: bytes) -> int:
    """Return the position of a key on the circle."""
    return int.from_bytes(blake2b(key, digest_size=_POINT_BYTES).digest(), "big")


def points_of(replica_id: str) -> list[int]:
    """Return the positions of a replica on the circle, in order."""
    points: list[int] = []
    for part in range(_NUM_POINTS * _POINT_BYTES // _DIGEST_BYTES):
        digest = blake2b(f"{part} {replica_id}".encode(), digest_size=_DIGEST_BYTES).digest()
        points += (int.from_bytes(digest[at : at + _POINT_BYTES], "big") for at in range(0, len(digest), _POINT_BYTES))
    return sorted(points)


def distance(points: list[int], position: int) -> int:
    """Return the way from a position to the next of a replica's points, clockwise."""
    index = bisect_left(points, position)
    return points[index] - position if index < len(points) else points[0] + CIRCLE - position


class HashRing:
    """Ring of consistent hashing (Karger et al., 1997). Adding and removing replicas is done at the next look-up.

    Invariant: the sorted points are those of the replicas in the ring, once no change is pending.
    """

    def __init__(self) -> None:
        self._points: dict[str, list[int]] = {}
        self._sorted: list[tuple[int, str]] = []
        self._added: set[str] = set()
        self._removed: set[str] = set()

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._points

    def add(self, replica_id: str) -> None:
        """Add a replica that is not in the ring."""
        assert replica_id not in self._points
        self._points[replica_id] = points_of(replica_id)
        if replica_id in self._removed:
            self._removed.remove(replica_id)  # Its points are still among the sorted ones.
        else:
            self._added.add(replica_id)

    def remove(self, replica_id: str) -> None:
        """Remove a replica that is in the ring."""
        del self._points[replica_id]
        if replica_id in self._added:
            self._added.remove(replica_id)
        else:
            self._removed.add(replica_id)

    def clockwise(self, position: int) -> Iterator[str]:
        """Yield the replicas in the order of their points behind a position, each once for each of its points."""
        self._settle()
        start = bisect_left(self._sorted, (position, ""))
        for index in range(start, start + len(self._sorted)):
            yield self._sorted[index % len(self._sorted)][1]

    def distance(self, replica_id: str, position: int) -> int:
        """Return the way from a position to the next point of a replica of the ring, clockwise."""
        return distance(self._points[replica_id], position)

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        self._settle()
        assert self._sorted == sorted((point, name) for name, points in self._points.items() for point in points)

    def _settle(self) -> None:
        if self._removed:
            self._sorted = [entry for entry in self._sorted if entry[1] not in self._removed]
            self._removed = set()
        if self._added:
            self._sorted += ((point, replica_id) for replica_id in self._added for point in self._points[replica_id])
            self._sorted.sort()
            self._added = set()
