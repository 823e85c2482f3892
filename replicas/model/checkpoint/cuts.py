"""Cuts of a checkpoint's tensors: the slices of each that one rank of several holds. The module imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """Slices of a tensor along one dimension, joined in their order, and zeros behind them."""

    dim: int
    ranges: tuple[range, ...]
    num_zeros: int = 0

    @property
    def size(self) -> int:
        """Size of the cut tensor along the dimension."""
        return sum(map(len, self.ranges)) + self.num_zeros

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the cut of a tensor of `shape`."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


Cutter = Callable[[str, tuple[int, ...]], Cut | None]
"""Chooser of the cut of a weight, by its name and shape; None: the rank holds the whole weight."""
