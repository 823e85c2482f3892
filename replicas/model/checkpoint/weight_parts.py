"""Parts of the weights of a checkpoint, for one rank of several. The module imports no torch.

Scales belong to blocks of a quantized weight. Where a cut goes through a block, its scale is repeated for smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from replicas.errors import ModelLoadError
from replicas.model.checkpoint.formats import (
    WORD_BITS,
    Cut,
    Layout,
    QuantizedWeight,
    WeightPart,
    Weights,
    has_plain_order,
)

Cutter = Callable[[str, tuple[int, ...]], Cut | None]
"""Chooser of the cut of a weight, by its name and shape; None: the rank holds the whole weight."""

_BYTE_BITS = 8
_ORDERS = frozenset({".g_idx", ".weight_g_idx"})


class _Unit(Enum):
    """Unit of which a tensor has one entry."""

    VALUE = auto()
    BYTE = auto()
    WORD = auto()
    GROUP = auto()
    """Values with the same scale."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """Dimension of a tensor of a quantized weight, and the unit of its entries."""

    dim: int
    unit: _Unit


_Axes = tuple[_Axis | None, _Axis | None]
"""Axes of outputs and of inputs; None: the tensor has no such dimension."""


def _axes(outputs: int, inputs: int, outputs_unit: _Unit = _Unit.VALUE, inputs_unit: _Unit = _Unit.VALUE) -> _Axes:
    return _Axis(outputs, outputs_unit), _Axis(inputs, inputs_unit)


_SCALES = _axes(0, 1, _Unit.GROUP, _Unit.GROUP)
_ORDER: _Axes = (None, _Axis(0, _Unit.VALUE))
_WHOLE: _Axes = (None, None)
_FORMATS: Mapping[str, Mapping[str, _Axes]] = {
    "packed integers": {
        ".weight_packed": _axes(0, 1, inputs_unit=_Unit.WORD),
        ".weight_scale": _SCALES,
        ".weight_zero_point": _axes(0, 1, _Unit.WORD, _Unit.GROUP),
        ".weight_g_idx": _ORDER,
        ".weight_shape": _WHOLE,
    },
    "numbers with scales": {
        ".weight": _axes(0, 1),
        ".weight_scale": _SCALES,
        ".weight_scale_inv": _SCALES,
        ".weight_zero_point": _SCALES,
    },
    "AWQ": {
        ".qweight": _axes(1, 0, _Unit.WORD),
        ".qzeros": _axes(1, 0, _Unit.WORD, _Unit.GROUP),
        ".scales": _axes(1, 0, inputs_unit=_Unit.GROUP),
    },
    "GPTQ": {
        ".qweight": _axes(1, 0, inputs_unit=_Unit.WORD),
        ".qzeros": _axes(1, 0, _Unit.WORD, _Unit.GROUP),
        ".scales": _axes(1, 0, inputs_unit=_Unit.GROUP),
        ".g_idx": _ORDER,
    },
    "GGUF": {
        ".weight_nibbles": _axes(0, 1, inputs_unit=_Unit.BYTE),
        ".weight_codes": _axes(0, 1, inputs_unit=_Unit.BYTE),
        ".weight_numbers": _axes(0, 1),
        ".weight_scale": _SCALES,
        ".weight_minimum": _SCALES,
    },
    "MXFP4": {
        "_blocks": _axes(-3, -2, inputs_unit=_Unit.GROUP),
        "_scales": _axes(-2, -1, inputs_unit=_Unit.GROUP),
    },
    "NVFP4": {
        ".weight": _axes(0, 1, inputs_unit=_Unit.BYTE),
        ".weight_packed": _axes(0, 1, inputs_unit=_Unit.BYTE),
        ".weight_scale": _SCALES,
        ".weight_scale_2": _WHOLE,
        ".weight_global_scale": _WHOLE,
    },
    "8-bit integers of bitsandbytes": {".weight": _axes(0, 1), ".SCB": (_Axis(0, _Unit.VALUE), None)},
}
"""Axes of the tensors of each format, by suffix. A weight of another format is read whole, and its dense one is cut."""
_WITH_EXPERTS = "MXFP4"
"""Format whose dense weights are [experts, inputs, outputs]; the others are [outputs, inputs]."""


def cut_weights(weights: Weights, cutter: Cutter, num_ranks: int) -> Weights:
    """Return the parts of `weights` that one of `num_ranks` ranks holds.

    Raises:
        ModelLoadError: a layer whose inputs are cut has them in another order than their groups of scales.
    """
    cuts = {name: cutter(name, tensor.shape) for name, tensor in weights.plain.items()}
    parts = {
        name: weight if cut is None else _part_of(weight, cut, num_ranks)
        for name, weight in weights.quantized.items()
        for cut in [cutter(name, weight.layout.shape)]
    }
    return replace(weights, quantized=parts, cuts={name: cut for name, cut in cuts.items() if cut is not None})


def _part_of(weight: QuantizedWeight, cut: Cut, num_ranks: int) -> QuantizedWeight:
    whole, parts, shape = weight.layout, weight.parts, cut.shape_of(weight.layout.shape)
    part = WeightPart(cut, whole)
    if weight.format.name not in _FORMATS:
        return replace(weight, layout=replace(whole, shape=shape), part=part)
    if part.cuts_inputs:
        if not has_plain_order(weight):
            raise ModelLoadError(
                f"tensor_parallel_size is {num_ranks}, which cuts the inputs of {weight.name}; their groups of scales "
                "have another order (act-order), with which only 1 works"
            )
        parts = {suffix: tensor for suffix, tensor in parts.items() if suffix not in _ORDERS}
        group = cut.size
        if whole.inputs_per_scale < whole.num_inputs:
            group = math.gcd(whole.inputs_per_scale, cut.size, *(values.start for values in cut.ranges))
        layout = replace(whole, num_inputs=cut.size, inputs_per_scale=group, shape=shape)
    else:
        num_outputs = whole.num_outputs // whole.shape[cut.dim] * cut.size
        layout = replace(whole, num_outputs=num_outputs, outputs_per_scale=1, shape=shape)
    return replace(weight, parts=parts, layout=layout, part=part)


def is_cut_when_stored(weight: QuantizedWeight) -> bool:
    """Return True if the tensors of a weight can be cut; else the dense weight is."""
    return weight.format.name in _FORMATS


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """Slice of a quantized weight in whole words and groups, which covers a range of its outputs or inputs."""

    weight: QuantizedWeight
    start: int
    stop: int

    @classmethod
    def covering(cls, weight: QuantizedWeight, values: range) -> StoredSlice:
        """Return the smallest slice that covers `values` along the cut dimension."""
        assert weight.part is not None
        whole, size = weight.part.whole, weight.part.whole.shape[weight.part.cut.dim]
        group = whole.inputs_per_scale if weight.part.cuts_inputs else whole.outputs_per_scale
        word = WORD_BITS // math.gcd(WORD_BITS, whole.bits)
        unit = math.lcm(word, group) if group < size else word
        if weight.format.name == _WITH_EXPERTS and not weight.part.cuts_inputs:
            unit = 1  # Outputs of one expert follow those of another one.
        return cls(weight, values.start // unit * unit, min(-(-values.stop // unit) * unit, size))

    @property
    def layout(self) -> Layout:
        """Sizes of the slice."""
        assert self.weight.part is not None
        whole, cut, size = self.weight.part.whole, self.weight.part.cut, self.stop - self.start
        if self.weight.part.cuts_inputs:
            return replace(whole, num_inputs=size)
        return replace(whole, num_outputs=whole.num_outputs // whole.shape[cut.dim] * size)

    def range_of(self, suffix: str) -> tuple[int, range] | None:
        """Return the dimension and the range of the tensor `suffix` that the slice has; None: the whole tensor."""
        weight = self.weight
        assert weight.part is not None
        axis = _FORMATS[weight.format.name][suffix][weight.part.cuts_inputs]
        shape = weight.parts[suffix].shape
        if axis is None or len(shape) <= axis.dim or shape[axis.dim] == 1:
            return None  # One scale is for all.
        whole, size = weight.part.whole, shape[axis.dim]
        values, entries = {
            _Unit.VALUE: (1, 1),
            _Unit.BYTE: (_BYTE_BITS, whole.bits),
            _Unit.WORD: (WORD_BITS, whole.bits),
            _Unit.GROUP: (whole.inputs_per_scale if weight.part.cuts_inputs else whole.outputs_per_scale, 1),
        }[axis.unit]
        is_last = self.stop == whole.shape[weight.part.cut.dim]
        return axis.dim, range(self.start * entries // values, size if is_last else self.stop * entries // values)
