"""Policies of static batching: start time and members of each batch.

A policy sees the waiting requests, in order of arrival, whenever the device is free. It chooses some of them, or none
yet. No partial batch waits for ever: after a maximum wait the oldest request runs, with other waiting requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from bench.baselines.trace import TraceRequest

Waiting = Sequence[TraceRequest]


class Policy(Protocol):
    """One way to form batches."""

    def choose(self, waiting: Waiting, now: float) -> Waiting:
        """Return the requests of `waiting` to run now; empty: not yet."""
        ...

    def wakes_s(self, waiting: Waiting) -> float:
        """Return the time at which `choose` may change its answer for a non-empty `waiting` without new arrivals."""
        ...

    def batch_ended(self, batch: Waiting, duration_s: float) -> None:
        """Update the policy with a batch and its duration."""
        ...


class FixedSize:
    """Batches of one size.

    1. Wait for `batch_size` requests; take the oldest.
    2. If the oldest has waited `max_wait_s`, take all that wait.

    With a size of 1 this is sequential serving; with a short wait it is a time window.
    """

    def __init__(self, batch_size: int, max_wait_s: float) -> None:
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s

    def choose(self, waiting: Waiting, now: float) -> Waiting:
        is_due = bool(waiting) and now >= self.wakes_s(waiting)
        return waiting[: self._batch_size] if is_due or len(waiting) >= self._batch_size else ()

    def wakes_s(self, waiting: Waiting) -> float:
        return waiting[0].arrival_s + self._max_wait_s

    def batch_ended(self, batch: Waiting, duration_s: float) -> None:
        pass


class Adaptive:
    """Batch size that follows the duration of batches. Waiting for the device does not count: size cannot cure it.

    1. Like `FixedSize`, with the current size, which begins at 1, and a wait of a quarter of the target.
    2. After a full batch that took less than 0.8 times the target, the size grows by 1, up to `max_batch_size`.
    3. After a batch that took longer than the target, it is halved.
    """

    def __init__(self, target_s: float, max_batch_size: int) -> None:
        self._target_s = target_s
        self._max_batch_size = max_batch_size
        self.batch_size = 1

    def choose(self, waiting: Waiting, now: float) -> Waiting:
        return FixedSize(self.batch_size, self._target_s / 4).choose(waiting, now)

    def wakes_s(self, waiting: Waiting) -> float:
        return waiting[0].arrival_s + self._target_s / 4

    def batch_ended(self, batch: Waiting, duration_s: float) -> None:
        if duration_s > self._target_s:
            self.batch_size = max(1, self.batch_size // 2)
        elif duration_s < 0.8 * self._target_s and len(batch) >= self.batch_size:
            self.batch_size = min(self._max_batch_size, self.batch_size + 1)


class Priority:
    """Urgent requests first.

    1. When `batch_size` requests wait, or the oldest has waited `max_wait_s`: take the most urgent band first, and
       the oldest first within a band.
    2. The oldest request is in the batch that its waiting started, in any band: none starves.
    """

    def __init__(self, batch_size: int, max_wait_s: float) -> None:
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s

    def choose(self, waiting: Waiting, now: float) -> Waiting:
        is_due = bool(waiting) and now >= self.wakes_s(waiting)
        if not is_due and len(waiting) < self._batch_size:
            return ()
        kept = waiting[:1] if is_due else ()
        others = sorted(waiting[len(kept) :], key=lambda request: (request.band, request.arrival_s))
        return (*kept, *others[: self._batch_size - len(kept)])

    def wakes_s(self, waiting: Waiting) -> float:
        return waiting[0].arrival_s + self._max_wait_s

    def batch_ended(self, batch: Waiting, duration_s: float) -> None:
        pass


class LengthBucketed:
    """Prompts of similar length together.

    1. A request belongs to the bucket of the first of `bounds` that its prompt does not exceed.
    2. If the oldest request has waited `max_wait_s`, its bucket runs, full or not.
    3. Otherwise the first bucket with `batch_size` requests runs.
    """

    def __init__(self, batch_size: int, max_wait_s: float, bounds: Sequence[int]) -> None:
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._bounds = bounds

    def choose(self, waiting: Waiting, now: float) -> Waiting:
        buckets: defaultdict[int, list[TraceRequest]] = defaultdict(list)
        for request in waiting:
            buckets[self._bucket(request)].append(request)
        if waiting and now >= self.wakes_s(waiting):
            return buckets[self._bucket(waiting[0])][: self._batch_size]
        return next((b[: self._batch_size] for b in buckets.values() if len(b) >= self._batch_size), ())

    def wakes_s(self, waiting: Waiting) -> float:
        return waiting[0].arrival_s + self._max_wait_s

    def batch_ended(self, batch: Waiting, duration_s: float) -> None:
        pass

    def _bucket(self, request: TraceRequest) -> int:
        return sum(len(request.prompt) > bound for bound in self._bounds)


class MemoryLimited:
    """Batches that surely fit the KV cache.

    1. Take the oldest requests while their number x the longest of them, prompt and output, fits `num_slots_tokens`,
       up to `max_batch_size`. One request always fits.
    2. Run them when the next request does not fit, or when the oldest has waited `max_wait_s`.
    """

    def __init__(self, num_slots_tokens: int, max_batch_size: int, max_wait_s: float) -> None:
        self._num_slots_tokens = num_slots_tokens
        self._max_batch_size = max_batch_size
        self._max_wait_s = max_wait_s

    def choose(self, waiting: Waiting, now: float) -> Waiting:
        size, longest = 0, 0
        for request in waiting[: self._max_batch_size]:
            longest = max(longest, request.num_tokens)
            if size and (size + 1) * longest > self._num_slots_tokens:
                break
            size += 1
        is_full = size == self._max_batch_size or size < len(waiting)
        return waiting[:size] if is_full or (waiting and now >= self.wakes_s(waiting)) else ()

    def wakes_s(self, waiting: Waiting) -> float:
        return waiting[0].arrival_s + self._max_wait_s

    def batch_ended(self, batch: Waiting, duration_s: float) -> None:
        pass
