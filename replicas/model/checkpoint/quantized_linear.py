"""The one form of quantized weights: small numbers with scales and zero points, and their exact dequantization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the 16 numbers of 4 bits in GGUF's types IQ4_NL and IQ4_XS."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 numbers of the 4-bit float e2m1."""
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

    def rows(self, first: int, last: int) -> QuantizedLinear:
        """Return the weight of outputs [first, last), which begin and end a row of scales."""
        scales = slice(first // self.outputs_per_scale, -(-last // self.outputs_per_scale))
        zero_points = None if self.zero_points is None else self.zero_points[scales]
        return replace(self, numbers=self.numbers[first:last], scales=self.scales[scales], zero_points=zero_points)

    def of_outputs(self, outputs: range) -> QuantizedLinear:
        """Return the weight of some outputs. Each has a row of scales of its own."""
        rows = torch.arange(outputs.start, outputs.stop) // self.outputs_per_scale
        return replace(
            self,
            numbers=self.numbers[outputs.start : outputs.stop],
            scales=self.scales[rows],
            zero_points=None if self.zero_points is None else self.zero_points[rows],
            outputs_per_scale=1,
        )

    def of_inputs(self, inputs: range, inputs_per_scale: int) -> QuantizedLinear:
        """Return the weight of some inputs, without an order. Their scales are repeated for smaller groups.

        The sizes of the new groups and the old ones, unless one of those has all inputs, divide where `inputs` begin.
        """
        assert self.order is None, "inputs with an order are not cut"

        def groups(values: Tensor) -> Tensor:
            if values.shape[1] == 1:
                return values.expand(-1, -(-len(inputs) // inputs_per_scale))
            smaller = values.repeat_interleave(self.inputs_per_scale // inputs_per_scale, dim=1)
            return smaller[:, inputs.start // inputs_per_scale : -(-inputs.stop // inputs_per_scale)]

        return replace(
            self,
            numbers=self.numbers[:, inputs.start : inputs.stop].contiguous(),
            scales=groups(self.scales).contiguous(),
            zero_points=None if self.zero_points is None else groups(self.zero_points).contiguous(),
            inputs_per_scale=inputs_per_scale,
        )

    def with_zeros(self, num_outputs: int) -> QuantizedLinear:
        """Return the weight with outputs behind the others whose weights are 0."""
        if not num_outputs:
            return self
        assert self.outputs_per_scale == 1, "each output has a row of scales of its own"
        values = (self.numbers, self.scales, self.zero_points)
        numbers, scales, zero_points = (
            None if each is None else torch.cat([each, each.new_zeros(num_outputs, each.shape[1])]) for each in values
        )
        assert numbers is not None and scales is not None
        return replace(self, numbers=numbers, scales=scales, zero_points=zero_points)

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


def concatenate(weights: Sequence[QuantizedLinear]) -> QuantizedLinear:
    """Return one weight with the outputs of several, which have the same format, inputs and groups, and no order."""
    if len(weights) == 1:
        return weights[0]
    first = weights[0]
    scales = [_by_output(weight, weight.scales) for weight in weights]
    zero_points = [_by_output(weight, weight.zero_points) for weight in weights if weight.zero_points is not None]
    return replace(
        first,
        numbers=torch.cat([weight.numbers for weight in weights]),
        scales=torch.cat(scales),
        zero_points=torch.cat(zero_points) if zero_points else None,
        outputs_per_scale=1,
    )


def _by_output(weight: QuantizedLinear, groups: Tensor) -> Tensor:
    """Return the row of scales or zero points of each output."""
    return groups.repeat_interleave(weight.outputs_per_scale, dim=0)[: len(weight.numbers)]
