"""Cuts of a checkpoint's tensors: the slices of each that one rank of several holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """Slices of a tensor along one dimension, joined in their order, and zeros behind them."""

    dim: int
    ranges: tuple[range, ...]
    num_zeros: int = 0

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the cut of a tensor of `shape`."""
        return (*shape[: self.dim], sum(map(len, self.ranges)) + self.num_zeros, *shape[self.dim + 1 :])

    def apply(self, tensor: Tensor) -> Tensor:
        """Return a copy of the slices of `tensor`. Of a mapped file, only they are read."""
        parts = [tensor.narrow(self.dim, part.start, len(part)) for part in self.ranges]
        if self.num_zeros:
            zeros = (*tensor.shape[: self.dim], self.num_zeros, *tensor.shape[self.dim + 1 :])
            parts.append(torch.zeros(zeros, dtype=tensor.dtype))
        return torch.cat(parts, self.dim)


Cutter = Callable[[str, tuple[int, ...]], Cut | None]
"""Chooser of the cut of a tensor, by its name and shape; None: the rank holds the whole tensor."""


def num_values(shape: tuple[int, ...], cut: Cut | None) -> int:
    """Return the number of values of the part of a tensor that a rank holds."""
    return math.prod(shape if cut is None else cut.shape_of(shape))
