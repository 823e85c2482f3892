"""Linear layers in compiled kernels: over weights as they lie in the model's file, or over weights of 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# What the kernels compute together.
_OUTPUTS_UNIT = 4
_INPUTS_UNIT = 32
_MOST_INT8_INPUTS = 32_768
_LARGEST_INT8 = 127
_ROWS_AT_ONCE = 4096


class CompiledLinear(nn.Module):
    """What `nn.Linear` computes, or nearly, in a compiled kernel."""

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weight, one scale for each of its rows where it has scales, and bias."""
        raise NotImplementedError


class CppLinear(CompiledLinear):
    """What `nn.Linear` computes, over the very weight that it is given: no copy is kept, and it is read as it lies."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        output: Tensor = torch.ops.headway.multiply_by_weight.default(inputs.contiguous(), self.weight, self.bias)
        return output

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `CompiledLinear`."""
        return self.weight, None, self.bias


class Int8Linear(CompiledLinear):
    """Approximately what `nn.Linear` computes: each row of the weight is 8-bit numbers times one scale.

    Inputs keep 14 bits, with a scale for each row, so that rows have nothing to do with one another.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        largest = weight.detach().abs().amax(dim=1).float()
        scales = (largest / _LARGEST_INT8).clamp(min=torch.finfo(torch.float32).tiny)
        numbers = torch.empty(weight.shape, dtype=torch.int8)
        # In pieces: in float32 the weights of a large vocabulary would take as much memory as the rest of the model.
        for first in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            numbers[rows] = (weight[rows].detach().float() / scales[rows, None]).round().to(torch.int8)
        self.numbers = nn.Parameter(numbers, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        output: Tensor = torch.ops.headway.multiply_by_int8.default(
            inputs.contiguous(), self.numbers, self.scales, self.bias
        )
        return output

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `CompiledLinear`."""
        return self.numbers, self.scales, self.bias


def can_multiply(weight: Tensor) -> bool:
    """Whether the kernels take a weight of this shape."""
    num_outputs, num_inputs = weight.shape
    return num_outputs % _OUTPUTS_UNIT == 0 and num_inputs % _INPUTS_UNIT == 0 and num_inputs <= _MOST_INT8_INPUTS
