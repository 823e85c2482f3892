"""Triton kernels of attention over the paged KV cache, and of the writes to it, for CUDA devices.

One program computes a tile for one KV head: consecutive tokens of one sequence times the query heads that share the KV
head. Each key is read once for all rows of the tile. Row token * GROUP_SIZE + head of a tile is a query head of a
token. `tiles` [num_tiles, 4] int32 holds for each tile: the row of its first token in the flat batch, the position of
that token, the number of tokens (0: the program writes zeros), and the sequence's row in `tables`.

The kernels are not specialised on integers that differ between steps: a new value must not compile anything during
serving. STRIDE_ALIGNMENT says what the strides are multiples of, so that the compiler can load 16 bytes at a time.

With HAS_SCALES the cache holds bytes: int8, or float8 (e4m3) with IS_FLOAT8. They are widened to the type of the
queries, in which they are exact, and scores and weights are multiplied by the scales in float32. Float8 is made and
read as bits, because not every device converts it. Without HAS_SCALES the scales are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_SPLITS = 32
"""Maximum number of parts that the keys of one tile are split into."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_WIDENED_FACTOR = tl.constexpr(256.0)
"""Value of a float8 number divided by that of the half-precision number with the same bits."""
_LEAST_MAGNITUDE = tl.constexpr(1e-30)
"""A head without a larger number becomes zeros, as `kv_cache.quantize` has it."""


