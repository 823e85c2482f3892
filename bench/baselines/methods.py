"""Compared batching methods, with the limits they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.baselines.policies import Adaptive, FixedSize, LengthBucketed, MemoryLimited, Policy, Priority

CONTINUOUS = "continuous"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits common to all methods, and the waiting times that the textbook leaves open."""

    max_num_seqs: int = 16
    num_slots_tokens: int = 1_000_000
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
        "memory limit": lambda: MemoryLimited(limits.num_slots_tokens, size, wait_s),
    }
    batchers = [
        Method(f"{name}, {'padded' if is_padded else 'no padding'}", maker, is_padded)
        for name, maker in makers.items()
        for is_padded in (False, True)
    ]
    return [Method("sequential", lambda: FixedSize(1, 0.0), False), *batchers]
