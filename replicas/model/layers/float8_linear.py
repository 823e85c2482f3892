"""Linear layers of 8-bit floats times 8-bit floats: inputs are rounded, too, with one scale for each row (W8A8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from replicas.model.attention.kv_cache import quantize
from replicas.model.hardware.device import compute_capability
from replicas.model.hardware.selfcheck import find_fault, relative_error
from replicas.model.layers.rounding import quantize_fp8

RowRounding = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Rounds rows [num_rows, size] to e4m3 and returns the numbers and their scales [num_rows] float32."""
_ENDS_ON_89 = "2.12"
"""First version of torch whose product ends on compute capability 8.9."""
_UNIT = 16
"""Number of inputs and outputs of which torch's product takes multiples."""

round_rows: RowRounding = partial(quantize, dtype=torch.float8_e4m3fn)
"""`RowRounding` in plain torch. Kernels store the same numbers."""


class Float8Linear(nn.Module):
    """Linear layer whose weight and inputs are e4m3 numbers with a scale for each row; sums are float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, round_inputs: RowRounding) -> None:
        """Make a layer from a weight that `can_multiply_float8`, for inputs and outputs of its dtype."""
        super().__init__()
        rounded = quantize_fp8(weight)
        self.out_features, self.in_features = weight.shape
        self.numbers = nn.Parameter(rounded.numbers, requires_grad=False)
        self.scales = nn.Parameter(rounded.scales.t(), requires_grad=False)  # [1, out_features]
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._dtype = weight.dtype
        self._round_inputs = round_inputs

    @property
    def weight(self) -> Tensor:
        """Weight [out_features, in_features], widened at each access."""
        return (self.numbers.float() * self.scales.t()).to(self._dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply `inputs` [..., in_features] and return [..., out_features]."""
        rows = self._round_inputs(inputs.reshape(-1, self.in_features).contiguous())
        return self.multiply_rounded(*rows).view(*inputs.shape[:-1], self.out_features)

    def multiply_rounded(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """Multiply rounded rows (`RowRounding`) and return [num_rows, out_features]."""
        output = torch._scaled_mm(
            numbers, self.numbers.t(), scale_a=scales[:, None], scale_b=self.scales, out_dtype=self._dtype
        )
        return output if self.bias is None else output + self.bias


def can_multiply_float8(weight: Tensor) -> bool:
    """Return True if torch's product takes a weight of this shape."""
    return not any(size % _UNIT for size in weight.shape)


def check_float8(round_inputs: RowRounding, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a description of the first fault of products of rounded rows; None: they are those of the definition."""
    if compute_capability(device) == 89 and torch.__version__ < _ENDS_ON_89:
        return f"on compute capability 8.9 torch {torch.__version__} hangs in such products of 256 rows; 2.12 does not"
    return find_fault(_errors(round_inputs, dtype, device), dtype)


@torch.inference_mode()
def _errors(round_inputs: RowRounding, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, float]]:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=generator).to(device, dtype) for shape in ((48, 208), (48,)))
    layer = Float8Linear(weight, bias, round_inputs)
    for num_rows in (1, 17, 300):
        rows = torch.randn(num_rows, 208, generator=generator).to(device, dtype)
        numbers, scales = round_rows(rows)
        expected = functional.linear(numbers.float() * scales[:, None], layer.numbers.float() * layer.scales.t())
        yield "a product of rounded rows", relative_error(layer(rows), (expected + bias).to(dtype))
