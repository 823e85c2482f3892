"""Triton kernels of attention over the paged KV cache, and of the writes to it, for CUDA devices.

Chunks are cut into tiles: consecutive tokens of one sequence times the query heads that share a KV head. Each key is
read once for all rows of a tile. Row token * GROUP_SIZE + head of a tile is a query head of a token. The keys that a
tile sees are cut into parts, so that long and short sequences are divided evenly among the programs. `plan_kernel`
writes the list of these pieces of work, on the device and once for all layers of a kind:

- `chunks` [num_chunks, 4] int32: first row in the flat batch, its position, number of tokens, and the sequence's row in
  `tables`; -1: rows without a sequence, whose output is zeros.
- `pieces` [num_pieces, 8] int32: first row, its position, number of tokens (0: no work), row in `tables`, first key,
  end of the keys, and the first row of the part's results in `parts` (-1: the piece has all keys of its tile).
- `split_tiles` [num_split_tiles, 8] int32, tiles of several parts: first row, number of tokens (0: no work), first row
  of the first part's results in `parts`, number of parts, and the number of the first part counted from key 0.
- `parts` [num_rows, number of query heads, VALUE_WIDTH] float32 and `part_sums` [num_rows, number of query heads]: the
  parts' results, one row for each token of each part.

The kernels are not specialised on integers that differ between steps: a new value must not compile anything during
serving. STRIDE_ALIGNMENT says what the strides are multiples of, so that the compiler can load 16 bytes at a time.

With HAS_SCALES the cache holds bytes: int8, or float8 (e4m3) with IS_FLOAT8. They are widened to the type of the
queries, in which they are exact, and scores and weights are multiplied by the scales in float32. Float8 is made and
read as bits, because not every device converts it. Without HAS_SCALES the scales are not read.

With REST_WIDTH values are the first VALUE_SIZE numbers of the keys (latent attention), so that a tile of the cache is
read once for both. KEY_WIDTH is VALUE_WIDTH then, and the other numbers of a key are a tile of REST_WIDTH columns.
HEADS_PER_KEY KV heads are one head of the cache: so many query heads share a key that one program cannot have them all.

A prompt from position 0 reads its keys by the table, too, although the step's own rows have the same numbers. Compiled
for 9.0 and heads of 128, the loop over keys has 593 instructions. With a choice of rows or table by chunk it has 660,
and still waits for block ids. With a loop for each, each matrix product waits for the one before.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_PARTS = 32
"""Maximum number of parts that the keys of one tile are cut into."""
PIECE_FIELDS = 8
"""Numbers of a piece, and of a split tile."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_WIDENED_FACTOR = tl.constexpr(256.0)
"""Value of a float8 number divided by that of the half-precision number with the same bits."""
_INT8_FACTOR = tl.constexpr(64.0)
"""Factor of weights times scales of int8: with it the largest value of float16, by 127, stays a number of float16."""
_LEAST_MAGNITUDE = tl.constexpr(1e-30)
"""A head without a larger number becomes zeros, as `kv_cache.quantize` has it."""


