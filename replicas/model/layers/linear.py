"""Linear layers: plain, and on CPU packed for oneDNN or in the compiled C++ kernels, in full precision, 8 or 4 bits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from replicas.errors import ModelLoadError
from replicas.model.checkpoint.formats import QuantizedWeight, has_panels, is_kept
from replicas.model.checkpoint.quantized_linear import IQ4_VALUES, QuantizedLinear
from replicas.model.hardware.selfcheck import find_fault, relative_error
from replicas.model.layers.float8_linear import Float8Linear, can_multiply_float8, round_rows
from replicas.model.layers.panels import PanelLinear, PanelProducts, join_panels, panel_linear
from replicas.model.layers.rounding import ROUNDINGS, Rounding, quantize_fp8, quantize_int4, quantize_int8

LinearFactory = Callable[[Tensor, Tensor | None], nn.Module]
"""Factory of a linear layer from a weight [out_features, in_features] and a bias [out_features] or None.

The layer may keep a copy of the weight in another form. A weight that is also used elsewhere, for example an embedding
tied to the output layer, is then held twice.
"""


@dataclass(frozen=True, slots=True)
class KeptLinears:
    """Linear layers whose weights keep the bits that they have in a checkpoint."""

    keeps: Callable[[QuantizedWeight], bool]
    """Tells if a weight may keep its bits."""
    make: Callable[[QuantizedLinear, Tensor | None, torch.dtype], nn.Module]
    """Makes a layer from a weight on the CPU and a bias, for inputs and outputs of a dtype."""
    products: PanelProducts | None = None
    """Products with the weights of experts; None: those become dense."""
    rounds: Rounding | None = None
    """Rounds each dense weight when it has been read, so that a device never holds them all; None: they stay dense."""
    rounds_uncut: bool = True
    """False: only weights are rounded then of which other ranks hold inputs, the others when layers are made."""


_log = logging.getLogger(__name__)
# Input rows for which oneDNN chooses the packing: those of a decode step. Prefills of 512 rows were not slower with it.
_EXPECTED_ROWS = 32
# Outputs in one panel of a packed weight, and inputs per output that are adjacent: they fill 4 bytes (int8: 2 bytes).
_PANEL = 32
_PAIRS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 2}
INPUTS_UNIT = 32
"""Number of inputs of which weights that are rounded have multiples."""
# Numbers of 4 bits: inputs in 64 bytes of a panel, and the number that stands for 0.
_NIBBLE_INPUTS = 4
_ZERO_POINT = 8


def choose_linears(dtype: torch.dtype, has_kernels: bool, quantization: str) -> LinearFactory:
    """Return the factory of the fastest linear layers for weights of `dtype` on this machine.

    Raises:
        ModelLoadError: there is no such quantization, or it needs the compiled kernels and they are not loaded.
    """
    if quantization not in ("none", *ROUNDINGS):
        raise ModelLoadError(f"quantization is {quantization!r}; it must be none, {' or '.join(ROUNDINGS)}")
    packed = PackedLinear if can_pack(dtype) else plain_linear
    if not has_kernels and quantization in _QUANTIZED:
        raise ModelLoadError(f"quantization is {quantization!r}, which needs the compiled CPU kernels")
    if not has_kernels and quantization == "none":
        return packed
    compiled = _QUANTIZED.get(quantization, CppLinear) if has_kernels else packed

    def made(weight: Tensor, bias: Tensor | None) -> nn.Module:
        if quantization == "fp8_w8a8" and can_multiply_float8(weight):
            return Float8Linear(weight, bias, round_rows)
        if quantization in ("fp8", "fp8_w8a8") and can_multiply(weight.shape):
            # No CPU kernel has such numbers: they become dense.
            weight = quantize_fp8(weight).dense(weight.dtype)
        return (compiled if can_multiply(weight.shape) else packed)(weight, bias)

    return made


def choose_panels(products: PanelProducts, quantization: str) -> LinearFactory:
    """Return the factory of linear layers for dense weights on a GPU."""
    if quantization == "none":
        return plain_linear

    def rounded(weight: Tensor, bias: Tensor | None) -> nn.Module:
        if quantization == "fp8_w8a8" and can_multiply_float8(weight):
            return Float8Linear(weight, bias, products.round_rows)
        if not can_multiply(weight.shape):
            return plain_linear(weight, bias)
        return panel_linear(products, ROUNDINGS[quantization](weight), bias, weight.dtype)

    return rounded


def kept_groups() -> KeptLinears:
    """Return the layers that keep bits on CPU, in the compiled kernels."""
    return KeptLinears(is_kept, _grouped_linear)


def rounded_parts(
    dtype: torch.dtype, has_kernels: bool, quantization: str, *, rounds_again: bool = False
) -> KeptLinears:  # fmt: skip
    """Return the layers of one of several ranks on CPU that round weights or keep bits.

    Inputs of the layers that are rounded here have no scale: it would differ by rank.
    """
    make_dense = choose_linears(dtype, has_kernels, "none")

    def make(weight: QuantizedLinear, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
        is_dense = weight.numbers.is_floating_point()
        return make_dense(weight.dense(dtype), bias) if is_dense else _grouped_linear(weight, bias, dtype)

    keeps = is_kept if has_kernels and not rounds_again else _never
    return KeptLinears(keeps, make, rounds=ROUNDINGS[quantization], rounds_uncut=False)


def _grouped_linear(weight: QuantizedLinear, bias: Tensor | None, dtype: torch.dtype) -> GroupedLinear:
    return GroupedLinear(pack_groups(weight), bias, dtype)


def _never(_: QuantizedWeight) -> bool:
    return False


def kept_panels(
    products: PanelProducts, quantization: str = "none", *, rounds_again: bool = False
) -> KeptLinears:  # fmt: skip
    """Return the layers that keep bits on a GPU; if the quantization `rounds_again`, not those of a checkpoint."""
    make = partial(panel_linear, products)
    rounds = None if quantization in ("none", "fp8_w8a8") else ROUNDINGS[quantization]
    if rounds_again:
        return KeptLinears(_never, make, None, rounds)
    return KeptLinears(has_panels, make, products, rounds)


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return an `nn.Linear` that shares the given tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


def join_linears(parts: Sequence[nn.Linear | GroupedLinear | PanelLinear], make: LinearFactory) -> nn.Module:
    """Return one layer that computes all of `parts` and concatenates their outputs.

    Parts that keep 4 or 8 bits keep them, on a CPU unless other parts are dense. A single part is made once.
    """
    if len(parts) == 1 and not isinstance(parts[0], nn.Linear):
        return parts[0]
    if any(isinstance(part, PanelLinear) for part in parts):
        return join_panels(parts)
    grouped_parts = [part for part in parts if isinstance(part, GroupedLinear)]
    if len(grouped_parts) == len(parts) and all(before.can_join(after) for before, after in pairwise(grouped_parts)):
        return grouped_parts[0].join(grouped_parts[1:]) if len(grouped_parts) > 1 else grouped_parts[0]
    weights: list[Tensor] = [part.weight for part in parts]
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "either all parts have a bias or none has"
    return make(torch.cat(weights), torch.cat(biases) if biases else None)


def replace_linears(model: nn.Module, make: LinearFactory) -> None:
    """Replace all linear layers of `model`, one after the other."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Subclasses may compute something else.
            if type(child) is nn.Linear:
                setattr(parent, name, make(child.weight, child.bias))


