"""Weights in 4 or 8 bits on a GPU, in panels that one Triton kernel widens in registers, and their linear layer.

The values are those of `QuantizedLinear`: nothing is rounded that the checkpoint did not round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from replicas.model.checkpoint.quantized_linear import FP4_VALUES, QuantizedLinear

PANEL = 64
"""Outputs of a panel."""
_MAX_BYTES = 64
"""Most bytes that an output has in a unit. With more, the values of a unit do not fit the registers beside the sums."""

WHOLE = 2**30
"""Inputs of a group that has all of them."""


class PanelFormat(IntEnum):
    """Numbers of a weight in panels."""

    INT4 = 0
    TABLE4 = 1
    FLOAT4 = 2
    INT8 = 3
    FLOAT8 = 4

    @property
    def bits(self) -> int:
        """Size of a number."""
        return 4 if self <= PanelFormat.FLOAT4 else 8


@dataclass(frozen=True, slots=True)
class Panels:
    """Weight in panels: the value of output o and input i is `(number - zero_points[g, o]) * scales[g, o]`.

    The input i is in group g = i // group_size. A unit has the same `unit_bytes` of each of a panel's outputs. Of
    numbers of 4 bits a byte has input j of its unit in the low half, and input j + unit_bytes in the high half. Numbers
    of whole groups are adjacent, and what is behind the last output and input is 0.

    Those of several experts of the same sizes have one more dimension in front: see `stack`.
    """

    format: PanelFormat
    numbers: Tensor  # [num_panels, num_units, PANEL, unit_bytes] uint8
    scales: Tensor  # [num_groups, num_outputs] floats
    zero_points: Tensor | None  # like `scales`, any type; None: all are `middle`
    middle: int
    """Number that is stored as 0."""
    num_inputs: int
    group_size: int
    order: Tensor | None = None  # [num_inputs] int32: input of the layer at each place; None: the inputs as they are
    table: Tensor | None = None  # [16] bfloat16, values of `TABLE4`

    @property
    def num_outputs(self) -> int:
        """Number of outputs."""
        return self.scales.shape[-1]

    @property
    def unit_bytes(self) -> int:
        """Bytes of one output in a unit."""
        return self.numbers.shape[-1]

    @property
    def num_units(self) -> int:
        """Units of an output."""
        return self.numbers.shape[-3]

    @property
    def num_groups(self) -> int:
        """Groups of inputs."""
        return self.scales.shape[-2]

    @property
    def unit_inputs(self) -> int:
        """Inputs of a unit."""
        return self.unit_bytes * 8 // self.format.bits

    def can_join(self, other: Panels) -> bool:
        """Return True if one weight can have the outputs of this one and then those of `other`."""
        sizes = [(one.format, one.middle, one.num_inputs, one.group_size, one.unit_bytes) for one in (self, other)]
        return (
            self.num_outputs % PANEL == 0
            and sizes[0] == sizes[1]
            and (self.zero_points is None) == (other.zero_points is None)
            and _are_equal(self.order, other.order)
            and _are_equal(self.table, other.table)
        )

    @staticmethod
    def stack(experts: Sequence[Panels]) -> Panels:
        """Return the weights of experts, which have the same sizes and format."""
        first = next((one for one in experts if one.zero_points is not None), experts[0])
        zero_points = None
        if first.zero_points is not None:
            middle = torch.full_like(first.zero_points, first.middle)
            points = [middle if one.zero_points is None else one.zero_points for one in experts]
            zero_points = torch.stack(points)
        return replace(
            first,
            numbers=torch.stack([one.numbers for one in experts]),
            scales=torch.stack([one.scales for one in experts]),
            zero_points=zero_points,
        )

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the tensors, which a module registers, by name."""
        for name in ("numbers", "scales", "zero_points", "order"):
            values: Tensor | None = getattr(self, name)
            if values is not None:
                yield name, nn.Parameter(values.detach(), requires_grad=False)

    def join(self, others: Sequence[Panels]) -> Panels:
        """Return one weight with the outputs of this one and of `others`, which can be joined."""
        parts = (self, *others)
        zero_points = [part.zero_points for part in parts if part.zero_points is not None]
        return replace(
            self,
            numbers=torch.cat([part.numbers for part in parts]),
            scales=torch.cat([part.scales for part in parts], dim=1),
            zero_points=torch.cat(zero_points, dim=1) if zero_points else None,
        )


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def unit_bytes(group_size: int) -> int:
    """Return the bytes that an output has in a unit, for groups of 16, 32, 64 or more inputs."""
    return min(_MAX_BYTES, group_size)


