"""Attention backend over Headway's Triton kernel for whole texts, whose tokens see those before and behind them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from torch import Tensor

from replicas.model.attention.interface import AttentionCall, with_dense_heads
from replicas.model.attention.kv_cache import KVCache
from replicas.model.attention.plan import place
from replicas.model.attention.triton import (
    READING_SHARED_MEMORY,
    LayerShape,
    TileShape,
    alignment,
    choose_tile,
    outer_strides,
)
from replicas.model.attention.two_sided_kernels import TILE_FIELDS, two_sided_kernel
from replicas.model.batch.inputs import BatchInputs


@cache
def choose_two_sided_tile(shape: LayerShape, capability: int) -> TileShape:
    """Return the tile for `shape` on a device of `capability`, such as 90 for 9.0.

    Unlike `choose_tile`, it needs no stage for block ids: the keys that are copied ahead are two tiles.
    """
    tile, width = choose_tile(shape, False, capability), max(shape.key_width, shape.value_width)
    if shape.itemsize > 2:
        return replace(tile, num_stages=3) if width <= 128 else replace(tile, num_warps=8, num_stages=2)
    reads_shared_memory = capability in READING_SHARED_MEMORY
    if width > 128:
        return replace(tile, keys=tile.keys if reads_shared_memory else 16, num_warps=8, num_stages=3)
    # On Blackwell 8 warps would lack registers for heads of 64.
    has_few_warps = reads_shared_memory and capability >= 100 and width <= 64
    return replace(tile, num_warps=4 if has_few_warps else tile.num_warps, num_stages=3)


class TritonTwoSided:
    """`AttentionBackend` of models whose texts are whole in one step, for a device of `capability`."""

    kernels = "Triton kernel, two-sided"

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def __call__(self, cache: KVCache, inputs: BatchInputs) -> TritonTwoSidedAttention:
        """Return the attention of the texts of `inputs`. `cache` has no layers."""
        return TritonTwoSidedAttention(inputs, self._capability)


class TritonTwoSidedAttention:
    """Attention of one forward pass over whole texts."""

    def __init__(self, inputs: BatchInputs, capability: int) -> None:
        self._inputs = inputs
        self._capability = capability
        self._tiles: dict[int, Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the call's output [num_tokens, num_query_heads, value_size]."""
        num_tokens, num_heads, key_size = call.query.shape
        _, num_kv_heads, value_size = call.value.shape
        shape = LayerShape(num_kv_heads, num_heads // num_kv_heads, key_size, value_size, call.query.itemsize)
        tile = choose_two_sided_tile(shape, self._capability)
        tiles = self._tiles_of(tile.tokens)
        query, key, value = (with_dense_heads(part) for part in (call.query, call.key, call.value))
        strides = (*outer_strides(query), *outer_strides(key), *outer_strides(value))
        output = call.query.new_empty(num_tokens, num_heads, value_size)
        two_sided_kernel[(num_kv_heads * len(tiles),)](
            query,
            key,
            value,
            output,
            tiles,
            call.scoring.scale,
            call.window or 0,
            *strides,
            NUM_KV_HEADS=num_kv_heads,
            GROUP_SIZE=shape.group_size,
            KEY_SIZE=key_size,
            VALUE_SIZE=value_size,
            KEY_WIDTH=shape.key_width,
            VALUE_WIDTH=shape.value_width,
            TILE_ROWS=tile.rows,
            TILE_KEYS=tile.keys,
            HAS_WINDOW=call.window is not None,
            STRIDE_ALIGNMENT=alignment(strides),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return output

    def _tiles_of(self, tile_tokens: int) -> Tensor:
        """Return the tiles of `tile_tokens` tokens, [num_tiles, 4] int32, which the first layer of a shape makes."""
        if tile_tokens not in self._tiles:
            fields = [
                number
                for chunk in self._inputs.chunks
                for first in range(chunk.row, chunk.row + chunk.num_tokens, tile_tokens)
                for number in (
                    first,
                    min(tile_tokens, chunk.row + chunk.num_tokens - first),
                    chunk.row,
                    chunk.row + chunk.num_tokens,
                )
            ]
            self._tiles[tile_tokens] = place(fields, len(fields) // TILE_FIELDS, self._inputs.slots.device)
        return self._tiles[tile_tokens]
