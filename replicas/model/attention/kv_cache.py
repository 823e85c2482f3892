"""The paged KV cache: blocks of KV slots for each layer.

In this folder and in `batch`, a slot is the place of one token's key and value in the cache, as in vLLM's slot mapping.
Elsewhere it is the place of a sequence in the running batch.

Keys and values in 8 bits have one scale for each token and KV head. A token's numbers therefore depend on the token
alone. With one scale for a block, they would depend on the tokens that come into the block later, and on the chunks in
which they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.model.attention.state_cache import StateCache
from replicas.model.hardware.huge_pages import huge_zeros

_LEAST_MAGNITUDE = 1e-30
"""A head without a larger number becomes zeros: the factor of a smaller one would be infinite."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Shape of one layer's attention and KV cache."""

    index: int
    num_query_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None
    softcap: float | None
    has_sinks: bool
    kv_source: int | None = None
    """Index of the layer whose keys and values this one uses; None: it has its own."""
    has_values_in_keys: bool = False
    """True if a value is the first `value_size` numbers of its key, as in latent attention: only keys are stored."""

    @property
    def num_numbers(self) -> int:
        """Numbers of one token in the cache."""
        return self.num_kv_heads * (self.key_size + (0 if self.has_values_in_keys else self.value_size))

    @property
    def num_scales(self) -> int:
        """Scales of one token in a cache in 8 bits."""
        return self.num_kv_heads * (1 if self.has_values_in_keys else 2)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one window. A sequence has a block table for them."""

    layers: tuple[AttentionLayer, ...]
    window: int | None
    """Most tokens that a token sees in any of the layers; None: all before it."""
    layers_per_column: int = 1
    """Layers in one column of a block. Block i is number i * layers_per_column in the tensors of each layer."""
    num_columns: int = 1


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer. Slot s is position s % block_size of block s // block_size.

    The methods are plain torch: they define the numbers in the cache, and the kernels store and read the same.
    """

    keys: Tensor  # [num_blocks + 1, block_size, num_kv_heads, key_size]
    values: Tensor  # [num_blocks + 1, block_size, num_kv_heads, value_size]
    key_scales: Tensor | None = None
    """[num_blocks + 1, num_kv_heads, block_size] float32: factors of numbers in 8 bits; None: the numbers have none."""
    value_scales: Tensor | None = None
    has_values_in_keys: bool = False
    """True if values and their scales are views of the keys and theirs."""

    def divided(self, layer: AttentionLayer, number: int, index: int) -> LayerCache:
        """Return a view for `layer`, of which `number` layers share this cache.

        The `index`-th has the block after those of the ones before it: entry `number` * i of its tensors is block i.
        """

        def view(numbers: Tensor, *shape: int) -> Tensor:
            return numbers.view(numbers.shape[0] * number, *shape)[index:]

        block_size, num_heads = self.keys.shape[1], layer.num_kv_heads
        keys = view(self.keys, block_size, num_heads, layer.key_size)
        key_scales, value_scales = (
            None if scales is None else view(scales, num_heads, block_size)
            for scales in (self.key_scales, self.value_scales)
        )
        if self.has_values_in_keys:
            return LayerCache(keys, keys[..., : layer.value_size], key_scales, key_scales, has_values_in_keys=True)
        values = view(self.values, block_size, num_heads, layer.value_size)
        return LayerCache(keys, values, key_scales, value_scales)

    @property
    def parts(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """Keys and, unless they are in the keys, values, each with its scales."""
        keys = (self.keys, self.key_scales)
        return (keys,) if self.has_values_in_keys else (keys, (self.values, self.value_scales))

    @property
    def is_quantized(self) -> bool:
        """True if keys and values have 8 bits and scales."""
        return self.key_scales is not None

    def clear(self, blocks: Tensor) -> None:
        """Fill `blocks` [num_blocks] int64 with zeros."""
        for numbers, scales in self.parts:
            (numbers if scales is None else scales).index_fill_(0, blocks, 0.0)

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [num_tokens, num_kv_heads, size] in `slots` [num_tokens] int64."""
        for (numbers, scales), written in zip(self.parts, (key, value), strict=False):
            rows = _movable(numbers).view(-1, *numbers.shape[2:])
            if scales is None:
                rows.index_copy_(0, slots, written)
                continue
            quantized, row_scales = quantize(written, numbers.dtype)
            rows.index_copy_(0, slots, _movable(quantized))
            block_size = numbers.shape[1]
            scales[slots // block_size, :, slots % block_size] = row_scales

    def read(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of `blocks` [num_blocks] int64, widened from 8 bits to `dtype`.

        Each is [num_blocks, block_size, num_kv_heads, size].
        """
        keys, *values = (_read(numbers, scales, blocks, dtype) for numbers, scales in self.parts)
        return keys, values[0] if values else keys[..., : self.values.shape[3]]


def quantize(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round [..., size] to int8 or float8_e4m3fn; return the numbers, and their scales [...] float32.

    The largest magnitude of a head becomes the largest number of the type. If a number of the head is not finite, the
    scale is not either, and the numbers are zeros: `LayerCache.clear` leaves them, and the block's next owner would
    read a NaN.
    """
    largest_number = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    heads = heads.float()
    largest = heads.abs().amax(-1)
    # A number divided by a tensor would be a product with the reciprocal, which is rounded twice.
    factor = torch.full_like(largest, largest_number) / largest
    factor = torch.where(largest > _LEAST_MAGNITUDE, factor, 0.0)
    numbers = torch.where(factor[..., None] > 0, heads * factor[..., None], 0.0)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), largest / largest_number


def _read(numbers: Tensor, scales: Tensor | None, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    stored = _movable(numbers).index_select(0, blocks).view(numbers.dtype)
    if scales is None:
        return stored
    return (stored.float() * scales.index_select(0, blocks).transpose(1, 2)[..., None]).to(dtype)


def _movable(numbers: Tensor) -> Tensor:
    """Return a view that torch can index: it cannot index float8 everywhere."""
    return numbers.view(torch.int8) if is_quantized(numbers.dtype) else numbers


class KVCache:
    """KV blocks of all layers of one model, in `dtype`; with 8 bits, int8 or float8_e4m3fn, they have scales.

    Block 0 is scratch, for warm-up, measurements and padding. Sequences own blocks 1..num_blocks. A layer that uses the
    keys and values of another one has no cache of its own: it stores the same numbers in the same slots once more.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states: StateCache | None = None
        """State slots beside the blocks; None: the model has no recurrent state."""
        self.groups: tuple[LayerGroup, ...] = (LayerGroup(tuple(layers), None),)
        """Groups of layers. Each has block tables of its own."""
        self.dtype = dtype
        self.is_quantized = is_quantized(dtype)
        """True if keys and values have 8 bits and scales."""

        def part(layer: AttentionLayer, size: int) -> tuple[Tensor, Tensor | None]:
            numbers = _zeros((num_blocks + 1, block_size, layer.num_kv_heads, size), dtype, device)
            scales_shape = (num_blocks + 1, layer.num_kv_heads, block_size)
            return numbers, _zeros(scales_shape, torch.float32, device) if self.is_quantized else None

        def layer_cache(layer: AttentionLayer) -> LayerCache:
            keys, key_scales = part(layer, layer.key_size)
            if layer.has_values_in_keys:
                return LayerCache(keys, keys[..., : layer.value_size], key_scales, key_scales, has_values_in_keys=True)
            values, value_scales = part(layer, layer.value_size)
            return LayerCache(keys, values, key_scales, value_scales)

        owners = {layer.index: layer_cache(layer) for layer in with_cache(layers)}
        self._layers = _with_sharing(owners, layers)

    def shared_by(self, groups: Sequence[LayerGroup]) -> KVCache:
        """Return the cache of `groups` that share the blocks of this one. Its layers are the columns of a block."""
        cache = copy(self)
        cache.groups = tuple(groups)
        cache._layers = {}
        for group in groups:
            number = group.layers_per_column
            owners = {
                layer.index: self[place // number].divided(layer, number, place % number)
                for place, layer in enumerate(with_cache(group.layers))
            }
            cache._layers |= _with_sharing(owners, group.layers)
        return cache

    def __getitem__(self, layer: int) -> LayerCache:
        return self._layers[layer]


def _with_sharing(owners: dict[int, LayerCache], layers: Iterable[AttentionLayer]) -> dict[int, LayerCache]:
    """Return the cache of each layer, with those that use the keys and values of another one."""
    return {layer.index: owners[layer.index if layer.kv_source is None else layer.kv_source] for layer in layers}


def is_quantized(dtype: torch.dtype) -> bool:
    """Return True if keys and values in `dtype` have 8 bits and scales."""
    return dtype.itemsize == 1


def with_cache(layers: Iterable[AttentionLayer]) -> list[AttentionLayer]:
    """Return the layers that have keys and values of their own."""
    return [layer for layer in layers if layer.kv_source is None]


def bytes_per_block(layers: Iterable[AttentionLayer], block_size: int, dtype: torch.dtype) -> int:
    """Return the size of one block over all layers, in bytes."""
    return block_size * sum(bytes_per_token(layer, dtype) for layer in with_cache(layers))


def bytes_per_token(layer: AttentionLayer, dtype: torch.dtype) -> int:
    """Return the size of one token in one layer, in bytes, with its scales."""
    scale_bytes = torch.float32.itemsize if is_quantized(dtype) else 0
    return layer.num_numbers * dtype.itemsize + layer.num_scales * scale_bytes


def num_tensors(layers: Sequence[AttentionLayer], dtype: torch.dtype) -> int:
    """Return the number of tensors of a cache."""
    num_parts = sum(1 if layer.has_values_in_keys else 2 for layer in with_cache(layers))
    return num_parts * (2 if is_quantized(dtype) else 1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return huge_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
