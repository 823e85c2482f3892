"""Readers of quantized weights: each turns the tensors of one format into a `QuantizedLinear`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from replicas.errors import ModelLoadError
from replicas.model.checkpoint.formats import Layout, Quantization, QuantizedWeight
from replicas.model.checkpoint.quantized_linear import FP4_VALUES, IQ4_VALUES, QuantizedLinear

Tensors = Mapping[str, Tensor]
"""Tensors of one quantized weight, by the suffix of their names."""

_WORD_BITS = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of each of eight adjacent outputs."""
_MXFP4_BIAS = 127
_NESTED_BLOCK = 256


def read_quantized(weight: QuantizedWeight, tensors: Tensors, quantization: Quantization) -> QuantizedLinear:
    """Return a quantized weight, whose tensors have the shapes that its layout was made from.

    Raises:
        ModelLoadError: a value contradicts the shapes.
    """
    return _READERS[weight.format.name](tensors, weight.layout, quantization)


def shape_dense(weight: QuantizedWeight, dense: Tensor) -> Tensor:
    """Return the dense weight in the shape and order in which the model has it."""
    shape = weight.layout.shape
    if weight.format.name == "MXFP4":
        return dense.view(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2).contiguous()
    return dense.flatten()[: torch.Size(shape).numel()].view(shape)


def unpack_bits(words: Tensor, bits: int, num_values: int) -> Tensor:
    """Return the values [rows, num_values] uint8 in rows of 32-bit words, whose lowest bits come first."""
    if bits == 3:
        return _unpack_across_words(words, bits, num_values)
    stored: Tensor = words.contiguous().view(torch.uint8)
    if bits < 8:
        shifts = range(0, 8, bits)
        stored = torch.stack([(stored >> shift) & (2**bits - 1) for shift in shifts], dim=-1).flatten(1)
    return stored[:, :num_values]


def _unpack_across_words(words: Tensor, bits: int, num_values: int) -> Tensor:
    """Unpack values that may begin in one word and end in the next."""
    unsigned = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    first_bits = torch.arange(num_values) * bits
    index, shift = first_bits // _WORD_BITS, first_bits % _WORD_BITS
    pairs = unsigned[:, index] | (unsigned[:, index + 1] << _WORD_BITS)
    values: Tensor = (pairs >> shift) & (2**bits - 1)
    return values.to(torch.uint8)


def _read_packed(tensors: Tensors, layout: Layout, _: Quantization) -> QuantizedLinear:
    numbers = unpack_bits(tensors[".weight_packed"], layout.bits, layout.num_inputs)
    scales, zero_points = tensors[".weight_scale"], tensors.get(".weight_zero_point")
    if zero_points is None:
        zero_points = torch.full(scales.shape, 2 ** (layout.bits - 1), dtype=torch.uint8)
    else:
        zero_points = unpack_bits(zero_points.t(), layout.bits, layout.num_outputs).t()
    order = tensors.get(".weight_g_idx")
    if order is not None and bool((order < 0).all()):  # The library writes -1 for "no order".
        order = None
    return _grouped(numbers, scales, zero_points, order, layout)


def _read_awq(tensors: Tensors, layout: Layout, _: Quantization) -> QuantizedLinear:
    numbers, zero_points = (_awq_numbers(tensors[name], layout.num_outputs) for name in (".qweight", ".qzeros"))
    return _grouped(numbers.t(), tensors[".scales"].t(), zero_points.t(), None, layout)


def _awq_numbers(words: Tensor, num_outputs: int) -> Tensor:
    stored = unpack_bits(words, 4, num_outputs).view(len(words), -1, len(_AWQ_ORDER))
    return stored[:, :, list(_AWQ_ORDER)].flatten(1)


def _read_gptq(tensors: Tensors, layout: Layout, quantization: Quantization) -> QuantizedLinear:
    numbers = unpack_bits(tensors[".qweight"].t(), layout.bits, layout.num_inputs)
    zero_points = unpack_bits(tensors[".qzeros"], layout.bits, layout.num_outputs)
    zero_points = (zero_points + quantization.zero_point_offset) & (2**layout.bits - 1)
    return _grouped(numbers, tensors[".scales"].t(), zero_points.t(), tensors.get(".g_idx"), layout)


