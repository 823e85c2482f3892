"""Linear layers in the compiled C++ kernels, with packed weights of full precision or of 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

# Outputs in one panel of a packed weight, and inputs per output that are adjacent: they fill 4 bytes (int8: 2 bytes).
_PANEL = 32
_PAIRS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 2}
_INPUTS_UNIT = 32
_LARGEST_INT8 = 127
_ROWS_AT_ONCE = 4096


class CompiledLinear(nn.Module):
    """Linear layer in a compiled kernel, with a packed copy of `numbers` [out_features, in_features]."""

    def __init__(self, numbers: Tensor, scales: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = numbers.shape
        self.packed = nn.Parameter(pack(numbers), requires_grad=False)
        self.scales = _fixed(scales)
        self.bias = _fixed(bias)

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the packed numbers, the scales (one per output, or None) and the bias or None."""
        return self.packed, self.scales, self.bias


class CppLinear(CompiledLinear):
    """Replacement of `nn.Linear`. The caller must drop the original weight to free its memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.detach(), None, bias)

    @property
    def weight(self) -> Tensor:
        """Weight [out_features, in_features], unpacked at each access, for model code that reads its dtype."""
        return unpack(self.packed, self.out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply `inputs` [..., in_features] and return [..., out_features]."""
        output: Tensor = torch.ops.headway.multiply_by_weight.default(
            inputs.contiguous(), self.packed, self.out_features, self.bias
        )
        return output


class Int8Linear(CompiledLinear):
    """Quantized replacement of `nn.Linear`: each row of the weight is 8-bit numbers times one scale.

    Inputs are quantized to 14 bits with one scale per row, so a row's outputs do not depend on the other rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        largest = weight.detach().abs().amax(dim=1).float()
        scales = (largest / _LARGEST_INT8).clamp(min=torch.finfo(torch.float32).tiny)
        numbers = torch.empty(weight.shape, dtype=torch.int8)
        # Quantize in pieces: a large vocabulary's weight in float32 would take as much memory as the rest of the model.
        for first in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            numbers[rows] = (weight[rows].detach().float() / scales[rows, None]).round().to(torch.int8)
        super().__init__(numbers, scales, bias)

    @property
    def numbers(self) -> Tensor:
        """Quantized weight [out_features, in_features] int8, unpacked at each access."""
        return unpack(self.packed, self.out_features)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply `inputs` [..., in_features] and return [..., out_features]."""
        output: Tensor = torch.ops.headway.multiply_by_int8.default(
            inputs.contiguous(), self.packed, self.scales, self.bias
        )
        return output


def can_multiply(weight: Tensor) -> bool:
    """Return True if the kernels support a weight of this shape."""
    return weight.shape[1] % _INPUTS_UNIT == 0


def pack(weight: Tensor) -> Tensor:
    """Return a weight [outputs, inputs] in the kernels' order, [panels, inputs / pair, outputs of a panel, pair].

    The last panel is padded with zeros.
    """
    pair = _PAIRS[weight.dtype]
    num_outputs, num_inputs = weight.shape
    filled = functional.pad(weight, (0, 0, 0, -num_outputs % _PANEL))
    return filled.view(-1, _PANEL, num_inputs // pair, pair).transpose(1, 2).contiguous()


def unpack(packed: Tensor, num_outputs: int) -> Tensor:
    """Return the original weight [num_outputs, inputs] of `packed`."""
    return packed.transpose(1, 2).flatten(0, 1).flatten(1)[:num_outputs]


def _fixed(values: Tensor | None) -> nn.Parameter | None:
    return None if values is None else nn.Parameter(values.detach(), requires_grad=False)
