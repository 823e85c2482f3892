"""Linear layers in compiled kernels: over packed weights, or over packed weights of 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

# What the kernels read together: outputs of one panel, and inputs side by side that fill four bytes (of 8 bits: two).
_PANEL = 32
_PAIRS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 2}
_INPUTS_UNIT = 32
_LARGEST_INT8 = 127
_ROWS_AT_ONCE = 4096


class CompiledLinear(nn.Module):
    """A linear layer in a compiled kernel, over a packed copy of its numbers [out_features, in_features]."""

    def __init__(self, numbers: Tensor, scales: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = numbers.shape
        self.packed = nn.Parameter(pack(numbers), requires_grad=False)
        self.scales = _fixed(scales)
        self.bias = _fixed(bias)

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Packed numbers, one scale for each output where it has scales, and bias."""
        return self.packed, self.scales, self.bias


class CppLinear(CompiledLinear):
    """What `nn.Linear` computes; whoever makes it drops the original weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.detach(), None, bias)

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], restored at each access: for model code that asks for its dtype and the like."""
        return unpack(self.packed, self.out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        output: Tensor = torch.ops.headway.multiply_by_weight.default(
            inputs.contiguous(), self.packed, self.out_features, self.bias
        )
        return output


class Int8Linear(CompiledLinear):
    """Approximately what `nn.Linear` computes: each row of the weight is 8-bit numbers times one scale.

    Inputs keep 14 bits, with a scale for each row, so that rows have nothing to do with one another.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        largest = weight.detach().abs().amax(dim=1).float()
        scales = (largest / _LARGEST_INT8).clamp(min=torch.finfo(torch.float32).tiny)
        numbers = torch.empty(weight.shape, dtype=torch.int8)
        # In pieces: in float32 the weights of a large vocabulary would take as much memory as the rest of the model.
        for first in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            numbers[rows] = (weight[rows].detach().float() / scales[rows, None]).round().to(torch.int8)
        super().__init__(numbers, scales, bias)

    @property
    def numbers(self) -> Tensor:
        """[out_features, in_features] int8, restored at each access."""
        return unpack(self.packed, self.out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        output: Tensor = torch.ops.headway.multiply_by_int8.default(
            inputs.contiguous(), self.packed, self.scales, self.bias
        )
        return output


def can_multiply(weight: Tensor) -> bool:
    """Whether the kernels take a weight of this shape."""
    return weight.shape[1] % _INPUTS_UNIT == 0


def pack(weight: Tensor) -> Tensor:
    """A weight [outputs, inputs] in the kernels' order, [panels, inputs / pair, outputs of a panel, pair].

    The last panel is filled up with zeros.
    """
    pair = _PAIRS[weight.dtype]
    num_outputs, num_inputs = weight.shape
    filled = functional.pad(weight, (0, 0, 0, -num_outputs % _PANEL))
    return filled.view(-1, _PANEL, num_inputs // pair, pair).transpose(1, 2).contiguous()


def unpack(packed: Tensor, num_outputs: int) -> Tensor:
    """The weight [num_outputs, inputs] that was packed."""
    return packed.transpose(1, 2).flatten(0, 1).flatten(1)[:num_outputs]


def _fixed(values: Tensor | None) -> nn.Parameter | None:
    return None if values is None else nn.Parameter(values.detach(), requires_grad=False)