def pack_panels(weight: QuantizedLinear) -> Panels:
    """Return a weight of 4 or 8 bits in panels, on its device. See `formats.has_panels` for the weights that have them.

    An output has NaN for all inputs of a group in which one number is NaN, so its products are NaN, as they would be.
    """
    num_inputs = weight.numbers.shape[1]
    panel_format, numbers, middle = _bits_of(weight)
    group_size, order = weight.inputs_per_scale, None
    scales, zero_points = weight.scales, weight.zero_points
    if weight.order is not None:
        order = weight.order.long().argsort(stable=True)
        numbers = numbers[:, order]
    if weight.outputs_per_scale > 1:
        outputs = torch.arange(len(numbers), device=numbers.device) // weight.outputs_per_scale
        scales, zero_points = scales[outputs], None if zero_points is None else zero_points[outputs]
    if group_size >= num_inputs:
        group_size = WHOLE
    if panel_format is PanelFormat.FLOAT8:
        scales = _with_nan(numbers, scales, group_size)
    if zero_points is None and middle:
        zero_points = torch.zeros_like(scales, dtype=torch.uint8)
    elif zero_points is not None and bool((zero_points == middle).all()):
        zero_points = None
    return Panels(
        panel_format,
        _in_panels(numbers, panel_format.bits, unit_bytes(group_size)),
        scales.t().contiguous(),
        None if zero_points is None else zero_points.t().contiguous(),
        middle,
        num_inputs,
        group_size,
        None if order is None else order.int(),
        None if weight.table is None else weight.table.to(torch.bfloat16),
    )


def _bits_of(weight: QuantizedLinear) -> tuple[PanelFormat, Tensor, int]:
    """Return the format, the numbers as bytes, and the number that stands for 0."""
    numbers = weight.numbers
    if weight.table is not None:
        assert torch.equal(weight.table.to(torch.bfloat16).float(), weight.table), "values must be exact in bfloat16"
        is_float4 = weight.table.tolist() == list(FP4_VALUES)
        return PanelFormat.FLOAT4 if is_float4 else PanelFormat.TABLE4, numbers, 0
    if weight.bits == 4:
        return PanelFormat.INT4, numbers, 8
    if numbers.is_floating_point():
        assert numbers.dtype is torch.float8_e4m3fn
        return PanelFormat.FLOAT8, numbers.view(torch.uint8), 0
    if numbers.dtype is torch.int8:
        return PanelFormat.INT8, numbers.view(torch.uint8), 0
    return PanelFormat.INT8, numbers ^ 128, 128


