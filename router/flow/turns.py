"""Sums over the tenants that wait, by their turns, so that a prediction need not visit each of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

_MAX_BUCKET = 256


class SummedKeys:
    """Sorted keys with a value each, and sums of the values up to a key.

    The keys lie in buckets of at most `_MAX_BUCKET`, each with its sum. So a change and a sum cost about as much as the
    number of buckets, and the keys of one bucket.

    Invariant: the buckets are sorted and not empty, and each sum is that of its bucket.
    """

    def __init__(self) -> None:
        self._buckets: list[list[tuple[float, str, float]]] = []
        self._last: list[tuple[float, str, float]] = []
        """Last entry of each bucket."""
        self._sums: list[float] = []

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def add(self, key: float, name: str, value: float) -> None:
        """Add a value; `name` tells equal keys apart."""
        entry = (key, name, value)
        if not self._buckets:
            self._buckets, self._last, self._sums = [[entry]], [entry], [value]
            return
        index = min(bisect_left(self._last, entry), len(self._buckets) - 1)
        bucket = self._buckets[index]
        insort(bucket, entry)
        self._last[index] = bucket[-1]
        self._sums[index] += value
        if len(bucket) > _MAX_BUCKET:
            self._split(index)

    def remove(self, key: float, name: str, value: float) -> None:
        """Remove a value that was added."""
        entry = (key, name, value)
        index = bisect_left(self._last, entry)
        bucket = self._buckets[index]
        del bucket[bisect_left(bucket, entry)]
        if bucket:
            self._last[index] = bucket[-1]
            self._sums[index] -= value
        else:
            del self._buckets[index], self._last[index], self._sums[index]

    def up_to(self, key: float) -> tuple[int, float]:
        """Return the number of keys that are at most `key`, and the sum of their values."""
        end = (key, "\U0010ffff", 0.0)
        index = bisect_right(self._last, end)
        count, total = sum(map(len, self._buckets[:index])), sum(self._sums[:index])
        if index < len(self._buckets):
            bucket = self._buckets[index]
            within = bisect_right(bucket, end)
            count += within
            total += sum([value for _, _, value in bucket[:within]])
        return count, total

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        entries = [entry for bucket in self._buckets for entry in bucket]
        assert entries == sorted(entries) and all(self._buckets)
        assert self._last == [bucket[-1] for bucket in self._buckets]
        assert self._sums == [sum(value for _, _, value in bucket) for bucket in self._buckets]

    def _split(self, index: int) -> None:
        bucket = self._buckets[index]
        halves = [bucket[: len(bucket) // 2], bucket[len(bucket) // 2 :]]
        self._buckets[index : index + 1] = halves
        self._last[index : index + 1] = [half[-1] for half in halves]
        self._sums[index : index + 1] = [sum([value for _, _, value in half]) for half in halves]


class Turns:
    """Tokens that waiting tenants are served until a turn, summed over all tenants.

    A tenant whose counter is c has q tokens waiting, the first e of them in its first request. Until the turn t it is
    served min(q, t - c + e) tokens if c <= t, and else none: it is dispatched until its counter has passed the turn, up
    to one request beyond it. That is a sum over the tenants with c <= t, less one over those with c + q - e <= t.

    Counters and tokens are whole numbers, so that no rounding errors gather in the sums.
    """

    def __init__(self) -> None:
        self._begun, self._done = SummedKeys(), SummedKeys()
        self._known: dict[str, tuple[float, int, int]] = {}

    def update(self, name: str, waiting: tuple[float, int, int] | None) -> None:
        """Note a tenant's counter, its waiting tokens and those of its first request; None: it does not wait."""
        before = self._known.pop(name, None)
        if before is not None:
            (start, end) = _bounds(before)
            self._begun.remove(start, name, before[2] - start)
            self._done.remove(end, name, -end)
        if waiting is not None:
            (start, end) = _bounds(waiting)
            self._known[name] = waiting
            self._begun.add(start, name, waiting[2] - start)
            self._done.add(end, name, -end)

    def num_tokens(self, turn: float, but: str) -> int:
        """Return the tokens that all tenants but one are served until a turn."""
        num_begun, begun = self._begun.up_to(turn)
        num_done, done = self._done.up_to(turn)
        return round((num_begun - num_done) * turn + begun - done) - self._of(but, turn)

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        self._begun.check_invariants()
        self._done.check_invariants()

    def _of(self, name: str, turn: float) -> int:
        if name not in self._known:
            return 0
        counter, num_tokens, num_first = self._known[name]
        return min(num_tokens, round(turn - counter) + num_first) if counter <= turn else 0


class LargestFirst:
    """Sizes by name, the largest first.

    Invariant: the order is that of the sizes, without zeros.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._ordered: list[tuple[int, str]] = []
        """Pairs of the negative size and the name, sorted."""

    def update(self, name: str, size: int) -> None:
        """Note a size; 0 removes the name."""
        before = self._sizes.pop(name, 0)
        if before:
            del self._ordered[bisect_left(self._ordered, (-before, name))]
        if size:
            self._sizes[name] = size
            insort(self._ordered, (-size, name))

    def first(self, most: int | None) -> dict[str, int]:
        """Return the largest sizes by name, at most `most` of them; None: all."""
        return {name: -size for size, name in self._ordered[:most]}


def _bounds(waiting: tuple[float, int, int]) -> tuple[float, float]:
    """Return the turns from which on a tenant is served, and from which on it has been served all that waits."""
    counter, num_tokens, num_first = waiting
    return counter, counter + num_tokens - num_first
