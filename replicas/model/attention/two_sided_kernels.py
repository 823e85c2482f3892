"""Two-sided attention in a Triton kernel: all texts of a forward pass in one launch, over the keys of the pass.

Texts are cut into tiles of consecutive tokens, times the query heads that share a KV head. `tiles` [num_tiles, 4] int32
are their first rows in the flat batch, numbers of tokens, and first and end rows of their texts. Tiles begin at
multiples of their size in a text, so that a text's sums do not depend on the texts beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_FIELDS = 4
"""Numbers of a tile."""

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=[
        "window", "query_stride", "query_head_stride", "key_stride", "key_head_stride", "value_stride",
        "value_head_stride",
    ]
)  # fmt: skip
def two_sided_kernel(
    query,
    key,
    value,
    output,
    tiles,
    scale,
    window,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    STRIDE_ALIGNMENT: tl.constexpr,
):
    """Compute one KV head of one tile, with an online softmax in powers of two. The head is the fastest index.

    With HAS_WINDOW a token sees those of its text that are fewer than `window` tokens away.
    """
    query_stride = query_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    query_head_stride = query_head_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    key_stride = key_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    key_head_stride = key_head_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    value_stride = value_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    value_head_stride = value_head_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    head, tile = tl.program_id(0) % NUM_KV_HEADS, tiles + tl.program_id(0) // NUM_KV_HEADS * 4
    first = tl.load(tile)
    num_tokens = tl.load(tile + 1)
    begin = tl.load(tile + 2)
    end = tl.load(tile + 3)
    if HAS_WINDOW:
        begin = tl.maximum(begin, first + 1 - window)
        end = tl.minimum(end, first + num_tokens - 1 + window)

    rows = tl.arange(0, TILE_ROWS)
    tokens = first + rows // GROUP_SIZE
    query_heads = head * GROUP_SIZE + rows % GROUP_SIZE
    is_row = rows // GROUP_SIZE < num_tokens
    key_columns = tl.arange(0, KEY_WIDTH)
    value_columns = tl.arange(0, VALUE_WIDTH)
    queries = tl.load(
        query + (tokens.to(tl.int64) * query_stride + query_heads * query_head_stride)[:, None] + key_columns,
        mask=is_row[:, None] & (key_columns < KEY_SIZE)[None, :],
        other=0.0,
    )
    keys_of_head = key + head.to(tl.int64) * key_head_stride
    values_of_head = value + head.to(tl.int64) * value_head_stride
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    sums = tl.zeros([TILE_ROWS, VALUE_WIDTH], tl.float32)
    for start in range(begin, end, TILE_KEYS):
        keys_at = start + tl.arange(0, TILE_KEYS)
        is_key = keys_at < end
        keys = tl.load(
            keys_of_head + keys_at.to(tl.int64)[None, :] * key_stride + key_columns[:, None],
            mask=is_key[None, :] & (key_columns < KEY_SIZE)[:, None],
            other=0.0,
        )
        visible = is_key[None, :]
        if HAS_WINDOW:
            distance = keys_at[None, :] - tokens[:, None]
            visible = visible & (distance < window) & (distance > -window)
        score = tl.dot(queries, keys, input_precision="ieee") * scale
        score = tl.where(visible, score * _LOG2_E, float("-inf"))
        raised = tl.maximum(highest, tl.max(score, 1))
        # A row that has seen no key has the maximum -inf, which must not be subtracted.
        raised_or_zero = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(score - raised_or_zero[:, None])
        shrink = tl.exp2(highest - raised_or_zero)
        values = tl.load(
            values_of_head + keys_at.to(tl.int64)[:, None] * value_stride + value_columns[None, :],
            mask=is_key[:, None] & (value_columns < VALUE_SIZE)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = raised

    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    cells = tokens.to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + query_heads
    tl.store(
        output + cells[:, None] * VALUE_SIZE + value_columns,
        sums.to(output.dtype.element_ty),
        mask=is_row[:, None] & (value_columns < VALUE_SIZE)[None, :],
    )