@triton.jit(do_not_specialize=["query_stride", "query_head_stride", "table_stride", "window", "num_splits"])
def attend_kernel(
    query,
    cached_keys,
    cached_values,
    key_scales,
    value_scales,
    output,
    parts,
    part_sums,
    tiles,
    tables,
    sinks,
    scale,
    softcap,
    window,
    num_splits,
    query_stride,
    query_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    STRIDE_ALIGNMENT: tl.constexpr,
):
    """Compute KV head `program_id(0)` of tile `program_id(1)` over part `program_id(2)` of the keys that the tile sees.

    With IS_SPLIT the result goes to `parts` and `part_sums` for `combine_kernel`, otherwise to `output`. The head is
    the fastest index, so programs that run together read neighbouring memory.
    """
    head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_stride = query_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    query_head_stride = query_head_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    first_row = tl.load(tiles + tile * 4).to(tl.int64)
    first_position = tl.load(tiles + tile * 4 + 1)
    num_tokens = tl.load(tiles + tile * 4 + 2)
    table = tables + tl.load(tiles + tile * 4 + 3).to(tl.int64) * table_stride
    rows = tl.arange(0, TILE_ROWS)
    output_columns = tl.arange(0, VALUE_WIDTH)
    if num_tokens == 0:
        cells = first_row * (NUM_KV_HEADS * GROUP_SIZE) + head * GROUP_SIZE + rows
        zeros = tl.zeros([TILE_ROWS, VALUE_WIDTH], output.dtype.element_ty)
        mask = (rows < GROUP_SIZE)[:, None] & (output_columns < VALUE_SIZE)[None, :]
        tl.store(output + cells[:, None] * VALUE_SIZE + output_columns, zeros, mask=mask)
        return
    tokens = rows // GROUP_SIZE
    query_heads = head * GROUP_SIZE + rows % GROUP_SIZE
    is_row = tokens < num_tokens
    columns = tl.arange(0, KEY_WIDTH)
    queries = tl.load(
        query + (first_row + tokens)[:, None] * query_stride + query_heads[:, None] * query_head_stride + columns,
        mask=is_row[:, None] & (columns < KEY_SIZE)[None, :],
        other=0.0,
    )
    if not HAS_SCALES:
        queries = queries.to(cached_keys.dtype.element_ty)

    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position + 1 - window, 0)
    end = first_position + num_tokens
    if IS_SPLIT:
        part_keys = tl.cdiv(tl.cdiv(end - begin, TILE_KEYS), num_splits) * TILE_KEYS
        begin += split * part_keys
        end = tl.minimum(end, begin + part_keys)
    values, highest, total = _attend_keys(
        queries, first_position + tokens, begin, end, cached_keys, cached_values, key_scales, value_scales,
        table, head, scale, softcap, window,
        NUM_KV_HEADS, KEY_SIZE, VALUE_SIZE, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, TILE_ROWS, TILE_KEYS,
        HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, IS_FLOAT8,
    )  # fmt: skip

    if HAS_SINKS and not IS_SPLIT:
        sink = tl.load(sinks + query_heads, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
        total += tl.exp2(sink - highest)
    # A row may see no key of this part. Then its sum is -inf and its values are zeros.
    values = values / tl.where(total == 0.0, 1.0, total)[:, None]
    if IS_SPLIT:
        cell = (tile * NUM_KV_HEADS + head) * num_splits + split
        cells = cell.to(tl.int64) * (TILE_TOKENS * GROUP_SIZE) + rows
        tl.store(part_sums + cells, highest + tl.log2(total), mask=is_row)
        tl.store(parts + cells[:, None] * VALUE_WIDTH + output_columns, values, mask=is_row[:, None])
    else:
        cells = (first_row + tokens) * (NUM_KV_HEADS * GROUP_SIZE) + query_heads
        mask = is_row[:, None] & (output_columns < VALUE_SIZE)[None, :]
        tl.store(output + cells[:, None] * VALUE_SIZE + output_columns, values.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _attend_keys(
    queries,
    positions,
    begin,
    end,
    cached_keys,
    cached_values,
    key_scales,
    value_scales,
    table,
    head,
    scale,
    softcap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):
    """Compute the online softmax over the keys at positions [begin, end) in one pass, with powers of two.

    Returns the sums of weighted values [TILE_ROWS, VALUE_WIDTH], not yet divided by the sums of weights; the largest
    score per row (0 if no key is visible); and the sum of weights per row. No key outside [begin, end) is read.
    """
    key_columns = tl.arange(0, KEY_WIDTH)
    value_columns = tl.arange(0, VALUE_WIDTH)
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    values = tl.zeros([TILE_ROWS, VALUE_WIDTH], tl.float32)
    for start in range(begin, end, TILE_KEYS):
        keys_at = start + tl.arange(0, TILE_KEYS)
        is_key = keys_at < end
        block = tl.load(table + keys_at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + keys_at % BLOCK_SIZE) * NUM_KV_HEADS + head
        key = tl.load(
            cached_keys + slot[None, :] * KEY_SIZE + key_columns[:, None],
            mask=is_key[None, :] & (key_columns < KEY_SIZE)[:, None],
            other=0.0,
        )
        if HAS_SCALES:
            key = _widened(key, queries.dtype, IS_FLOAT8)
        score = tl.dot(queries, key, input_precision="ieee") * scale
        if HAS_SCALES:
            scale_at = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + keys_at % BLOCK_SIZE
            key_scale = tl.load(key_scales + scale_at, mask=is_key, other=0.0)
            score *= (key_scale * _WIDENED_FACTOR if IS_FLOAT8 else key_scale)[None, :]
        if HAS_SOFTCAP:
            # softcap * tanh(score / softcap). If the exponential overflows, tanh is 1.
            score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
        visible = is_key[None, :] & (keys_at[None, :] <= positions[:, None])
        if HAS_WINDOW:
            visible &= keys_at[None, :] > positions[:, None] - window
        score = tl.where(visible, score * _LOG2_E, float("-inf"))
        raised = tl.maximum(highest, tl.max(score, 1))
        # A row that has seen no key has the maximum -inf, which must not be subtracted.
        raised_or_zero = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(score - raised_or_zero[:, None])
        shrink = tl.exp2(highest - raised_or_zero)
        value = tl.load(
            cached_values + slot[:, None] * VALUE_SIZE + value_columns[None, :],
            mask=is_key[:, None] & (value_columns < VALUE_SIZE)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weights, 1)
        if HAS_SCALES:
            value = _widened(value, queries.dtype, IS_FLOAT8)
            # The factor keeps weights within the numbers of float16: a scale is the largest value by 127 or 448.
            weights *= tl.load(value_scales + scale_at, mask=is_key, other=0.0)[None, :] * _WIDENED_FACTOR
        values = values * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = raised
    if HAS_SCALES and not IS_FLOAT8:
        values *= 1.0 / _WIDENED_FACTOR
    return values, tl.where(highest == float("-inf"), 0.0, highest), total


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    parts,
    part_sums,
    output,
    tiles,
    sinks,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    SPLIT_WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Write row `program_id(2)` of KV head `program_id(0)` of tile `program_id(1)`: the weighted mean of its parts."""
    head, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = row // GROUP_SIZE
    if token >= tl.load(tiles + tile * 4 + 2):
        return
    query_head = head * GROUP_SIZE + row % GROUP_SIZE
    splits = tl.arange(0, SPLIT_WIDTH)
    columns = tl.arange(0, VALUE_WIDTH)
    cells = ((tile * NUM_KV_HEADS + head) * num_splits + splits).to(tl.int64) * (TILE_TOKENS * GROUP_SIZE) + row
    is_split = splits < num_splits
    sums = tl.load(part_sums + cells, mask=is_split, other=float("-inf"))
    highest = tl.max(sums, 0)
    weights = tl.exp2(sums - highest)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + query_head).to(tl.float32) * _LOG2_E - highest)
    values = tl.load(parts + cells[:, None] * VALUE_WIDTH + columns, mask=is_split[:, None], other=0.0)
    result = tl.sum(values * weights[:, None], 0) / total
    target = (tl.load(tiles + tile * 4).to(tl.int64) + token) * (NUM_KV_HEADS * GROUP_SIZE) + query_head
    tl.store(output + target * VALUE_SIZE + columns, result.to(output.dtype.element_ty), mask=columns < VALUE_SIZE)


@triton.jit
def _widened(numbers, DTYPE: tl.constexpr, IS_FLOAT8: tl.constexpr):
    """Return bytes of the cache as numbers; those of float8 are divided by _WIDENED_FACTOR."""
    if IS_FLOAT8:
        # The extension of the sign sets bits 15 and 14. Bit 14 is not part of the number.
        numbers = ((numbers.to(tl.int16) << 7) & -16385).to(tl.float16, bitcast=True)
    return numbers.to(DTYPE)


@triton.jit
def _quantize(heads, IS_FLOAT8: tl.constexpr):
    """Return the numbers of heads [rows, width] as int32, of which a byte is used, and the heads' scales [rows, 1]."""
    largest_number = 448.0 if IS_FLOAT8 else 127.0
    heads = heads.to(tl.float32)
    # The sum is NaN if a number is NaN or infinite, and 0 otherwise.
    largest = tl.max(tl.abs(heads), 1, keep_dims=True) + tl.sum(heads * 0.0, 1, keep_dims=True)
    numbers = heads * tl.where(largest > _LEAST_MAGNITUDE, largest_number / tl.maximum(largest, _LEAST_MAGNITUDE), 0.0)
    bits = _float8_bits(numbers) if IS_FLOAT8 else _rounded(numbers)
    return bits, largest / largest_number


@triton.jit
def _rounded(numbers):
    """Round to the nearest integer, ties to even."""
    return ((numbers + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23: the addition rounds


@triton.jit
def _float8_bits(numbers):
    """Round numbers of a magnitude of at most 448 to the nearest float8, ties to even; return their bits in int32."""
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    # Below 2^-6 numbers are multiples of 2^-9, the last bit of floats between 2^14 and 2^15.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    return ((bits >> 24) & 0x80) | tl.where(magnitude < (121 << 23), small, rounded)


@triton.jit(do_not_specialize=["num_rows", "key_stride", "key_head_stride", "value_stride", "value_head_stride"])
def write_kernel(
    key,
    value,
    cached_keys,
    cached_values,
    key_scales,
    value_scales,
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
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    STRIDE_ALIGNMENT: tl.constexpr,
):
    """Store keys and values in their tokens' slots. Row token * NUM_KV_HEADS + head is one head of one token."""
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = rows < num_rows
    key_stride = key_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    key_head_stride = key_head_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    value_stride = value_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    value_head_stride = value_head_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    tokens = (rows // NUM_KV_HEADS).to(tl.int64)[:, None]
    heads = (rows % NUM_KV_HEADS)[:, None]
    slot = tl.load(slots + tokens, mask=is_row[:, None], other=0)
    cells = slot * NUM_KV_HEADS + heads
    scale_at = (slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE

    columns = tl.arange(0, KEY_WIDTH)[None, :]
    mask = is_row[:, None] & (columns < KEY_SIZE)
    numbers = tl.load(key + tokens * key_stride + heads * key_head_stride + columns, mask=mask, other=0.0)
    if HAS_SCALES:
        numbers, scales = _quantize(numbers, IS_FLOAT8)
        tl.store(key_scales + scale_at, scales, mask=is_row[:, None])
    tl.store(cached_keys + cells * KEY_SIZE + columns, numbers.to(cached_keys.dtype.element_ty), mask=mask)

    columns = tl.arange(0, VALUE_WIDTH)[None, :]
    mask = is_row[:, None] & (columns < VALUE_SIZE)
    numbers = tl.load(value + tokens * value_stride + heads * value_head_stride + columns, mask=mask, other=0.0)
    if HAS_SCALES:
        numbers, scales = _quantize(numbers, IS_FLOAT8)
        tl.store(value_scales + scale_at, scales, mask=is_row[:, None])
    tl.store(cached_values + cells * VALUE_SIZE + columns, numbers.to(cached_values.dtype.element_ty), mask=mask)
