"""Sums over the tenants that wait, so that a prediction need not visit each of them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

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
        within = [entry for entry_key, entry in self._buckets[index].items() if entry_key <= key]
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


class WaitingTokens(NamedTuple):
    """Tokens of one tenant that wait. A tuple, since thousands are made after a poll."""

    counter: int
    """The tenant's virtual token counter."""
    total: int
    first: int
    """Tokens of its first request."""

    def served_until(self, turn: int) -> int:
        """Return the tokens that the tenant is served until the least counter of all tenants has reached `turn`.

        It is dispatched until its own counter has passed the turn, which is up to one request beyond it. Each request
        counts as long as the first.
        """
        return min(self.total, turn - self.counter + self.first) if self.counter <= turn else 0


class TokensByTurn:
    """Waiting tokens of many tenants at one moment, summed up so that a question need not visit each tenant."""

    def __init__(self, tenants: Mapping[str, WaitingTokens]) -> None:
        self._tenants = tenants
        # Each tenant adds turn + (first - counter) from its counter on, and no more than `total` from `end` on.
        by_start = sorted(tenants.values(), key=attrgetter("counter"))
        self._starts = [counter for counter, _, _ in by_start]
        self._start_sums = list(accumulate([first - counter for counter, _, first in by_start], initial=0))
        self._ends = sorted([counter + total - first for counter, total, first in by_start])
        self._end_sums = list(accumulate(self._ends, initial=0))

    def served_until(self, turn: int, but: str) -> int:
        """Return the tokens that all tenants but one are served until a turn."""
        num_started, num_ended = bisect_right(self._starts, turn), bisect_right(self._ends, turn)
        served = (num_started - num_ended) * turn + self._start_sums[num_started] + self._end_sums[num_ended]
        own = self._tenants.get(but)
        return served if own is None else served - own.served_until(turn)


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
