"""Triton kernel that stores keys and values in the paged cache; token and head strides are arbitrary."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replicas.model.attention.interface import AttentionCall, with_dense_heads
from replicas.model.attention.kv_cache import LayerCache
from replicas.model.attention.triton_shapes import LayerShape

# Numbers that one program copies.
_PROGRAM_NUMBERS = 4096


def write_keys_and_values(layer: LayerCache, shape: LayerShape, slots: Tensor, call: AttentionCall) -> None:
    """Store the key and value of each token of `call` in the token's slot."""
    key, value = with_dense_heads(call.key), with_dense_heads(call.value)
    num_rows = len(slots) * shape.num_kv_heads
    tile_rows = max(1, _PROGRAM_NUMBERS // max(shape.key_width, shape.value_width))
    write_kernel[(triton.cdiv(num_rows, tile_rows),)](
        key,
        value,
        layer.keys,
        layer.values,
        slots,
        num_rows,
        *key.stride()[:2],
        *value.stride()[:2],
        NUM_KV_HEADS=shape.num_kv_heads,
        KEY_SIZE=shape.key_size,
        VALUE_SIZE=shape.value_size,
        KEY_WIDTH=shape.key_width,
        VALUE_WIDTH=shape.value_width,
        TILE_ROWS=tile_rows,
    )


@triton.jit(do_not_specialize=["num_rows", "key_stride", "key_head_stride", "value_stride", "value_head_stride"])
def write_kernel(
    key,
    value,
    cached_keys,
    cached_values,
    slots,
    num_rows,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Store keys and values in their tokens' slots. Row token * NUM_KV_HEADS + head is one head of one token."""
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = rows < num_rows
    tokens = (rows // NUM_KV_HEADS).to(tl.int64)[:, None]
    heads = (rows % NUM_KV_HEADS)[:, None]
    cells = tl.load(slots + tokens, mask=is_row[:, None], other=0) * NUM_KV_HEADS + heads

    columns = tl.arange(0, KEY_WIDTH)[None, :]
    mask = is_row[:, None] & (columns < KEY_SIZE)
    numbers = tl.load(key + tokens * key_stride + heads * key_head_stride + columns, mask=mask)
    tl.store(cached_keys + cells * KEY_SIZE + columns, numbers.to(cached_keys.dtype.element_ty), mask=mask)

    columns = tl.arange(0, VALUE_WIDTH)[None, :]
    mask = is_row[:, None] & (columns < VALUE_SIZE)
    numbers = tl.load(value + tokens * value_stride + heads * value_head_stride + columns, mask=mask)
    tl.store(cached_values + cells * VALUE_SIZE + columns, numbers.to(cached_values.dtype.element_ty), mask=mask)
