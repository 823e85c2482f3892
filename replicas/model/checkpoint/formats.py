"""Formats of quantized weights: the tensors that each is made of, and their shapes. The module imports no torch."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from replicas.errors import ModelLoadError
from replicas.model.checkpoint.headers import StoredTensor

Parts = Mapping[str, StoredTensor]
"""Tensors of one quantized weight, by the suffix of their names."""

SUPPORTED = "compressed-tensors, AWQ, GPTQ, FP8, MXFP4, NVFP4 and bitsandbytes"
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
WORD_BITS = 32
"""Bits of the words in which integers are packed."""
_PANEL_INPUTS = 16
_AWQ_BITS = 4
_MXFP4_GROUP = 32
_NVFP4_GROUP = 16
_COMPRESSED_FORMATS = {
    "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "dense", "mixed-precision",
    "nvfp4-pack-quantized",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization of a checkpoint, as its config describes it."""

    method: str
    """Name for people, such as GPTQ."""
    formats: tuple[Format, ...]
    """Formats that its weights may have."""
    bits: int | None = None
    """Bits of a number where the tensors do not tell them."""
    group_size: int | None = None
    """Inputs per scale where the tensors do not tell them; None: all inputs of an output share one."""
    block: tuple[int, int] | None = None
    """Outputs and inputs per scale of a format with blocks; None: it has none."""
    zero_point_offset: int = 0
    """Number to add to stored zero points."""
    needs_zero_points: bool = False
    is_symmetric: bool = False
    """True if zero points are stored, but all are the middle one."""
    activations: str | None = None
    """Format to which the checkpoint quantizes activations; None: it does not."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a quantized weight."""

    num_outputs: int
    num_inputs: int
    bits: int
    outputs_per_scale: int
    inputs_per_scale: int
    shape: tuple[int, ...]
    """Shape of the dense weight."""