@triton.jit(do_not_specialize=["num_chunks", "num_pieces", "num_split_tiles", "num_parts", "window", "min_part_keys"])
def plan_kernel(
    chunks,
    pieces,
    split_tiles,
    num_chunks,
    num_pieces,
    num_split_tiles,
    num_parts,
    window,
    min_part_keys,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NUM_LANES: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_FIXED: tl.constexpr,
):
    """Write `pieces` and `split_tiles` for `chunks`. One program does it.

    Parts have about one `num_parts`-th of all keys of all tiles, and at least `min_part_keys`. If IS_FIXED, they end at
    multiples of `min_part_keys`, whatever the other chunks are.
    """
    part_keys = min_part_keys
    if not IS_FIXED:
        total = 0
        longest = 0
        for first in range(0, num_chunks, NUM_LANES):
            row, position, num_tokens, table_row = _load_chunks(chunks, first, num_chunks, NUM_LANES)
            for offset in range(0, tl.max(num_tokens, 0), TILE_TOKENS):
                begin, end = _seen_keys(
                    position, num_tokens, table_row, offset, window, TILE_TOKENS, TILE_KEYS, HAS_WINDOW
                )
                total += tl.sum(end - begin, 0)
                longest = tl.maximum(longest, tl.max(end - begin, 0))
        part_keys = tl.maximum(tl.maximum(tl.cdiv(total, num_parts), tl.cdiv(longest, MOST_PARTS)), min_part_keys)
        part_keys = tl.cdiv(part_keys, TILE_KEYS) * TILE_KEYS

    piece_count = 0
    row_count = 0
    split_tile_count = 0
    for first in range(0, num_chunks, NUM_LANES):
        row, position, num_tokens, table_row = _load_chunks(chunks, first, num_chunks, NUM_LANES)
        for offset in range(0, tl.max(num_tokens, 0), TILE_TOKENS):
            tokens = tl.minimum(num_tokens - offset, TILE_TOKENS)
            begin, end = _seen_keys(position, num_tokens, table_row, offset, window, TILE_TOKENS, TILE_KEYS, HAS_WINDOW)
            lowest = begin
            if IS_FIXED:
                lowest = begin // part_keys * part_keys
            # A tile without keys is one piece, which writes zeros.
            parts = tl.where(tokens > 0, tl.maximum((end - lowest + part_keys - 1) // part_keys, 1), 0)
            num_rows = tl.where(parts > 1, parts * tokens, 0)
            piece = piece_count + tl.cumsum(parts, 0) - parts
            part_row = row_count + tl.cumsum(num_rows, 0) - num_rows
            is_split = (parts > 1).to(tl.int32)
            split_tile = split_tile_count + tl.cumsum(is_split, 0) - is_split
            for number in range(tl.max(parts, 0)):
                cell = pieces + (piece + number) * 8
                mask = number < parts
                tl.store(cell, row + offset, mask=mask)
                tl.store(cell + 1, position + offset, mask=mask)
                tl.store(cell + 2, tokens, mask=mask)
                tl.store(cell + 3, table_row, mask=mask)
                tl.store(cell + 4, tl.maximum(begin, lowest + number * part_keys), mask=mask)
                tl.store(cell + 5, tl.minimum(end, lowest + (number + 1) * part_keys), mask=mask)
                tl.store(cell + 6, tl.where(parts > 1, part_row + number * tokens, -1), mask=mask)
            cell = split_tiles + split_tile * 8
            mask = parts > 1
            tl.store(cell, row + offset, mask=mask)
            tl.store(cell + 1, tokens, mask=mask)
            tl.store(cell + 2, part_row, mask=mask)
            tl.store(cell + 3, parts, mask=mask)
            tl.store(cell + 4, tl.where(IS_FIXED, lowest // part_keys, 0), mask=mask)
            piece_count += tl.sum(parts, 0)
            row_count += tl.sum(num_rows, 0)
            split_tile_count += tl.sum(is_split, 0)

    lanes = tl.arange(0, NUM_LANES)
    for first in range(piece_count, num_pieces, NUM_LANES):
        tl.store(pieces + (first + lanes) * 8 + 2, lanes * 0, mask=first + lanes < num_pieces)
    for first in range(split_tile_count, num_split_tiles, NUM_LANES):
        tl.store(split_tiles + (first + lanes) * 8 + 1, lanes * 0, mask=first + lanes < num_split_tiles)


@triton.jit
def _load_chunks(chunks, first, num_chunks, NUM_LANES: tl.constexpr):
    """Load chunks first, first + 1, ...; those beyond the last one have no tokens."""
    lanes = first + tl.arange(0, NUM_LANES)
    mask = lanes < num_chunks
    cell = chunks + lanes * 4
    row = tl.load(cell, mask=mask, other=0)
    position = tl.load(cell + 1, mask=mask, other=0)
    num_tokens = tl.load(cell + 2, mask=mask, other=0)
    table_row = tl.load(cell + 3, mask=mask, other=-1)
    return row, position, num_tokens, table_row


@triton.jit
def _seen_keys(
    position,
    num_tokens,
    table_row,
    offset,
    window,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Return the keys [begin, end) of the tile that begins with token `offset` of each chunk.

    `begin` is a multiple of TILE_KEYS, so that a token meets the same tiles of keys in every tile that it is in.
    """
    has_keys = (table_row >= 0) & (offset < num_tokens)
    end = tl.where(has_keys, position + tl.minimum(num_tokens, offset + TILE_TOKENS), 0)
    begin = end * 0
    if HAS_WINDOW:
        begin = tl.where(has_keys, tl.maximum(position + offset + 1 - window, 0) // TILE_KEYS * TILE_KEYS, 0)
    return begin, end


@triton.jit(do_not_specialize=["query_stride", "query_head_stride", "table_stride", "window"])
def attend_kernel(
    query,
    cached_keys,
    cached_values,
    key_scales,
    value_scales,
    output,
    parts,
    part_sums,
    pieces,
    tables,
    sinks,
    scale,
    softcap,
    window,
    query_stride,
    query_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
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
    """Compute one KV head of one piece.

    With IS_SPLIT a part goes to `parts` and `part_sums` for `combine_kernel`; a whole tile goes to `output`. The head
    is the fastest index, so programs that run together read neighbouring memory. Both are in one axis of the launch:
    the second one has at most 65,535 programs.
    """
    head, piece = tl.program_id(0) % NUM_KV_HEADS, pieces + tl.program_id(0) // NUM_KV_HEADS * 8
    num_tokens = tl.load(piece + 2)
    if num_tokens == 0:
        return
    query_stride = query_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    query_head_stride = query_head_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    first_row = tl.load(piece).to(tl.int64)
    first_position = tl.load(piece + 1)
    table_row = tl.load(piece + 3).to(tl.int64)
    begin = tl.load(piece + 4)
    end = tl.load(piece + 5)
    rows = tl.arange(0, TILE_ROWS)
    tokens = rows // GROUP_SIZE
    query_heads = head * GROUP_SIZE + rows % GROUP_SIZE
    is_row = tokens < num_tokens
    output_columns = tl.arange(0, VALUE_WIDTH)
    cells = (first_row + tokens) * (NUM_KV_HEADS * GROUP_SIZE) + query_heads
    targets = output + cells[:, None] * VALUE_SIZE + output_columns
    is_target = is_row[:, None] & (output_columns < VALUE_SIZE)[None, :]
    if table_row < 0:
        tl.store(targets, tl.zeros([TILE_ROWS, VALUE_WIDTH], output.dtype.element_ty), mask=is_target)
        return
    query_rows = query + (first_row + tokens)[:, None] * query_stride + query_heads[:, None] * query_head_stride
    columns = tl.arange(0, KEY_WIDTH)
    key_end: tl.constexpr = VALUE_SIZE if REST_WIDTH else KEY_SIZE
    queries = tl.load(query_rows + columns, mask=is_row[:, None] & (columns < key_end)[None, :], other=0.0)
    rest_queries = queries
    if REST_WIDTH:
        columns = VALUE_SIZE + tl.arange(0, REST_WIDTH)
        rest_queries = tl.load(query_rows + columns, mask=is_row[:, None] & (columns < KEY_SIZE)[None, :], other=0.0)
    if not HAS_SCALES:
        queries = queries.to(cached_keys.dtype.element_ty)
        rest_queries = rest_queries.to(cached_keys.dtype.element_ty)
    first_seen = begin
    if HAS_WINDOW:
        first_seen = tl.maximum(begin, first_position + 1 - window)
    scale *= (1.0 if HAS_SOFTCAP else _LOG2_E) * (_WIDENED_FACTOR if IS_FLOAT8 else 1.0)
    values, highest, total = _attend_keys(
        queries, rest_queries, first_position + tokens, begin, end, cached_keys, cached_values, key_scales,
        value_scales, tables + table_row * table_stride, head // HEADS_PER_KEY, scale, softcap, window, first_seen,
        NUM_KV_HEADS // HEADS_PER_KEY, KEY_SIZE, VALUE_SIZE, KEY_WIDTH, VALUE_WIDTH, REST_WIDTH, BLOCK_SIZE, TILE_ROWS,
        TILE_KEYS, HAS_WINDOW, HAS_SOFTCAP, HAS_SCALES, IS_FLOAT8,
    )  # fmt: skip

    # A row may see no key of this part. Then its sum is -inf and its values are zeros.
    values = values / tl.where(total == 0.0, 1.0, total)[:, None]
    sums = highest + tl.log2(total)
    if IS_SPLIT:
        part_row = tl.load(piece + 6)
        if part_row >= 0:
            cells = (part_row.to(tl.int64) + tokens) * (NUM_KV_HEADS * GROUP_SIZE) + query_heads
            tl.store(part_sums + cells, sums, mask=is_row)
            tl.store(parts + cells[:, None] * VALUE_WIDTH + output_columns, values, mask=is_row[:, None])
            return
    if HAS_SINKS:
        # As `combine_kernel` does with one part.
        sink = tl.load(sinks + query_heads, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
        values = values / (1.0 + tl.exp2(sink - sums))[:, None]
    tl.store(targets, values.to(output.dtype.element_ty), mask=is_target)


@triton.jit
def _attend_keys(
    queries,
    rest_queries,
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
    first_seen,
    NUM_KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):
    """Compute the online softmax over the keys at positions [begin, end) in one pass, with powers of two.

    `scale` has the factors log2(e), unless HAS_SOFTCAP, and _WIDENED_FACTOR with IS_FLOAT8.

    Returns the sums of weighted values [TILE_ROWS, VALUE_WIDTH], not yet divided by the sums of weights; the largest
    score per row (0 if no key is visible); and the sum of weights per row. No key outside [first_seen, end) is read,
    nor is its place in the table: what was behind the window may belong to another sequence.
    """
    key_columns = tl.arange(0, KEY_WIDTH)
    value_columns = tl.arange(0, VALUE_WIDTH)
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    values = tl.zeros([TILE_ROWS, VALUE_WIDTH], tl.float32)
    for start in range(begin, end, TILE_KEYS):
        keys_at = start + tl.arange(0, TILE_KEYS)
        is_key = _is_read(keys_at, first_seen, end, HAS_WINDOW)
        block = tl.load(table + keys_at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + keys_at % BLOCK_SIZE) * NUM_KV_HEADS + head
        if REST_WIDTH:
            value = tl.load(
                cached_keys + slot[:, None] * KEY_SIZE + value_columns[None, :],
                mask=is_key[:, None] & (value_columns < VALUE_SIZE)[None, :],
                other=0.0,
            )
            rest_columns = VALUE_SIZE + tl.arange(0, REST_WIDTH)
            key = tl.load(
                cached_keys + slot[None, :] * KEY_SIZE + rest_columns[:, None],
                mask=is_key[None, :] & (rest_columns < KEY_SIZE)[:, None],
                other=0.0,
            )
            if HAS_SCALES:
                value = widened(value, queries.dtype, IS_FLOAT8)
                key = widened(key, queries.dtype, IS_FLOAT8)
            score = tl.dot(queries, tl.trans(value), input_precision="ieee") + tl.dot(
                rest_queries, key, input_precision="ieee"
            )
        else:
            key = tl.load(
                cached_keys + slot[None, :] * KEY_SIZE + key_columns[:, None],
                mask=is_key[None, :] & (key_columns < KEY_SIZE)[:, None],
                other=0.0,
            )
            if HAS_SCALES:
                key = widened(key, queries.dtype, IS_FLOAT8)
            score = tl.dot(queries, key, input_precision="ieee")
        if HAS_SCALES:
            scale_at = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + keys_at % BLOCK_SIZE
            score *= (tl.load(key_scales + scale_at, mask=is_key, other=0.0) * scale)[None, :]
        else:
            score *= scale
        if HAS_SOFTCAP:
            # softcap * tanh(score / softcap). If the exponential overflows, tanh is 1.
            score = softcap * _LOG2_E * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
        visible = is_key[None, :] & (keys_at[None, :] <= positions[:, None])
        if HAS_WINDOW:
            visible &= keys_at[None, :] > positions[:, None] - window
        score = tl.where(visible, score, float("-inf"))
        raised = tl.maximum(highest, tl.max(score, 1))
        # A row that has seen no key has the maximum -inf, which must not be subtracted.
        raised_or_zero = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(score - raised_or_zero[:, None])
        shrink = tl.exp2(highest - raised_or_zero)
        if not REST_WIDTH:
            value = tl.load(
                cached_values + slot[:, None] * VALUE_SIZE + value_columns[None, :],
                mask=is_key[:, None] & (value_columns < VALUE_SIZE)[None, :],
                other=0.0,
            )
            if HAS_SCALES:
                value = widened(value, queries.dtype, IS_FLOAT8)
        total = total * shrink + tl.sum(weights, 1)
        if HAS_SCALES:
            # The factor keeps weights within the numbers of float16: a scale is the largest value by 127 or 448.
            factor = _WIDENED_FACTOR if IS_FLOAT8 else _INT8_FACTOR
            weights *= (tl.load(value_scales + scale_at, mask=is_key, other=0.0) * factor)[None, :]
        values = values * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = raised
    if HAS_SCALES and not IS_FLOAT8:
        values *= 1.0 / _INT8_FACTOR
    return values, tl.where(highest == float("-inf"), 0.0, highest), total


@triton.jit
def _is_read(keys_at, first_seen, end, HAS_WINDOW: tl.constexpr):
    is_read = keys_at < end
    if HAS_WINDOW:
        is_read &= keys_at >= first_seen
    return is_read


@triton.jit
def combine_kernel(
    parts,
    part_sums,
    output,
    split_tiles,
    sinks,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Write row `program_id(2)` of KV head `program_id(0)` of split tile `program_id(1)`: the mean of its parts.

    They are weighted by their sums. A part has the lane of its number, so that the order of a sum does not depend on
    the parts that a row does not see.
    """
    head, split_tile, row = tl.program_id(0), split_tiles + tl.program_id(1) * 8, tl.program_id(2)
    token = row // GROUP_SIZE
    num_tokens = tl.load(split_tile + 1)
    if token >= num_tokens:
        return
    query_head = head * GROUP_SIZE + row % GROUP_SIZE
    numbers = tl.arange(0, MOST_PARTS) - tl.load(split_tile + 4)
    is_part = (numbers >= 0) & (numbers < tl.load(split_tile + 3))
    columns = tl.arange(0, VALUE_WIDTH)
    part_rows = tl.load(split_tile + 2).to(tl.int64) + numbers * num_tokens + token
    cells = part_rows * (NUM_KV_HEADS * GROUP_SIZE) + query_head
    sums = tl.load(part_sums + cells, mask=is_part, other=float("-inf"))
    highest = tl.max(sums, 0)
    weights = tl.exp2(sums - highest)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + query_head).to(tl.float32) * _LOG2_E - highest)
    values = tl.load(parts + cells[:, None] * VALUE_WIDTH + columns, mask=is_part[:, None], other=0.0)
    result = tl.sum(values * weights[:, None], 0) / total
    target = (tl.load(split_tile).to(tl.int64) + token) * (NUM_KV_HEADS * GROUP_SIZE) + query_head
    tl.store(output + target * VALUE_SIZE + columns, result.to(output.dtype.element_ty), mask=columns < VALUE_SIZE)


@triton.jit
def widened(numbers, DTYPE: tl.constexpr, IS_FLOAT8: tl.constexpr):
    """Return bytes of the cache as numbers; those of float8 are divided by _WIDENED_FACTOR.

    A float8 number's bits, moved to the fields of bfloat16, are 2 ** -120 times its value. A product makes it whole;
    devices convert fewer numbers at a time.
    """
    if IS_FLOAT8 and DTYPE.is_bf16():
        bits = (numbers.to(tl.int16) << 4) & -30736  # 0x87F0
        numbers = bits.to(tl.bfloat16, bitcast=True) * 5.192296858534828e33  # 2 ** 112
    elif IS_FLOAT8:
        # The extension of the sign sets bits 15 and 14. Bit 14 is not part of the number.
        numbers = ((numbers.to(tl.int16) << 7) & -16385).to(tl.float16, bitcast=True)
    return numbers.to(DTYPE)


@triton.jit
def quantized(heads, IS_FLOAT8: tl.constexpr):
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
    HAS_VALUES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    STRIDE_ALIGNMENT: tl.constexpr,
):
    """Store keys and values in their tokens' slots. Row token * NUM_KV_HEADS + head is one head of one token.

    Without HAS_VALUES only keys are stored.
    """
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
        numbers, scales = quantized(numbers, IS_FLOAT8)
        tl.store(key_scales + scale_at, scales, mask=is_row[:, None])
    tl.store(cached_keys + cells * KEY_SIZE + columns, numbers.to(cached_keys.dtype.element_ty), mask=mask)

    if HAS_VALUES:
        columns = tl.arange(0, VALUE_WIDTH)[None, :]
        mask = is_row[:, None] & (columns < VALUE_SIZE)
        numbers = tl.load(value + tokens * value_stride + heads * value_head_stride + columns, mask=mask, other=0.0)
        if HAS_SCALES:
            numbers, scales = quantized(numbers, IS_FLOAT8)
            tl.store(value_scales + scale_at, scales, mask=is_row[:, None])
        tl.store(cached_values + cells * VALUE_SIZE + columns, numbers.to(cached_values.dtype.element_ty), mask=mask)