class PackedLinear(nn.Module):
    """Replacement of `nn.Linear` with a packed copy of the weight. The caller must drop the original to free memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _EXPECTED_ROWS)
        self.bias = None if bias is None else bias.detach()

    @property
    def weight(self) -> Tensor:
        """Weight [out_features, in_features], unpacked at each access, for model code that reads its dtype."""
        return self._packed.to_dense()

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply `inputs` [..., in_features] and return [..., out_features]."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise.default(inputs, self._packed, self.bias, "none", [], "")
        return output


def can_pack(dtype: torch.dtype) -> bool:
    """Return True if packed weights of `dtype` work on this machine and give the results of plain ones.

    The check is needed because the operations are private to torch, and oneDNN supports bfloat16 on some processors
    only.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    fault = find_fault(_packing_errors(dtype), dtype)
    if fault is not None:
        _log.warning("linear layers keep plain weights, because packed weights do not work here: %s", fault)
    return fault is None


def _packing_errors(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((24, 40), (24,)))
    packed = PackedLinear(weight, bias)
    for num_rows in (0, 1, 3, 40):
        inputs = torch.randn(1, num_rows, 40, generator=generator).to(dtype)
        yield "a packed linear layer", relative_error(packed(inputs), functional.linear(inputs, weight, bias))


