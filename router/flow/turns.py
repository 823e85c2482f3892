"""Sums over the tenants that wait, by their turns, so that a prediction need not visit each of them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort

_MAX_BUCKET = 64


class SummedKeys:
    """Keys with a count and a value each, and sums of both up to a key.

    Equal keys are one entry. The entries lie in buckets of at most `_MAX_BUCKET`, each with its sums. So a change costs
    the same however many keys there are, and a sum costs about as much as the number of buckets.

    Invariants: bucket i holds the keys from start i up to the next start; no bucket but the first may be empty; each
    sum is that of its bucket; no entry is zero.
    """

    def __init__(self) -> None:
        self._starts: list[float] = [-math.inf]
        self._buckets: list[dict[float, tuple[int, int]]] = [{}]
        """Count and value by key."""
        self._counts = [0]
        self._sums = [0]

    def __len__(self) -> int:
        return sum(self._counts)

    def add(self, key: float, value: int, count: int = 1) -> None:
        """Add a value and a count to those of a key; negative ones take away what was added."""
        index = bisect_right(self._starts, key) - 1
        bucket = self._buckets[index]
        self._counts[index] += count
        self._sums[index] += value
        before = bucket.get(key)
        if before is not None:
            count, value = before[0] + count, before[1] + value
        if count or value:
            bucket[key] = (count, value)
            if len(bucket) > _MAX_BUCKET:
                self._split(index)
        elif before is not None:
            del bucket[key]
            if not bucket and index:
                del self._starts[index], self._buckets[index], self._counts[index], self._sums[index]

    def up_to(self, key: float) -> tuple[int, int]:
        """Return the sums of the counts and of the values of the keys that are at most `key`."""
        index = bisect_right(self._starts, key) - 1
        within = [entry for its_key, entry in self._buckets[index].items() if its_key <= key]
        count = sum(self._counts[:index]) + sum([count for count, _ in within])
        return count, sum(self._sums[:index]) + sum([value for _, value in within])

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        assert self._starts == sorted(set(self._starts)) and self._starts[0] == -math.inf
        assert all(self._buckets[1:])
        for start, end, bucket in zip(self._starts, [*self._starts[1:], math.inf], self._buckets, strict=True):
            assert all(start <= key < end for key in bucket) and (0, 0) not in bucket.values()
        assert self._counts == [sum(count for count, _ in bucket.values()) for bucket in self._buckets]
        assert self._sums == [sum(value for _, value in bucket.values()) for bucket in self._buckets]

    def _split(self, index: int) -> None:
        bucket = self._buckets[index]
        keys = sorted(bucket)
        upper = {key: bucket.pop(key) for key in keys[len(keys) // 2 :]}
        count, value = sum([count for count, _ in upper.values()]), sum([value for _, value in upper.values()])
        self._counts[index] -= count
        self._sums[index] -= value
        self._starts.insert(index + 1, keys[len(keys) // 2])
        self._buckets.insert(index + 1, upper)
        self._counts.insert(index + 1, count)
        self._sums.insert(index + 1, value)


class Turns:
    """Tokens that waiting tenants are served until a turn, summed over all tenants.

    A tenant whose counter is c has q tokens waiting, the first e of them in its first request. Until the turn t it is
    served min(q, t - c + e) tokens if c <= t, and else none: it is dispatched until its counter has passed the turn, up
    to one request beyond it. That is a sum over the tenants with c <= t, less one over those with c + q - e <= t.
    """

    def __init__(self) -> None:
        self._terms = SummedKeys()
        """Terms of the sum by the turn from which on they count, for each tenant: t - c + e from c on, and
        c + q - e - t from c + q - e on. A count stands for t."""
        self._known: dict[str, tuple[int, int, int]] = {}

    def update(self, name: str, waiting: tuple[int, int, int] | None) -> None:
        """Note a tenant's counter, its waiting tokens and those of its first request; None: it does not wait."""
        before = self._known.pop(name, None)
        if before is not None:
            start, end = _bounds(before)
            self._terms.add(start, start - before[2], -1)
            self._terms.add(end, -end, 1)
        if waiting is not None:
            start, end = _bounds(waiting)
            self._known[name] = waiting
            self._terms.add(start, waiting[2] - start, 1)
            self._terms.add(end, end, -1)

    def num_tokens(self, turn: int, but: str) -> int:
        """Return the tokens that all tenants but one are served until a turn."""
        num_turns, others = self._terms.up_to(turn)
        return num_turns * turn + others - self._of(but, turn)

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        self._terms.check_invariants()

    def _of(self, name: str, turn: int) -> int:
        if name not in self._known:
            return 0
        counter, num_tokens, num_first = self._known[name]
        return min(num_tokens, turn - counter + num_first) if counter <= turn else 0


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
        before = self._sizes.get(name, 0)
        if size == before:
            return
        if before:
            del self._sizes[name]
            del self._ordered[bisect_left(self._ordered, (-before, name))]
        if size:
            self._sizes[name] = size
            insort(self._ordered, (-size, name))

    def first(self, most: int) -> dict[str, int]:
        """Return the largest sizes by name, at most `most` of them."""
        return {name: -size for size, name in self._ordered[:most]}


def _bounds(waiting: tuple[int, int, int]) -> tuple[int, int]:
    """Return the turns from which on a tenant is served, and from which on it has been served all that waits."""
    counter, num_tokens, num_first = waiting
    return counter, counter + num_tokens - num_first
