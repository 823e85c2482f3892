"""Chance as a pure function: the same on every device, in every batch, after any preemption."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BITS = 52  # So that uniform * total < total holds in float64, rounding included.


def uniform(seed: int, index: int) -> float:
    """The uniform number in [0, 1) that chooses output token `index` of a request with `seed`."""
    return (_mix(_mix(seed & _MASK) + (index + 1) * _GOLDEN) >> (64 - _BITS)) / (1 << _BITS)


def _mix(value: int) -> int:
    """SplitMix64's output function: a bijection of 64-bit integers in which every input bit moves every output bit."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