class CompiledLinear(nn.Module):
    """Linear layer in a compiled kernel, with a packed weight."""

    out_features: int
    in_features: int

    def __init__(self, packed: Tensor, scales: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales = _fixed(scales)
        self.bias = _fixed(bias)

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the packed numbers, the scales or None, and the bias or None."""
        return self.packed, self.scales, self.bias


class CppLinear(CompiledLinear):
    """Replacement of `nn.Linear`. The caller must drop the original weight to free its memory."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(pack(weight.detach()), None, bias)
        self.out_features, self.in_features = weight.shape

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
        quantized = quantize_int8(weight)
        super().__init__(pack(quantized.numbers), quantized.scales[:, 0], bias)
        self.out_features, self.in_features = weight.shape

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


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Weight in 4 or 8 bits in the kernels' order. Its values are `number * scale - offset`."""

    numbers: Tensor
    """[num_panels, num_inputs / 4, outputs of a panel, 2] uint8 of `pack_nibbles`, or with / 2 int8 of `pack`.

    Numbers of `pack_nibbles` that stand for the values of `IQ4_VALUES` are words [..., outputs of a panel, 1] int16.
    """
    scales: Tensor  # [1 or 2, num_panels, num_groups, outputs of a panel] float32: scales, and offsets if there are any
    num_outputs: int


class GroupedLinear(CompiledLinear):
    """Linear layer with a weight in 4 or 8 bits: integers with a scale, and perhaps an offset, for groups of inputs.

    Inputs are not quantized. A row's outputs do not depend on the other rows.
    """

    def __init__(self, weight: PackedGroups, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Make a layer for inputs and outputs of `dtype`."""
        super().__init__(weight.numbers, weight.scales, bias)
        self.bits = 8 if weight.numbers.dtype is torch.int8 else 4
        self.out_features = weight.num_outputs
        self.in_features = weight.numbers.shape[1] * (_NIBBLE_INPUTS if self.bits == 4 else _PAIRS[torch.int8])
        self._dtype = dtype

    @property
    def _groups(self) -> Tensor:
        """Scales and offsets; see `PackedGroups`."""
        assert self.scales is not None
        return self.scales

    @property
    def group_size(self) -> int:
        """Inputs with one scale."""
        return self.in_features // self._groups.shape[2]

    def can_join(self, other: GroupedLinear) -> bool:
        """Return True if one layer can compute this one and then `other`."""
        return self.out_features % _PANEL == 0 and (other.bias is None) == (self.bias is None)

    def join(self, others: Sequence[GroupedLinear]) -> GroupedLinear:
        """Return one layer that computes this one and `others`, which have as many inputs. Their outputs fill panels.

        It has the most bits and the smallest groups of all parts, so that the values are the same. Numbers of 4 bits
        that stand for different values become 8-bit integers.
        """
        parts = (self, *others)
        dtypes, group = {part.packed.dtype for part in parts}, math.gcd(*(part.group_size for part in parts))
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.int8
        depth = max(len(part._groups) for part in parts)
        weight = PackedGroups(
            torch.cat([part.packed if part.packed.dtype is dtype else pack(part._numbers) for part in parts]),
            torch.cat([part._groups_of(group, depth) for part in parts], dim=1),
            sum(part.out_features for part in parts),
        )
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        return GroupedLinear(weight, torch.cat(biases) if biases else None, self._dtype)

    def _groups_of(self, size: int, depth: int) -> Tensor:
        """Return scales for groups of `size` inputs; with `depth` 2 also offsets."""
        groups = self._groups.repeat_interleave(self.group_size // size, dim=2)
        return functional.pad(groups, (0, 0, 0, 0, 0, 0, 0, depth - len(groups)))

    @property
    def _numbers(self) -> Tensor:
        """Numbers [out_features, in_features] int8, unpacked at each access."""
        if self.bits == 8:
            return unpack(self.packed, self.out_features)
        nibbles = unpack_nibbles(self.packed.view(torch.uint8), self.out_features)
        if self.packed.dtype is torch.int16:
            return torch.tensor(IQ4_VALUES, dtype=torch.int8)[nibbles.int()]
        return nibbles.to(torch.int8) - _ZERO_POINT

    @property
    def weight(self) -> Tensor:
        """Weight [out_features, in_features], dequantized at each access."""
        scale, *offset = (
            part.transpose(1, 2).flatten(0, 1)[: self.out_features].repeat_interleave(self.group_size, dim=1)
            for part in self._groups
        )
        dense: Tensor = self._numbers.float() * scale
        return (dense - offset[0] if offset else dense).to(self._dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply `inputs` [..., in_features] and return [..., out_features]."""
        output: Tensor = torch.ops.headway.multiply_by_groups.default(
            inputs.contiguous(), self.packed, self.scales, self.out_features, self.bias
        )
        return output


def rounded_to_int4(weight: Tensor, bias: Tensor | None) -> GroupedLinear:
    """Return a layer with the weight rounded to 4 bits."""
    return GroupedLinear(pack_groups(quantize_int4(weight)), bias, weight.dtype)


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Return numbers [outputs, inputs] below 16 in the kernels' order, [panels, inputs / 4, outputs of a panel, 2].

    The 64 bytes of four inputs hold, for each of 16 outputs and each of two adjacent inputs, two pairs of nibbles: one
    pair of this input, and one of the input two further on; each is that output's number, and that of 16 outputs on.
    """
    num_outputs, num_inputs = numbers.shape
    filled = functional.pad(numbers, (0, 0, 0, -num_outputs % _PANEL))
    lanes = filled.view(-1, 2, _PANEL // 2, num_inputs // _NIBBLE_INPUTS, 2, 2).permute(0, 3, 2, 5, 4, 1)
    return (lanes[..., 0] | lanes[..., 1] << 4).contiguous().view(-1, num_inputs // _NIBBLE_INPUTS, _PANEL, 2)


def unpack_nibbles(packed: Tensor, num_outputs: int) -> Tensor:
    """Return the numbers [num_outputs, inputs] that `pack_nibbles` packed."""
    lanes = packed.view(len(packed), -1, _PANEL // 2, 2, 2)
    numbers = torch.stack((lanes & 15, lanes >> 4), dim=-1).permute(0, 5, 2, 1, 4, 3)
    return numbers.reshape(len(packed) * _PANEL, -1)[:num_outputs]


def pack_groups(weight: QuantizedLinear) -> PackedGroups:
    """Return a weight of 4 or 8 bits in the kernels' order, with offsets if a zero point needs them."""
    scales = weight.scales.float()
    numbers, middle = _signed(weight)
    zero_points = torch.zeros(()) if weight.zero_points is None else weight.zero_points.float()
    parts = [scales]
    if not bool((zero_points == middle).all()):
        parts.append(scales * (zero_points - middle))
    padded = functional.pad(torch.stack(parts), (0, 0, 0, -len(scales) % _PANEL))
    packed = padded.view(len(parts), -1, _PANEL, scales.shape[1]).transpose(2, 3).contiguous()
    return PackedGroups(numbers, packed, len(scales))


def _signed(weight: QuantizedLinear) -> tuple[Tensor, int]:
    """Return the numbers in the kernels' order, and the number that became 0 there."""
    if weight.table is not None:
        assert weight.table.tolist() == list(IQ4_VALUES), "the kernels have one table"
        return pack_nibbles(weight.numbers).view(torch.int16), 0
    if weight.bits == 4:
        return pack_nibbles(weight.numbers), _ZERO_POINT
    if weight.numbers.dtype is torch.int8:
        return pack(weight.numbers), 0
    return pack((weight.numbers ^ 128).view(torch.int8)), 128


def can_multiply(shape: Sequence[int]) -> bool:
    """Return True if the kernels support a weight of this shape."""
    return shape[1] % INPUTS_UNIT == 0


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


_QUANTIZED: dict[str, Callable[[Tensor, Tensor | None], CompiledLinear]] = {
    "int4": rounded_to_int4,
    "int8": Int8Linear,
}
"""Map from a quantization to the layers that quantize a weight on CPU."""


def _fixed(values: Tensor | None) -> nn.Parameter | None:
    return None if values is None else nn.Parameter(values.detach(), requires_grad=False)
