"""Sizes that Triton's kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import triton

from replicas.model.attention import AttentionCall
from replicas.model.kv_cache import LayerCache

# Operands of the matrix units have at least so many rows and columns.
_MIN_WIDTH = 16
# Keys of a tile, together.
_KEY_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What kernels are compiled for, besides the sort of scores."""

    num_kv_heads: int
    group_size: int
    """Query heads that share a KV head."""
    key_size: int
    value_size: int
    itemsize: int
    """Bytes of a number in the cache."""

    @property
    def key_width(self) -> int:
        """The key size as tiles have it: a power of two."""
        return max(_MIN_WIDTH, int(triton.next_power_of_2(self.key_size)))

    @property
    def value_width(self) -> int:
        """The value size as tiles have it: a power of two."""
        return max(_MIN_WIDTH, int(triton.next_power_of_2(self.value_size)))


@dataclass(frozen=True, slots=True)
class TileShape:
    """How large a program's tile is, and what it takes to compute it."""

    tokens: int
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def layer_shape(call: AttentionCall, layer: LayerCache) -> LayerShape:
    """The shape that the kernels are compiled for to answer `call`."""
    _, num_heads, key_size = call.query.shape
    _, num_kv_heads, value_size = call.value.shape
    return LayerShape(num_kv_heads, num_heads // num_kv_heads, key_size, value_size, layer.keys.itemsize)


@cache
def choose_tile(shape: LayerShape, is_decode: bool) -> TileShape:
    """Tiles of so many keys that what is under way at once fits the shared memory of every device since 2020."""
    width = max(shape.key_width, shape.value_width)
    keys = min(64, max(_MIN_WIDTH, _KEY_BYTES // (width * shape.itemsize)))
    group_rows = int(triton.next_power_of_2(shape.group_size))
    if is_decode:
        # A block's number is read before the keys in it, so that two tiles of keys under way take five stages.
        return TileShape(1, max(_MIN_WIDTH, group_rows), keys, num_warps=4, num_stages=5)
    if shape.itemsize > 2:
        # Exact products are unrolled instead of left to the matrix units; those of larger tiles overflow the registers.
        rows = max(32, group_rows)
        return TileShape(rows // shape.group_size, rows, min(32, keys), num_warps=4, num_stages=2)
    is_narrow = width <= 128
    rows = max(128 if is_narrow else 64, group_rows)
    return TileShape(rows // shape.group_size, rows, keys, num_warps=8 if is_narrow else 4, num_stages=2)
