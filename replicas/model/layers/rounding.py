"""Rounding of the weights of linear layers: the numbers and scales of each `quantization`, for all devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from replicas.model.checkpoint.quantized_linear import QuantizedLinear

_LARGEST_INT8 = 127
_MIDDLE_INT4 = 8
_GROUP = 32
_LARGEST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
# In pieces, since a large vocabulary's weight in float32 would take as much memory as the rest of a model.
_ROWS_AT_ONCE = 4096


class Rounding(Protocol):
    """Rounding of a weight."""

    def __call__(self, weight: Tensor, largest: Tensor | None = None) -> QuantizedLinear:
        """Round `weight` [num_outputs, num_inputs].

        `largest` [num_outputs] are the largest magnitudes of the rows of a whole weight, of which `weight` has whole
        groups of inputs; None: `weight` is whole.
        """


def quantize_int8(weight: Tensor, largest: Tensor | None = None) -> QuantizedLinear:
    """Round a weight to 8 bits with one scale for each output."""
    scales = _row_scales(weight, largest, _LARGEST_INT8)
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        numbers[rows] = (weight[rows].detach().float() / scales[rows]).round().to(torch.int8)
    return QuantizedLinear(numbers, scales, None, 8, inputs_per_scale=weight.shape[1])


def quantize_fp8(weight: Tensor, largest: Tensor | None = None) -> QuantizedLinear:
    """Round a weight to floats of 8 bits (e4m3) with one scale for each output."""
    scales = _row_scales(weight, largest, _LARGEST_FLOAT8)
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for first in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        scaled = weight[rows].detach().float() / scales[rows]
        numbers[rows] = scaled.clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8).to(torch.float8_e4m3fn)
    return QuantizedLinear(numbers, scales, None, 8, inputs_per_scale=weight.shape[1])


def _row_scales(weight: Tensor, largest: Tensor | None, largest_number: float) -> Tensor:
    """Return the scales [num_outputs, 1] float32 with which the largest of each row becomes `largest_number`."""
    if largest is None:
        largest = weight.detach().abs().amax(dim=1)
    return (largest[:, None].float() / largest_number).clamp(min=torch.finfo(torch.float32).tiny)


def quantize_int4(weight: Tensor, largest: Tensor | None = None) -> QuantizedLinear:
    """Round a weight to 4 bits in groups of 32 inputs. The largest of a group becomes -8, without a zero point."""
    del largest  # No other rank holds inputs of the same group.
    num_outputs, num_inputs = weight.shape
    numbers = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(num_outputs, num_inputs // _GROUP, device=weight.device)
    for first in range(0, num_outputs, _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        groups = weight[rows].detach().float().view(-1, num_inputs // _GROUP, _GROUP)
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scale = largest / -_MIDDLE_INT4
        rounded = (groups / torch.where(scale == 0, 1, scale)).round() + _MIDDLE_INT4
        numbers[rows], scales[rows] = rounded.clamp(0, 15).flatten(1).to(torch.uint8), scale[:, :, 0]
    zero_points = torch.full_like(scales, _MIDDLE_INT4, dtype=torch.uint8)
    return QuantizedLinear(numbers, scales, zero_points, 4, inputs_per_scale=_GROUP)


ROUNDINGS: Mapping[str, Rounding] = {
    "int4": quantize_int4,
    "int8": quantize_int8,
    "fp8": quantize_fp8,
    "fp8_w8a8": quantize_fp8,
}
"""Map from a quantization to the function that rounds a weight."""