@dataclass(frozen=True, slots=True)
class Format:
    """Format of a quantized weight: the suffixes of the tensors that it is made of."""

    name: str
    numbers: str
    """Suffix of the tensor with the numbers."""
    layout: Callable[[Parts, Quantization], Layout]
    """Function that returns the sizes, or raises ValueError if the shapes do not agree."""
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Suffixes of tensors about activations, which are not read."""
    dtypes: tuple[str, ...] = ("I32",)
    """Dtypes of the numbers. A tensor of that suffix with another dtype is a plain weight."""
    dense: str = ".weight"
    """Suffix of the dense weight."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Quantized weight of a checkpoint."""

    name: str
    """Name of the dense weight."""
    format: Format
    parts: Parts
    layout: Layout
    """Sizes of the weight, or of the part of it that a rank holds."""
    part: WeightPart | None = None
    """Part that a rank holds; None: the whole weight."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Slices of a tensor along one dimension, joined in their order, and zeros behind them: the part of one rank."""

    dim: int
    ranges: tuple[range, ...]
    num_zeros: int = 0

    @property
    def size(self) -> int:
        """Size of the cut tensor along the dimension."""
        return sum(map(len, self.ranges)) + self.num_zeros

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the cut of a tensor of `shape`."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Part of a quantized weight."""

    cut: Cut
    """Cut of the dense weight."""
    whole: Layout

    @property
    def cuts_inputs(self) -> bool:
        """True if other ranks hold inputs; they are the second dimension, of experts too. Else they hold outputs."""
        return self.cut.dim == 1


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a checkpoint, or the parts of them that a rank holds."""

    plain: Mapping[str, StoredTensor]
    quantized: Mapping[str, QuantizedWeight]
    quantization: Quantization | None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """Cuts of plain weights by name. The others are whole."""

    @property
    def num_values(self) -> int:
        """Number of values of all weights, once they are dense."""
        return sum(math.prod(self.shape_of(name)) for name in (*self.plain, *self.quantized))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, once it is dense."""
        if name in self.quantized:
            return self.quantized[name].layout.shape
        shape, cut = self.plain[name].shape, self.cuts.get(name)
        return shape if cut is None else cut.shape_of(shape)

    def cut_of(self, name: str) -> Cut | None:
        """Return the cut of a weight; None: the weight is whole."""
        if name not in self.quantized:
            return self.cuts.get(name)
        part = self.quantized[name].part
        return None if part is None else part.cut

    def whole_shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape that a dense weight has before it is cut."""
        if name not in self.quantized:
            return self.plain[name].shape
        part = self.quantized[name].part
        return self.quantized[name].layout.shape if part is None else part.whole.shape

    def description(self, dtype: str, kept_names: Collection[str] = ()) -> str:
        """Return the formats of the weights and what becomes of them in a replica that computes in `dtype`.

        `kept_names` are the names of weights that keep their bits.
        """
        if self.quantization is None:
            return dtype
        names = " and ".join(sorted({f"{weight.layout.bits}-bit" for weight in self.quantized.values()}))
        become = f"dequantized to {dtype}"
        if kept_names:
            rest = len(self.quantized) - len(kept_names)
            bits = sorted({self.quantized[name].layout.bits for name in kept_names})
            become = f"kept in {' or '.join(map(str, bits))} bits" + (
                f", {rest} of {len(self.quantized)} {become}" if rest else ""
            )
        text = f"{self.quantization.method}, {names or 'none'}, {become}"
        note = self.quantization.activations
        return text if note is None else f"{text}; activations stay in {dtype}, not {note}"


def find_weights(tensors: Mapping[str, StoredTensor], quantization: Quantization | None) -> Weights:
    """Group the tensors of a checkpoint into weights.

    Raises:
        ModelLoadError: a quantized weight lacks a tensor, or its tensors' shapes do not agree.
    """
    plain = dict(tensors)
    quantized = {} if quantization is None else _find_quantized(tensors, quantization)
    for weight in quantized.values():
        prefix = weight.name.removesuffix(weight.format.dense)
        for suffix in (*weight.parts, *weight.format.ignored):
            plain.pop(prefix + suffix, None)
    for name, tensor in plain.items():
        if tensor.dtype in ("I8", *_FLOAT8):
            raise ModelLoadError(f"the tensor {name} in {tensor.dtype} has no scales in a known format")
    return Weights(plain, quantized, quantization)


def _find_quantized(tensors: Mapping[str, StoredTensor], quantization: Quantization) -> dict[str, QuantizedWeight]:
    weights = [
        _quantized_weight(name.removesuffix(weight_format.numbers), weight_format, tensors, quantization)
        for weight_format in quantization.formats
        for name, tensor in tensors.items()
        if name.endswith(weight_format.numbers) and tensor.dtype in weight_format.dtypes
    ]
    return {weight.name: weight for weight in weights}


def _quantized_weight(
    prefix: str, weight_format: Format, tensors: Mapping[str, StoredTensor], quantization: Quantization
) -> QuantizedWeight:
    suffixes = (weight_format.numbers, *weight_format.required, *weight_format.optional)
    parts = {suffix: tensors[prefix + suffix] for suffix in suffixes if prefix + suffix in tensors}
    missing = [suffix for suffix in weight_format.required if suffix not in parts]
    if missing:
        raise ModelLoadError(
            f"{prefix}{weight_format.numbers} lacks its {', '.join(prefix + suffix for suffix in missing)}"
        )
    try:
        layout = weight_format.layout(parts, quantization)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelLoadError(
            f"{prefix}{weight_format.numbers} cannot be read as {weight_format.name}: {error}"
        ) from error
    return QuantizedWeight(prefix + weight_format.dense, weight_format, parts, layout)


def is_kept(weight: QuantizedWeight) -> bool:
    """Return True if a weight has integers of 4 or 8 bits with scales by group, with which the kernels compute.

    The groups have adjacent inputs, a multiple of 4.
    """
    layout = weight.layout
    return (
        weight.format in _KEPT
        and weight.parts[weight.format.numbers].dtype not in _FLOAT8
        and layout.bits in (4, 8)
        and layout.outputs_per_scale == 1
        and layout.num_inputs % 4 == 0
        and layout.inputs_per_scale % 4 == 0
        and layout.num_inputs % layout.inputs_per_scale == 0
        and has_plain_order(weight)
    )


def has_panels(weight: QuantizedWeight) -> bool:
    """Return True if a weight has integers of 4 or 8 bits, or e4m3 floats, with which the GPU's kernels compute.

    A scale belongs to 16, 32, 64 or a multiple of 128 inputs, or to all. Inputs may have any order of whole groups.
    """
    layout = weight.layout
    group = layout.inputs_per_scale
    return (
        weight.format in (*_KEPT, _MXFP4, _NVFP4, _NVFP4_PACKED)
        and weight.parts[weight.format.numbers].dtype != "F8_E5M2"
        and layout.bits in (4, 8)
        and layout.num_inputs % _PANEL_INPUTS == 0
        and (group in (16, 32, 64) or group % 128 == 0 or group >= layout.num_inputs)
        and (has_plain_order(weight) or _has_whole_groups(_order_of(weight), group))
    )


def has_plain_order(weight: QuantizedWeight) -> bool:
    """Return True if adjacent inputs have a scale, or no input has a group (-1)."""
    order = _order_of(weight)
    if order is None:
        return True
    if order.dtype != "I32":
        return False
    stored, plain = order.read_bytes(), _plain_order(weight.layout.num_inputs, weight.layout.inputs_per_scale)
    return stored == plain or stored == b"\xff" * len(plain)


def _order_of(weight: QuantizedWeight) -> StoredTensor | None:
    return weight.parts.get(".g_idx") or weight.parts.get(".weight_g_idx")


@cache
def _plain_order(num_inputs: int, group_size: int) -> bytes:
    """Return the groups of inputs of which adjacent ones have a scale, as a checkpoint stores them."""
    return array("i", (index // group_size for index in range(num_inputs))).tobytes()


def has_offsets(weight: QuantizedWeight, weights: Weights) -> bool:
    """Return True if a weight of 4 or 8 bits has zero points, other than the middle one."""
    is_symmetric = weights.quantization is not None and weights.quantization.is_symmetric
    return not is_symmetric and not _OFFSETS.isdisjoint(weight.parts)


def _has_whole_groups(order: StoredTensor | None, group_size: int) -> bool:
    """Return True if each group but the last has `group_size` inputs."""
    if order is None or order.dtype != "I32":
        return False
    counts = Counter(memoryview(order.read_bytes()).cast("i"))
    last = max(counts)
    return counts[last] <= group_size and all(counts[group] == group_size for group in range(last))


def read_quantization(config: Mapping[str, Any]) -> Quantization:
    """Return the quantization that the `quantization_config` of a checkpoint describes.

    Raises:
        ModelLoadError: there is no support for it; the message begins with its method in parentheses.
    """
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"
    reader = _METHODS.get(str(method))
    if reader is None:
        raise ModelLoadError(f"({method}); Headway reads {SUPPORTED}")
    try:
        return reader(config)
    except _Unsupported as error:
        raise ModelLoadError(f"({method}); Headway cannot read {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ModelLoadError(f"({method}); its description cannot be read: {error!r}") from error


class _Unsupported(Exception):
    """Refusal of a variant of a method."""


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    groups: list[dict[str, Any]] = list(config["config_groups"].values())
    for name in {config.get("format"), *(group.get("format") for group in groups)} - {None}:
        if name not in _COMPRESSED_FORMATS:
            raise _Unsupported(f"the format {name}")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _Unsupported("sparse weights")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise _Unsupported("transforms of activations")
    weights = [group["weights"] for group in groups if group.get("weights")]
    blocks = {tuple(weight["block_structure"]) for weight in weights if weight.get("strategy") == "block"}
    if len(blocks) > 1:
        raise _Unsupported("blocks of several sizes")
    inputs = [group["input_activations"] for group in groups if group.get("input_activations")]
    return Quantization(
        "compressed-tensors",
        (_PACKED, _SCALED, _NVFP4_PACKED),
        block=blocks.pop() if blocks else None,
        needs_zero_points=bool(weights) and not any(weight.get("symmetric", True) for weight in weights),
        activations=f"{inputs[0]['num_bits']}-bit {inputs[0].get('type', 'int')}" if inputs else None,
    )


def _awq(config: Mapping[str, Any]) -> Quantization:
    if config.get("bits", config.get("w_bit", _AWQ_BITS)) != _AWQ_BITS:
        raise _Unsupported(f"{config.get('bits')} bits")
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise _Unsupported(f"the version {config.get('version')}")
    return Quantization("AWQ", (_AWQ,))


def _gptq(config: Mapping[str, Any]) -> Quantization:
    checkpoint_format = config.get("checkpoint_format") or "gptq"
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise _Unsupported(f"the checkpoint_format {checkpoint_format}")
    group_size = int(config["group_size"])
    return Quantization(
        "GPTQ",
        (_GPTQ,),
        bits=int(config["bits"]),
        group_size=group_size if group_size > 0 else None,
        zero_point_offset=int(checkpoint_format == "gptq"),
        is_symmetric=bool(config.get("sym")),
    )


def _fp8(config: Mapping[str, Any]) -> Quantization:
    block = config.get("weight_block_size")
    return Quantization("FP8", (_SCALED,), block=None if block is None else (block[0], block[1]), activations="FP8")


def _modelopt(config: Mapping[str, Any]) -> Quantization:
    algorithm = config.get("quant_algo")
    if algorithm not in ("NVFP4", "FP8"):
        raise _Unsupported(f"the quant_algo {algorithm}")
    if algorithm == "FP8":
        return Quantization("FP8", (_SCALED,), activations="FP8")
    return Quantization("NVFP4", (_NVFP4,), activations="FP4")


def _mxfp4(_: Mapping[str, Any]) -> Quantization:
    return Quantization("MXFP4", (_MXFP4,))


def _bitsandbytes(config: Mapping[str, Any]) -> Quantization:
    if config.get("load_in_8bit"):
        return Quantization("bitsandbytes", (_LLM_INT8,), activations="8-bit int")
    return Quantization("bitsandbytes", (_NORMAL_FLOAT,))


def _gguf(_: Mapping[str, Any]) -> Quantization:
    """Return the quantization of a GGUF file that Headway has converted."""
    return Quantization("GGUF", (_GGUF, _GGUF_CODES, _GGUF_8))


_METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "gguf": _gguf,
}


def _expect(name: str, shape: tuple[int, ...], *expected: tuple[int, ...]) -> None:
    if shape not in expected:
        raise ValueError(f"{name} has the shape {list(shape)}; expected {' or '.join(str(list(e)) for e in expected)}")


def _matrix(name: str, tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise ValueError(f"{name} has the shape {list(tensor.shape)}; expected two dimensions")
    return tensor.shape[0], tensor.shape[1]


def _group_size(num_inputs: int, num_groups: int) -> int:
    if num_groups < 1 or num_inputs % num_groups:
        raise ValueError(f"{num_inputs} inputs cannot have {num_groups} groups of scales")
    return num_inputs // num_groups


def _words(num_values: int, bits: int) -> int:
    return -(-num_values * bits // WORD_BITS)


def _packed_layout(parts: Parts, quantization: Quantization) -> Layout:
    num_outputs, num_words = _matrix("weight_packed", parts[".weight_packed"])
    stored = parts[".weight_shape"].read_bytes()
    if len(stored) != 16:
        raise ValueError(f"weight_shape has {len(stored)} bytes; expected two numbers of 8")
    num_inputs = int.from_bytes(stored[8:], "little")
    _expect("weight_shape says", (int.from_bytes(stored[:8], "little"),), (num_outputs,))
    bits = next((bits for bits in (2, 4, 8) if _words(num_inputs, bits) == num_words), None)
    if bits is None:
        raise ValueError(f"weight_packed has {num_words} words a row for {num_inputs} inputs; expected 2, 4 or 8 bits")
    rows, num_groups = _matrix("weight_scale", parts[".weight_scale"])
    _expect("weight_scale", (rows, num_groups), (num_outputs, num_groups))
    zero_points = parts.get(".weight_zero_point")
    if zero_points is not None:
        _expect("weight_zero_point", zero_points.shape, (_words(num_outputs, bits), num_groups))
    elif quantization.needs_zero_points:
        raise ValueError("it lacks weight_zero_point, but the config says that weights are not symmetric")
    order = parts.get(".weight_g_idx")
    if order is not None:
        _expect("weight_g_idx", order.shape, (num_inputs,))
    group_size = _group_size(num_inputs, num_groups)
    return Layout(num_outputs, num_inputs, bits, 1, group_size, (num_outputs, num_inputs))


def _awq_layout(parts: Parts, _: Quantization) -> Layout:
    num_inputs, num_words = _matrix("qweight", parts[".qweight"])
    num_outputs = num_words * WORD_BITS // _AWQ_BITS
    num_groups, num_scales = _matrix("scales", parts[".scales"])
    _expect("scales", (num_groups, num_scales), (num_groups, num_outputs))
    _expect("qzeros", parts[".qzeros"].shape, (num_groups, num_words))
    group_size = _group_size(num_inputs, num_groups)
    return Layout(num_outputs, num_inputs, _AWQ_BITS, 1, group_size, (num_outputs, num_inputs))


def _gptq_layout(parts: Parts, quantization: Quantization) -> Layout:
    num_words, num_outputs = _matrix("qweight", parts[".qweight"])
    order = parts.get(".g_idx")
    assert quantization.bits is not None
    num_inputs = num_words * WORD_BITS // quantization.bits if order is None else order.shape[0]
    bits = next((bits for bits in (2, 3, 4, 8) if num_inputs * bits == num_words * WORD_BITS), None)
    if bits is None:
        raise ValueError(f"qweight has {num_words} words for {num_inputs} inputs; expected 2, 3, 4 or 8 bits")
    num_groups, num_scales = _matrix("scales", parts[".scales"])
    _expect("scales", (num_groups, num_scales), (num_groups, num_outputs))
    _expect("qzeros", parts[".qzeros"].shape, (num_groups, _words(num_outputs, bits)))
    group_size = quantization.group_size or num_inputs
    if -(-num_inputs // group_size) != num_groups:
        raise ValueError(f"{num_inputs} inputs in groups of {group_size} cannot have {num_groups} scales")
    return Layout(num_outputs, num_inputs, bits, 1, group_size, (num_outputs, num_inputs))


def _scaled_layout(parts: Parts, quantization: Quantization) -> Layout:
    num_outputs, num_inputs = _matrix("weight", parts[".weight"])
    scale = parts.get(".weight_scale") or parts.get(".weight_scale_inv")
    if scale is None:
        raise ValueError("it has neither weight_scale nor weight_scale_inv")
    shape = (num_outputs, num_inputs)
    zero_points = parts.get(".weight_zero_point")
    if zero_points is not None:
        _expect("weight_zero_point", zero_points.shape, scale.shape)
    if quantization.block is not None and len(scale.shape) == 2:
        outputs, inputs = quantization.block
        _expect("the scale", scale.shape, (-(-num_outputs // outputs), -(-num_inputs // inputs)))
        return Layout(*shape, 8, outputs, inputs, shape)
    if scale.num_values == 1:
        return Layout(*shape, 8, num_outputs, num_inputs, shape)
    _expect("the scale", scale.shape[:1], (num_outputs,))
    num_groups = 1 if len(scale.shape) == 1 else _matrix("the scale", scale)[1]
    return Layout(*shape, 8, 1, _group_size(num_inputs, num_groups), shape)


_GGUF_BITS = {".weight_nibbles": 4, ".weight_codes": 4, ".weight_numbers": 8}


def _gguf_layout(parts: Parts, _: Quantization) -> Layout:
    suffix = next(name for name in _GGUF_BITS if name in parts)
    bits = _GGUF_BITS[suffix]
    num_outputs, num_bytes = _matrix(suffix, parts[suffix])
    rows, num_groups = _matrix("weight_scale", parts[".weight_scale"])
    _expect("weight_scale", (rows, num_groups), (num_outputs, num_groups))
    minima = parts.get(".weight_minimum")
    if minima is not None:
        _expect("weight_minimum", minima.shape, (num_outputs, num_groups))
    shape = (num_outputs, num_bytes * 8 // bits)
    return Layout(*shape, bits, 1, _group_size(shape[1], num_groups), shape)


def _mxfp4_layout(parts: Parts, _: Quantization) -> Layout:
    *leading, num_groups, num_bytes = parts["_blocks"].shape
    _expect("blocks", (num_bytes,), (_MXFP4_GROUP // 2,))
    _expect("scales", parts["_scales"].shape, (*leading, num_groups))
    num_inputs, num_outputs = num_groups * _MXFP4_GROUP, math.prod(leading)
    shape = (*leading[:-1], num_inputs, leading[-1])
    return Layout(num_outputs, num_inputs, 4, 1, _MXFP4_GROUP, shape)


def _nvfp4_layout(parts: Parts, _: Quantization) -> Layout:
    numbers = ".weight_packed" if ".weight_packed" in parts else ".weight"
    num_outputs, num_bytes = _matrix(numbers, parts[numbers])
    shape = (num_outputs, num_bytes * 2)
    _expect("weight_scale", parts[".weight_scale"].shape, (num_outputs, shape[1] // _NVFP4_GROUP))
    if parts[".weight_scale"].dtype != "F8_E4M3":
        raise ValueError(f"weight_scale is in {parts['.weight_scale'].dtype}; expected F8_E4M3")
    factor = parts.get(".weight_global_scale") or parts[".weight_scale_2"]
    _expect("the scale of the whole weight", (factor.num_values,), (1,))
    return Layout(*shape, 4, 1, _group_size(shape[1], shape[1] // _NVFP4_GROUP), shape)


def _normal_float_layout(parts: Parts, _: Quantization) -> Layout:
    state = parts.get(_NF4_STATE) or parts.get(_FP4_STATE)
    if state is None:
        raise ValueError("it has no quant_state")
    described = json.loads(state.read_bytes())
    shape, block_size = tuple(described["shape"]), int(described["blocksize"])
    num_values, num_blocks = math.prod(shape), -(-math.prod(shape) // block_size)
    if parts[".weight"].num_values != -(-num_values // 2):
        raise ValueError(f"it has {parts['.weight'].num_values} bytes for the shape {list(shape)} in 4 bits")
    _expect("absmax", (parts[".weight.absmax"].num_values,), (num_blocks,))
    _expect("quant_map", (parts[".weight.quant_map"].num_values,), (16,))
    return Layout(num_blocks, block_size, 4, 1, block_size, shape)


def _llm_int8_layout(parts: Parts, _: Quantization) -> Layout:
    shape = _matrix("weight", parts[".weight"])
    _expect("SCB", (parts[".SCB"].num_values,), shape[:1])
    return Layout(*shape, 8, 1, shape[1], shape)


_OFFSETS = frozenset({".qzeros", ".weight_zero_point", ".weight_minimum"})
_ACTIVATIONS = (".input_scale", ".input_zero_point", ".output_scale", ".input_scale_ub", ".activation_scale")
_NF4_STATE = ".weight.quant_state.bitsandbytes__nf4"
_FP4_STATE = ".weight.quant_state.bitsandbytes__fp4"
_PACKED = Format(
    "packed integers", ".weight_packed", _packed_layout, (".weight_scale", ".weight_shape"),
    (".weight_zero_point", ".weight_g_idx"), _ACTIVATIONS,
)  # fmt: skip
_SCALED = Format(
    "numbers with scales", ".weight", _scaled_layout,
    optional=(".weight_scale", ".weight_scale_inv", ".weight_zero_point"), ignored=_ACTIVATIONS,
    dtypes=("I8", *_FLOAT8),
)  # fmt: skip
_AWQ = Format("AWQ", ".qweight", _awq_layout, (".scales", ".qzeros"))
_GPTQ = Format("GPTQ", ".qweight", _gptq_layout, (".scales", ".qzeros"), (".g_idx",))
_GGUF = Format("GGUF", ".weight_nibbles", _gguf_layout, (".weight_scale",), (".weight_minimum",), dtypes=("U8",))
_GGUF_8 = Format("GGUF", ".weight_numbers", _gguf_layout, (".weight_scale",), (".weight_minimum",), dtypes=("I8",))
_GGUF_CODES = Format("GGUF", ".weight_codes", _gguf_layout, (".weight_scale",), dtypes=("U8",))
_MXFP4 = Format("MXFP4", "_blocks", _mxfp4_layout, ("_scales",), dtypes=("U8",), dense="")
_NVFP4 = Format(
    "NVFP4", ".weight", _nvfp4_layout, (".weight_scale", ".weight_scale_2"), ignored=(".input_scale",), dtypes=("U8",)
)
_NVFP4_PACKED = Format(
    "NVFP4", ".weight_packed", _nvfp4_layout, (".weight_scale", ".weight_global_scale"),
    ignored=(".input_global_scale",), dtypes=("U8",),
)  # fmt: skip
_NORMAL_FLOAT = Format(
    "4-bit floats of bitsandbytes", ".weight", _normal_float_layout, (".weight.absmax", ".weight.quant_map"),
    (_NF4_STATE, _FP4_STATE, ".weight.nested_absmax", ".weight.nested_quant_map"), dtypes=("U8",),
)  # fmt: skip
_LLM_INT8 = Format(
    "8-bit integers of bitsandbytes", ".weight", _llm_int8_layout, (".SCB",), ignored=(".weight_format",),
    dtypes=("I8",),
)  # fmt: skip
_KEPT = (_PACKED, _SCALED, _AWQ, _GPTQ, _GGUF, _GGUF_CODES, _GGUF_8, _LLM_INT8)
"""Formats whose weights may keep their bits."""
