"""Shapes of layers and tiles, for which the Triton kernels are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton

from replicas.model.attention.interface import AttentionCall
from replicas.model.attention.kv_cache import LayerCache

# Smallest number of rows and columns that the matrix units take.
_MIN_WIDTH = 16
# Bytes of the keys of a tile.
_KEY_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of a layer's attention. The kernels are compiled for it, and for the layer's kind of scores."""

    num_kv_heads: int
    group_size: int
    """Number of query heads that share a KV head."""
    key_size: int
    value_size: int
    itemsize: int
    """Size of a number in the cache, bytes."""

    @property
    def key_width(self) -> int:
        """Width of a tile of keys: the key size, rounded up to a power of two."""
        return max(_MIN_WIDTH, int(triton.next_power_of_2(self.key_size)))

    @property
    def value_width(self) -> int:
        """Width of a tile of values: the value size, rounded up to a power of two."""
        return max(_MIN_WIDTH, int(triton.next_power_of_2(self.value_size)))


@dataclass(frozen=True, slots=True)
class TileShape:
    """Size of a program's tile, and its launch parameters: warps and pipeline stages."""

    tokens: int
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def layer_shape(call: AttentionCall, layer: LayerCache) -> LayerShape:
    """Return the layer shape of `call`."""
    _, num_heads, key_size = call.query.shape
    _, num_kv_heads, value_size = call.value.shape
    return LayerShape(num_kv_heads, num_heads // num_kv_heads, key_size, value_size, layer.keys.itemsize)


@cache
def choose_tile(shape: LayerShape, is_decode: bool) -> TileShape:
    """Return the tile for `shape`. Its pipeline stages fit the shared memory of every device since 2020."""
    width = max(shape.key_width, shape.value_width)
    keys = min(64, max(_MIN_WIDTH, _KEY_BYTES // (width * shape.itemsize)))
    group_rows = int(triton.next_power_of_2(shape.group_size))
    if is_decode:
        # A block id is read before the keys of the block, so two tiles of keys in flight need five stages.
        return TileShape(1, max(_MIN_WIDTH, group_rows), keys, num_warps=4, num_stages=5)
    if shape.itemsize > 2:
        # Exact products are unrolled and do not use the matrix units. Larger tiles would not fit the registers.
        rows = max(32, group_rows)
        return TileShape(rows // shape.group_size, rows, min(32, keys), num_warps=4, num_stages=2)
    is_narrow = width <= 128
    rows = max(128 if is_narrow else 64, group_rows)
    return TileShape(rows // shape.group_size, rows, keys, num_warps=8 if is_narrow else 4, num_stages=2)
