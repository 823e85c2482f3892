"""Readers of GGUF's blocks: each turns the rows of one type of weight into small numbers, scales and minima.

A value is `number * scale + minimum`. Most types of 4 bits and less become nibbles, whose number is the nibble, or the
nibble less 8 if there is no minimum; nibbles of IQ4_NL and IQ4_XS stand for `IQ4_VALUES`. All others become 8-bit
integers. The layouts are those of llama.cpp's `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from gguf import GGMLQuantizationType
from gguf.quants import Q4_K
from torch import Tensor

Parts = Mapping[str, Tensor]
"""Tensors of one weight by the suffixes of their names: nibbles or numbers, scales and perhaps minima."""


def _fields(stored: Tensor, bits: int) -> Tensor:
    """Return the fields of bytes [..., num] as [..., 8 / bits, num], the lowest bits first."""
    return torch.stack([(stored >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-2)


def _split(stored: Tensor, num_parts: int) -> Tensor:
    """Return bytes [..., num] as [..., num_parts, num / num_parts]."""
    return stored.reshape(*stored.shape[:-1], num_parts, -1)


def _floats(stored: Tensor) -> Tensor:
    """Return the number in 16 bits of each block, [outputs, blocks]."""
    return stored.contiguous().view(torch.float16).float().flatten(1)


def _nibbles(numbers: Tensor, scales: Tensor, minima: Tensor | None = None) -> Parts:
    """Return the parts of a weight of nibbles, [outputs, ...] in the order of inputs."""
    flat = numbers.flatten(1)
    return {".weight_nibbles": flat[:, ::2] | flat[:, 1::2] << 4} | _scaled(scales, minima)


def _numbers(numbers: Tensor, scales: Tensor, minima: Tensor | None = None) -> Parts:
    """Return the parts of a weight of 8-bit integers, [outputs, ...] in the order of inputs."""
    return {".weight_numbers": numbers.to(torch.int8).flatten(1)} | _scaled(scales, minima)


def _scaled(scales: Tensor, minima: Tensor | None) -> dict[str, Tensor]:
    parts = {".weight_scale": scales.flatten(1)}
    return parts if minima is None else parts | {".weight_minimum": minima.flatten(1)}


def _q4_0(blocks: Tensor) -> Parts:
    return _nibbles(_fields(blocks[..., 2:], 4), _floats(blocks[..., :2]))


def _q4_1(blocks: Tensor) -> Parts:
    return _nibbles(_fields(blocks[..., 4:], 4), _floats(blocks[..., :2]), _floats(blocks[..., 2:4]))


def _fifth_bits(stored: Tensor) -> Tensor:
    """Return the fifth bits of 32 numbers from 4 bytes."""
    return _fields(stored, 1).transpose(-1, -2).flatten(-2) << 4


def _q5_0(blocks: Tensor) -> Parts:
    numbers = _fields(blocks[..., 6:], 4).flatten(-2) | _fifth_bits(blocks[..., 2:6])
    return _numbers(numbers.to(torch.int8) - 16, _floats(blocks[..., :2]))


def _q5_1(blocks: Tensor) -> Parts:
    numbers = _fields(blocks[..., 8:], 4).flatten(-2) | _fifth_bits(blocks[..., 4:8])
    return _numbers(numbers, _floats(blocks[..., :2]), _floats(blocks[..., 2:4]))


def _q8_0(blocks: Tensor) -> Parts:
    return _numbers(blocks[..., 2:].contiguous().view(torch.int8), _floats(blocks[..., :2]))


def _iq4_nl(blocks: Tensor) -> Parts:
    return _codes(_fields(blocks[..., 2:], 4), _floats(blocks[..., :2]))


def _codes(numbers: Tensor, scales: Tensor) -> Parts:
    """Return the parts of a weight of nibbles that stand for `IQ4_VALUES`."""
    parts = _nibbles(numbers, scales)
    return {".weight_codes": parts[".weight_nibbles"], ".weight_scale": parts[".weight_scale"]}


def _iq4_xs(blocks: Tensor) -> Parts:
    low, high = (_fields(blocks[..., part], bits) for part, bits in ((slice(4, 8), 4), (slice(2, 4), 2)))
    scales = (low.transpose(-1, -2).flatten(-2) | high.transpose(-1, -2).flatten(-2) << 4).float() - 32
    nibbles = _fields(_split(blocks[..., 8:], 8), 4)
    return _codes(nibbles, _floats(blocks[..., :2])[..., None] * scales)


def _q2_k(blocks: Tensor) -> Parts:
    scales, minima = _fields(blocks[..., :16], 4).float().unbind(-2)
    numbers = _fields(_split(blocks[..., 16:80], 2), 2)
    factors = [_floats(blocks[..., part])[..., None] for part in (slice(80, 82), slice(82, 84))]
    return _nibbles(numbers, factors[0] * scales, -factors[1] * minima)


def _q3_k(blocks: Tensor) -> Parts:
    low, high = _fields(blocks[..., 96:104], 4).flatten(-2), _fields(blocks[..., 104:108], 2).flatten(-2)
    scales = (low | high << 4).float() - 32
    numbers = _fields(_split(blocks[..., 32:96], 2), 2).flatten(-3)
    numbers = numbers | _fields(blocks[..., :32], 1).flatten(-2) << 2
    return _nibbles(numbers + 4, _floats(blocks[..., 108:])[..., None] * scales)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima [outputs, blocks, 8] of Q4_K and Q5_K, whose blocks begin with them."""
    stored = Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12).numpy())
    scales, minima = (torch.from_numpy(part).float().view(*blocks.shape[:2], 8) for part in stored)
    return _floats(blocks[..., :2])[..., None] * scales, -_floats(blocks[..., 2:4])[..., None] * minima


