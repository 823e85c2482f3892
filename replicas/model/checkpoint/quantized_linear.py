"""The one form of quantized weights: small numbers with scales and zero points, and their exact dequantization."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the 16 numbers of 4 bits in GGUF's types IQ4_NL and IQ4_XS."""
_VALUES_AT_ONCE = 2**22


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Weight of a linear layer as small numbers with scales.

    The weight of output o and input i is `(value - zero_points[r, g]) * scales[r, g]`. The value is `numbers[o, i]` or,
    with a table, `table[numbers[o, i]]`. The row of scales r is `o // outputs_per_scale`. The group g is `order[i]` or,
    without an order, `i // inputs_per_scale`.
    """

    numbers: Tensor  # [num_outputs, num_inputs] uint8, int8 or 8-bit floats
    scales: Tensor  # [num_outputs / outputs_per_scale, num_groups] floats
    zero_points: Tensor | None  # like `scales`
    bits: int
    outputs_per_scale: int = 1
    inputs_per_scale: int = 1
    order: Tensor | None = None  # [num_inputs] integers
    table: Tensor | None = None  # [2 ** bits] float32

    def to(self, device: torch.device) -> QuantizedLinear:
        """Return the weight on `device`."""
        zero_points, order, table = (
            None if values is None else values.to(device) for values in (self.zero_points, self.order, self.table)
        )
        return replace(
            self,
            numbers=self.numbers.to(device),
            scales=self.scales.to(device),
            zero_points=zero_points,
            order=order,
            table=table,
        )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [num_outputs, num_inputs]: products in float32, each rounded once to `dtype`."""
        num_outputs, num_inputs = self.numbers.shape
        weight = torch.empty(num_outputs, num_inputs, dtype=dtype)
        # In parts, since the float32 values of a large weight would take as much memory as many layers.
        step = max(1, _VALUES_AT_ONCE // num_inputs)
        for first in range(0, num_outputs, step):
            outputs = torch.arange(first, min(first + step, num_outputs))
            weight[first : first + step] = self._float32(outputs)
        return weight

    def _float32(self, outputs: Tensor) -> Tensor:
        """Return some rows of the weight."""
        numbers = self.numbers[outputs[0] : outputs[-1] + 1]
        values = numbers.float() if self.table is None else self.table[numbers.int()]
        rows = outputs // self.outputs_per_scale
        if self.zero_points is not None:
            values -= self._spread(self.zero_points[rows])
        return values.mul_(self._spread(self.scales[rows]))

    def _spread(self, groups: Tensor) -> Tensor:
        """Return the value of each input's group, [rows, num_inputs], from values [rows, num_groups]."""
        if self.order is not None:
            return groups.float()[:, self.order.long()]
        return groups.float().repeat_interleave(self.inputs_per_scale, dim=1)[:, : self.numbers.shape[1]]