def _grouped(
    numbers: Tensor, scales: Tensor, zero_points: Tensor, order: Tensor | None, layout: Layout
) -> QuantizedLinear:
    """Return integers with scales by group; an order that is the plain one is left out."""
    if order is not None:
        if not 0 <= int(order.min()) <= int(order.max()) < scales.shape[1]:
            raise ModelLoadError(f"g_idx names groups {order.min()} to {order.max()}; there are {scales.shape[1]}")
        if torch.equal(order.long(), torch.arange(layout.num_inputs) // layout.inputs_per_scale):
            order = None
    return QuantizedLinear(
        numbers, scales, zero_points, layout.bits, inputs_per_scale=layout.inputs_per_scale, order=order
    )


def _read_scaled(tensors: Tensors, layout: Layout, _: Quantization) -> QuantizedLinear:
    scales = tensors.get(".weight_scale", tensors.get(".weight_scale_inv"))
    assert scales is not None
    rows = -(-layout.num_outputs // layout.outputs_per_scale)
    zero_points = tensors.get(".weight_zero_point")
    return QuantizedLinear(
        tensors[".weight"],
        scales.reshape(rows, -1),
        None if zero_points is None else zero_points.reshape(rows, -1),
        layout.bits,
        layout.outputs_per_scale,
        layout.inputs_per_scale,
    )


def _nibbles(pairs: Tensor) -> Tensor:
    """Return the nibbles of each row of bytes, the low one of each first."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)


def _read_mxfp4(tensors: Tensors, layout: Layout, _: Quantization) -> QuantizedLinear:
    pairs = tensors["_blocks"].reshape(layout.num_outputs, -1)
    numbers = _nibbles(pairs)
    exponents = tensors["_scales"].reshape(layout.num_outputs, -1).int() - _MXFP4_BIAS
    table = torch.tensor(FP4_VALUES)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents).to(torch.bfloat16)  # exact: powers of two
    return QuantizedLinear(numbers, scales, None, 4, inputs_per_scale=layout.inputs_per_scale, table=table)


def _read_nvfp4(tensors: Tensors, layout: Layout, _: Quantization) -> QuantizedLinear:
    """Read a weight with a scale for each group and one for all, by which compressed-tensors divides."""
    scales = tensors[".weight_scale"].float()
    if ".weight_global_scale" in tensors:
        pairs, scales = tensors[".weight_packed"], scales / tensors[".weight_global_scale"].float()
    else:
        pairs, scales = tensors[".weight"], scales * tensors[".weight_scale_2"].float()
    table = torch.tensor(FP4_VALUES)
    return QuantizedLinear(_nibbles(pairs), scales, None, 4, inputs_per_scale=layout.inputs_per_scale, table=table)


def _read_normal_float(tensors: Tensors, layout: Layout, _: Quantization) -> QuantizedLinear:
    pairs = tensors[".weight"].flatten()
    numbers = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()
    missing = layout.num_outputs * layout.num_inputs - len(numbers)
    numbers = torch.nn.functional.pad(numbers, (0, missing))[: layout.num_outputs * layout.num_inputs]
    return QuantizedLinear(
        numbers.view(layout.num_outputs, layout.num_inputs),
        _block_scales(tensors)[:, None],
        None,
        4,
        inputs_per_scale=layout.inputs_per_scale,
        table=tensors[".weight.quant_map"].flatten().float(),
    )


def _block_scales(tensors: Tensors) -> Tensor:
    """Return the scales of blocks [num_blocks]; they may be quantized themselves, to 8 bits of a table."""
    scales = tensors[".weight.absmax"].flatten()
    if scales.is_floating_point():
        return scales.float()
    state = next(value for name, value in tensors.items() if ".quant_state." in name)
    described = json.loads(bytes(state.tolist()))
    table, nested = tensors[".weight.nested_quant_map"].flatten(), tensors[".weight.nested_absmax"].flatten()
    block = int(described.get("nested_blocksize", _NESTED_BLOCK))
    per_scale = nested.float().repeat_interleave(block)[: len(scales)]
    return table.float()[scales.int()] * per_scale + float(described["nested_offset"])


def _read_llm_int8(tensors: Tensors, layout: Layout, _: Quantization) -> QuantizedLinear:
    scales = tensors[".SCB"].float().reshape(-1, 1) / 127
    return QuantizedLinear(tensors[".weight"], scales, None, 8, inputs_per_scale=layout.num_inputs)


def from_gguf(tensors: Tensors) -> QuantizedLinear:
    """Return a weight of a GGUF file. Its values are `number * scale + minimum`.

    A nibble is the number, or without a minimum the number plus 8, or a number of `IQ4_VALUES`.
    """
    if ".weight_codes" in tensors:
        codes, scales = _nibbles(tensors[".weight_codes"]), tensors[".weight_scale"]
        table = torch.tensor(IQ4_VALUES, dtype=torch.float32)
        return QuantizedLinear(codes, scales, None, 4, inputs_per_scale=codes.shape[1] // scales.shape[1], table=table)
    scales, minima = tensors[".weight_scale"], tensors.get(".weight_minimum")
    is_int4 = ".weight_nibbles" in tensors
    numbers = _nibbles(tensors[".weight_nibbles"]) if is_int4 else tensors[".weight_numbers"]
    bits, inputs_per_scale = 4 if is_int4 else 8, numbers.shape[1] // scales.shape[1]
    if minima is None:
        middle = torch.full(scales.shape, 8 if is_int4 else 0, dtype=torch.uint8)
        return QuantizedLinear(numbers, scales, middle, bits, inputs_per_scale=inputs_per_scale)
    # A group whose values are all the same may have no scale: then its minimum is one, and 1 times it the value.
    is_flat = scales == 0
    zero_points = torch.where(is_flat, -1.0, -minima / scales)
    numbers = numbers.masked_fill(is_flat.repeat_interleave(inputs_per_scale, dim=1), 0)
    return QuantizedLinear(
        numbers, torch.where(is_flat, minima, scales), zero_points, bits, inputs_per_scale=inputs_per_scale
    )


def _read_gguf(tensors: Tensors, _layout: Layout, _: Quantization) -> QuantizedLinear:
    return from_gguf(tensors)


_READERS: dict[str, Callable[[Tensors, Layout, Quantization], QuantizedLinear]] = {
    "packed integers": _read_packed,
    "numbers with scales": _read_scaled,
    "AWQ": _read_awq,
    "GPTQ": _read_gptq,
    "GGUF": _read_gguf,
    "MXFP4": _read_mxfp4,
    "NVFP4": _read_nvfp4,
    "4-bit floats of bitsandbytes": _read_normal_float,
    "8-bit integers of bitsandbytes": _read_llm_int8,
}