def _with_nan(numbers: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Return scales that are NaN for groups with a number that is NaN."""
    is_nan = (numbers & 0x7F) == 0x7F
    if not bool(is_nan.any()):
        return scales
    groups = functional.pad(is_nan, (0, -is_nan.shape[1] % group_size)).view(len(is_nan), -1, group_size)
    return scales.masked_fill(groups.any(dim=2), torch.nan)


def _in_panels(numbers: Tensor, bits: int, num_bytes: int) -> Tensor:
    """Return numbers [outputs, inputs] uint8 as panels [num_panels, num_units, PANEL, num_bytes]."""
    halves = 8 // bits
    num_outputs, num_inputs = numbers.shape
    padding = (0, -num_inputs % (num_bytes * halves), 0, -num_outputs % PANEL)
    units = functional.pad(numbers, padding).view(-1, PANEL, -(-num_inputs // (num_bytes * halves)), halves, num_bytes)
    stored = units[..., 0, :] | units[..., 1, :] << 4 if halves == 2 else units[..., 0, :]
    return stored.transpose(1, 2).contiguous()


class PanelProducts(Protocol):
    """Products with weights in panels on one device, in the kernels that fit it."""

    device: torch.device
    swept_rows: tuple[int, ...]
    """Numbers of rows, of which each has another kernel or tile."""

    def reserve(self, panels: Panels, dtype: torch.dtype) -> None:
        """Prepare for products with `panels` in `dtype`, before any step runs."""

    def multiply(self, rows: Tensor, panels: Panels, bias: Tensor | None) -> Tensor:
        """Return rows [num_rows, num_inputs], whose inputs have the order of `panels`, times the weight, plus bias."""

    def multiply_experts(
        self, rows: Tensor, panels: Panels, biases: Tensor | None, order: Tensor, starts: Tensor, top_k: int, *,
        is_first: bool,
    ) -> Tensor:  # fmt: skip
        """Return the products of rows with the weights of their experts plus biases, [num_pairs, num_outputs].

        `order`, `starts` and `top_k` are those of `experts.Routing`, `is_first` is that of `experts.ExpertLinear`.
        """

    def round_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Round rows to e4m3. See `float8_linear.RowRounding`."""

    def widen(self, panels: Panels, dtype: torch.dtype) -> Tensor:
        """Return the weight [num_outputs, num_inputs]: products in float32, each rounded once to `dtype`."""


class PanelLinear(nn.Module):
    """Linear layer with a weight in panels. Inputs are not quantized."""

    def __init__(self, panels: Panels, bias: Tensor | None, dtype: torch.dtype, products: PanelProducts) -> None:
        """Make a layer for inputs and outputs of `dtype`."""
        super().__init__()
        self.out_features, self.in_features = panels.num_outputs, panels.num_inputs
        self.panels = panels
        self.dtype = dtype
        for name, parameter in panels.parameters():
            self.register_parameter(name, parameter)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.products = products
        products.reserve(panels, dtype)

    @property
    def shape(self) -> tuple[object, ...]:
        """Sizes and types by which compiled kernels differ; equal ones have the same kernels."""
        panels = self.panels
        tensors = (panels.numbers, panels.scales, panels.zero_points, self.bias)
        described = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
        return panels.format, panels.middle, panels.group_size, *described

    def can_join(self, other: PanelLinear) -> bool:
        """Return True if one layer can compute this one and then `other`."""
        return self.panels.can_join(other.panels) and (other.bias is None) == (self.bias is None)

    def join(self, others: Sequence[PanelLinear]) -> PanelLinear:
        """Return one layer that computes this one and `others`, which can be joined."""
        biases: list[Tensor] = [part.bias for part in (self, *others) if part.bias is not None]
        panels = self.panels.join([part.panels for part in others])
        return PanelLinear(panels, torch.cat(biases) if biases else None, self.dtype, self.products)

    @property
    def weight(self) -> Tensor:
        """Weight [out_features, in_features], widened at each access."""
        wide = self.products.widen(self.panels, self.dtype)
        order = self.panels.order
        return wide if order is None else torch.empty_like(wide).index_copy_(1, order.long(), wide)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply `inputs` [..., in_features] and return [..., out_features]."""
        rows = inputs.reshape(-1, self.in_features)
        rows = rows.contiguous() if self.panels.order is None else rows.index_select(1, self.panels.order)
        return self.products.multiply(rows, self.panels, self.bias).view(*inputs.shape[:-1], self.out_features)


def compile_panels(model: nn.Module) -> None:
    """Run products of every size that has kernels of its own, for each shape of a layer, so that no step compiles."""
    layers = [module for module in model.modules() if isinstance(module, PanelLinear)]
    for layer in {layer.shape: layer for layer in layers}.values():
        for num_rows in layer.products.swept_rows:
            layer(torch.zeros(num_rows, layer.in_features, dtype=layer.dtype, device=layer.products.device))


def panel_linear(
    products: PanelProducts, weight: QuantizedLinear, bias: Tensor | None, dtype: torch.dtype
) -> PanelLinear:
    """Return a layer with a weight that `has_panels`, on the device of `products`."""
    return PanelLinear(pack_panels(weight.to(products.device)), bias, dtype, products)


class ParallelLinears(nn.Module):
    """Linear layers that differ in the form of their weights, and have the same inputs: their outputs side by side."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply `inputs` [..., in_features] with all weights."""
        return torch.cat([part(inputs) for part in self.parts], dim=-1)


def join_panels(parts: Sequence[nn.Module]) -> nn.Module:
    """Return one layer that computes all of `parts`, of which some have panels, and concatenates their outputs."""
    layers = [part for part in parts if isinstance(part, PanelLinear)]
    if len(layers) == len(parts) and all(before.can_join(after) for before, after in pairwise(layers)):
        return layers[0].join(layers[1:]) if len(layers) > 1 else layers[0]
    return ParallelLinears(parts)