def _q4_k(blocks: Tensor) -> Parts:
    return _nibbles(_fields(_split(blocks[..., 16:], 4), 4), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> Parts:
    low, high = _fields(_split(blocks[..., 48:], 4), 4), _fields(blocks[..., 16:48], 1)
    return _numbers(low.flatten(-3) | high.flatten(-2) << 4, *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Parts:
    low = _fields(_split(blocks[..., :128], 2), 4).flatten(-3)
    high = _fields(_split(blocks[..., 128:192], 2), 2).flatten(-3)
    scales = _floats(blocks[..., 208:])[..., None] * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return _numbers((low | high << 4).to(torch.int8) - 32, scales)


_READERS: dict[GGMLQuantizationType, tuple[int, Callable[[Tensor], Parts]]] = {
    GGMLQuantizationType.Q2_K: (84, _q2_k),
    GGMLQuantizationType.Q3_K: (110, _q3_k),
    GGMLQuantizationType.Q4_0: (18, _q4_0),
    GGMLQuantizationType.Q4_1: (20, _q4_1),
    GGMLQuantizationType.Q4_K: (144, _q4_k),
    GGMLQuantizationType.Q5_0: (22, _q5_0),
    GGMLQuantizationType.Q5_1: (24, _q5_1),
    GGMLQuantizationType.Q5_K: (176, _q5_k),
    GGMLQuantizationType.Q6_K: (210, _q6_k),
    GGMLQuantizationType.Q8_0: (34, _q8_0),
    GGMLQuantizationType.IQ4_NL: (18, _iq4_nl),
    GGMLQuantizationType.IQ4_XS: (136, _iq4_xs),
}
"""Bytes of a block, and the reader of blocks [outputs, blocks, bytes]."""

KEPT_TYPES = frozenset(_READERS)


def read_blocks(rows: Tensor, kind: GGMLQuantizationType) -> Parts:
    """Return the parts of a weight whose `rows` [outputs, bytes] uint8 are blocks of a type of `KEPT_TYPES`."""
    block_bytes, reader = _READERS[kind]
    return reader(rows.view(len(rows), -1, block_bytes))
