"""Policies of static batching: start time and members of each batch; and the methods that are compared.

A policy sees the waiting requests, in order of arrival, whenever the device is free. It chooses some of them, or none
yet. No partial batch waits for ever: after a maximum wait the oldest request runs, with other waiting requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.baselines.trace import TraceRequest

CONTINUOUS = "continuous"

Waiting = Sequence[TraceRequest]


class Policy(Protocol):
    """One way to form batches."""

    max_wait_s: float
    """Longest wait of the oldest request for a full batch."""

    def choose(self, waiting: Waiting, now: float) -> Waiting:
        """Return the requests of `waiting` to run now; empty: not yet."""
        ...

    def wakes_s(self, waiting: Waiting) -> float:
        """Return the time at which `choose` may change its answer for a non-empty `waiting` without new arrivals."""
        return waiting[0].arrival_s + self.max_wait_s

    def is_due(self, waiting: Waiting, now: float) -> bool:
        """Return True if the oldest request has waited long enough."""
        return bool(waiting) and now >= self.wakes_s(waiting)

    def batch_ended(self, batch: Waiting, duration_s: float) -> None:
        """Update the policy with a batch and its duration; most policies do not depend on them."""
        return


@dataclass
class FixedSize(Policy):
    """Batches of one size.

    1. Wait for `batch_size` requests; take the oldest.
    2. If the oldest has waited `max_wait_s`, take all that wait.

    With a size of 1 this is sequential serving; with a short wait it is a time window.
    """

    batch_size: int
    max_wait_s: float

    def choose(self, waiting: Waiting, now: float) -> Waiting:
        is_full = len(waiting) >= self.batch_size
        return waiting[: self.batch_size] if is_full or self.is_due(waiting, now) else ()


@dataclass
class Adaptive(Policy):
    """Batch size that follows the duration of batches. Waiting for the device does not count: size cannot cure it.

    1. Like `FixedSize`, with the current size, which begins at 1, and a wait of a quarter of the target.
    2. After a full batch that took less than 0.8 times the target, the size grows by 1, up to `max_batch_size`.
    3. After a batch that took longer than the target, it is halved.
    """

    target_s: float
    max_batch_size: int
    batch_size: int = 1
    max_wait_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.max_wait_s = self.target_s / 4

    def choose(self, waiting: Waiting, now: float) -> Waiting:
        return FixedSize(self.batch_size, self.max_wait_s).choose(waiting, now)

    def batch_ended(self, batch: Waiting, duration_s: float) -> None:
        if duration_s > self.target_s:
            self.batch_size = max(1, self.batch_size // 2)
        elif duration_s < 0.8 * self.target_s and len(batch) >= self.batch_size:
            self.batch_size = min(self.max_batch_size, self.batch_size + 1)


@dataclass
class Priority(Policy):
    """Urgent requests first.

    1. When `batch_size` requests wait, or the oldest has waited `max_wait_s`: take the most urgent band first, and
       the oldest first within a band.
    2. The oldest request is in the batch that its waiting started, in any band: none starves.
    """

    batch_size: int
    max_wait_s: float

    def choose(self, waiting: Waiting, now: float) -> Waiting:
        is_due = self.is_due(waiting, now)
        if not is_due and len(waiting) < self.batch_size:
            return ()
        kept = waiting[:1] if is_due else ()
        others = sorted(waiting[len(kept) :], key=lambda request: (request.band, request.arrival_s))
        return (*kept, *others[: self.batch_size - len(kept)])


@dataclass
class LengthBucketed(Policy):
    """Prompts of similar length together.

    1. A request belongs to the bucket of the first of `bounds` that its prompt does not exceed.
    2. If the oldest request has waited `max_wait_s`, its bucket runs, full or not.
    3. Otherwise the first bucket with `batch_size` requests runs.
    """

    batch_size: int
    max_wait_s: float
    bounds: Sequence[int]

    def choose(self, waiting: Waiting, now: float) -> Waiting:
        buckets: defaultdict[int, list[TraceRequest]] = defaultdict(list)
        for request in waiting:
            buckets[self._bucket(request)].append(request)
        if self.is_due(waiting, now):
            return buckets[self._bucket(waiting[0])][: self.batch_size]
        return next((b[: self.batch_size] for b in buckets.values() if len(b) >= self.batch_size), ())

    def _bucket(self, request: TraceRequest) -> int:
        return sum(len(request.prompt) > bound for bound in self.bounds)


@dataclass
class MemoryLimited(Policy):
    """Batches that surely fit the KV cache.

    1. Take the oldest requests while their number x the longest of them, prompt and output, fits `kv_cache_tokens`,
       up to `max_batch_size`. One request always fits.
    2. Run them when the next request does not fit, or when the oldest has waited `max_wait_s`.
    """

    kv_cache_tokens: int
    max_batch_size: int
    max_wait_s: float

    def choose(self, waiting: Waiting, now: float) -> Waiting:
        size, longest = 0, 0
        for request in waiting[: self.max_batch_size]:
            longest = max(longest, request.num_tokens)
            if size and (size + 1) * longest > self.kv_cache_tokens:
                break
            size += 1
        is_full = size == self.max_batch_size or size < len(waiting)
        return waiting[:size] if is_full or self.is_due(waiting, now) else ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits common to all methods, and the waiting times that the textbook leaves open."""

    max_num_seqs: int = 16
    kv_cache_tokens: int = 1_000_000
    """Tokens that the KV cache holds."""
    window_s: float = 0.1
    """Wait of the time window."""
    max_wait_s: float = 1.0
    """Longest wait of a partial batch in the other methods."""
    target_s: float = 10.0
    """Target duration of a batch of the adaptive method."""
    bucket_bounds: tuple[int, ...] = (64, 128, 192)


@dataclass(frozen=True, slots=True)
class Method:
    """Policy by name, with or without padded batches."""

    name: str
    make_policy: Callable[[], Policy]
    is_padded: bool


def methods(limits: Limits) -> list[Method]:
    """Return sequential serving, then every classic batcher without and with padding."""
    size, wait_s = limits.max_num_seqs, limits.max_wait_s
    makers: dict[str, Callable[[], Policy]] = {
        "fixed size": lambda: FixedSize(size, wait_s),
        "time window": lambda: FixedSize(size, limits.window_s),
        "adaptive": lambda: Adaptive(limits.target_s, size),
        "priority": lambda: Priority(size, wait_s),
        "length buckets": lambda: LengthBucketed(size, wait_s, limits.bucket_bounds),
        "memory limit": lambda: MemoryLimited(limits.kv_cache_tokens, size, wait_s),
    }
    batchers = [
        Method(f"{name}, {'padded' if is_padded else 'no padding'}", maker, is_padded)
        for name, maker in makers.items()
        for is_padded in (False, True)
    ]
    return [Method("sequential", lambda: FixedSize(1, 0.0), False), *batchers]
