"""The paged KV cache: blocks of token slots for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.model.hardware.huge_pages import huge_zeros


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


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer. Slot s is position s % block_size of block s // block_size."""

    keys: Tensor  # [num_blocks + 1, block_size, num_kv_heads, key_size]
    values: Tensor  # [num_blocks + 1, block_size, num_kv_heads, value_size]

    def clear(self, blocks: Tensor) -> None:
        """Fill `blocks` [num_blocks] int64 with zeros."""
        self.keys.index_fill_(0, blocks, 0.0)
        self.values.index_fill_(0, blocks, 0.0)

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [num_tokens, num_kv_heads, size] in `slots` [num_tokens] int64."""
        self.keys.view(-1, *self.keys.shape[2:]).index_copy_(0, slots, key)
        self.values.view(-1, *self.values.shape[2:]).index_copy_(0, slots, value)


class KVCache:
    """KV blocks of all layers of one model.

    Block 0 is scratch, for warm-up, measurements and padding. Sequences own blocks 1..num_blocks.
    """

    def __init__(
        self,
        layers: Iterable[AttentionLayer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers = {
            layer.index: LayerCache(
                _zeros((num_blocks + 1, block_size, layer.num_kv_heads, layer.key_size), dtype, device),
                _zeros((num_blocks + 1, block_size, layer.num_kv_heads, layer.value_size), dtype, device),
            )
            for layer in layers
        }

    def __getitem__(self, layer: int) -> LayerCache:
        return self._layers[layer]


def bytes_per_block(layers: Iterable[AttentionLayer], block_size: int, dtype: torch.dtype) -> int:
    """Return the size of one block over all layers, in bytes."""
    sizes = sum(layer.num_kv_heads * (layer.key_size + layer.value_size) for layer in layers)
    return block_size * sizes * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return huge_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
