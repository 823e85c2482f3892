"""Triton kernels of a decoder layer's small operations and of its experts, for CUDA devices.

The kernels compute in float32 for every dtype and round once. No integer argument differs between steps, so no step
compiles a kernel: the launch grid gives the number of rows, and the row sizes are compiled in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replicas.model.attention.triton_kernels import quantized


@triton.jit
def add_and_normalize_kernel(
    residual,
    update,
    weight,
    output,
    scales,
    epsilon,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):
    """Compute row `program_id(0)`: residual += update, output = residual / its root mean square * weight.

    If IS_ROUNDED, the result is then rounded as by `round_rows_kernel`: the output is uint8, and `scales` [num_rows]
    float32 are written.
    """
    columns = tl.arange(0, WIDTH)[None, :]
    is_column = columns < SIZE
    cells = tl.program_id(0).to(tl.int64) * SIZE + columns
    row = tl.load(residual + cells, mask=is_column, other=0.0)
    if HAS_UPDATE:
        added = tl.load(update + cells, mask=is_column, other=0.0)
        row = (row.to(tl.float32) + added.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + cells, row, mask=is_column)
    row = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 1, keep_dims=True) / SIZE + epsilon)
    factors = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    numbers = (row * scale * factors).to(residual.dtype.element_ty)
    if IS_ROUNDED:
        numbers, row_scale = quantized(numbers, True)
        tl.store(scales + tl.program_id(0) + tl.zeros([1, 1], tl.int32), row_scale)
    tl.store(output + cells, numbers.to(output.dtype.element_ty), mask=is_column)


@triton.jit
def embed_kernel(token_ids, table, output, num_rows, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Copy columns `program_id(1)` * TILE and on of row `token_ids[program_id(0)]` of `table` [num_rows, SIZE].

    An id outside the table gets NaN, and nothing is read for it.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = columns < SIZE
    token_id = tl.load(token_ids + row)
    is_known = (token_id >= 0) & (token_id < num_rows)
    source = tl.where(is_known, token_id, 0) * SIZE
    numbers = tl.load(table + source + columns, mask=is_column & is_known, other=float("nan"))
    tl.store(output + row * SIZE + columns, numbers, mask=is_column)


@triton.jit
def rotary_embedding_kernel(
    rows,
    cos,
    sin,
    query_weight,
    key_weight,
    epsilon,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Normalise (with HAS_NORMS) and rotate heads `program_id(1)` * TILE_HEADS and on of token `program_id(0)`.

    The first half of a head holds the real parts of its complex numbers, the second half the imaginary parts.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    columns = tl.arange(0, HALF_WIDTH)[None, :]
    HALF: tl.constexpr = SIZE // 2
    is_column = columns < HALF
    mask = (heads < NUM_QUERY_HEADS + NUM_KV_HEADS) & is_column
    cells = rows + (token * (NUM_QUERY_HEADS + 2 * NUM_KV_HEADS) + heads) * SIZE + columns
    first = tl.load(cells, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(cells + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / SIZE + epsilon)[:, None]
        is_query = heads < NUM_QUERY_HEADS
        first *= scale * _weights(query_weight, key_weight, is_query, columns, is_column)
        second *= scale * _weights(query_weight, key_weight, is_query, columns + HALF, is_column)
    angles = token * SIZE + columns
    cosines = tl.load(cos + angles, mask=is_column, other=0.0).to(tl.float32)
    sines = tl.load(sin + angles, mask=is_column, other=0.0).to(tl.float32)
    tl.store(cells, (first * cosines - second * sines).to(rows.dtype.element_ty), mask=mask)
    tl.store(cells + HALF, (second * cosines + first * sines).to(rows.dtype.element_ty), mask=mask)


@triton.jit
def _weights(query_weight, key_weight, is_query, columns, is_column):
    of_query = tl.load(query_weight + columns, mask=is_column, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + columns, mask=is_column, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query, of_key)


@triton.jit
def silu_and_mul_kernel(gate_up, output, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Compute silu(first half) * second half for columns `program_id(1)` * TILE and on of row `program_id(0)`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = columns < SIZE
    cells = gate_up + row * (2 * SIZE) + columns
    gate = tl.load(cells, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(cells + SIZE, mask=is_column, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * SIZE + columns, gated.to(output.dtype.element_ty), mask=is_column)


@triton.jit
def find_expert(starts, NUM_EXPERTS: tl.constexpr, EXPERT_WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Return the expert of tile `program_id(1)`, the first row of the tile, and the end of the expert's rows.

    The tiles of the experts are numbered one after the other. Beyond the last tile the expert is NUM_EXPERTS or more.
    """
    tile = tl.program_id(1)
    experts = tl.arange(0, EXPERT_WIDTH)
    is_expert = experts < NUM_EXPERTS
    begins = tl.load(starts + experts, mask=is_expert, other=0).to(tl.int32)
    ends = tl.load(starts + 1 + experts, mask=is_expert, other=0).to(tl.int32)
    num_tiles = (ends - begins + TILE_ROWS - 1) // TILE_ROWS
    last_tiles = tl.cumsum(num_tiles, 0)
    expert = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    is_mine = experts == expert
    first_tile = tl.sum(tl.where(is_mine, last_tiles - num_tiles, 0), 0)
    begin = tl.sum(tl.where(is_mine, begins, 0), 0)
    return expert, begin + (tile - first_tile) * TILE_ROWS, tl.sum(tl.where(is_mine, ends, 0), 0)


@triton.jit
def find_rows(order, first, end, TOP_K: tl.constexpr, IS_FIRST: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Return for each row of a tile if it is one, its input, and its output. See `expert_linear_kernel`."""
    rows = first + tl.arange(0, TILE_ROWS)
    is_row = rows < end
    pairs = tl.load(order + rows, mask=is_row, other=0)
    if IS_FIRST:
        sources, targets = pairs // TOP_K, rows.to(tl.int64)
    else:
        sources, targets = rows.to(tl.int64), pairs
    return is_row, sources, targets


@triton.jit
def expert_linear_kernel(
    inputs,  # [num_inputs, IN_SIZE], contiguous
    weights,  # [NUM_EXPERTS, OUT_SIZE, IN_SIZE], contiguous; [NUM_EXPERTS, IN_SIZE, OUT_SIZE] if IS_TRANSPOSED
    biases,  # [NUM_EXPERTS, OUT_SIZE], contiguous
    output,  # [num_pairs, OUT_SIZE], contiguous
    order,  # [num_pairs] int64: pairs of a token and an expert, sorted by expert
    starts,  # [NUM_EXPERTS + 1] int64: first pair of each expert in `order`, and the number of pairs
    IN_SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    IS_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
):
    """Multiply the rows of each expert with the expert's matrix. One program computes a tile of the output.

    If IS_FIRST, the row of a pair is that of its token, pair // TOP_K, and the output has the order of `order`. Else
    the rows have that order, and the output has the order of the pairs.

    Which rows a program has follows from `starts`: see `find_expert`. Programs beyond the last tile do nothing.
    """
    expert, first, end = find_expert(starts, NUM_EXPERTS, EXPERT_WIDTH, TILE_ROWS)
    if expert >= NUM_EXPERTS:
        return
    is_row, sources, targets = find_rows(order, first, end, TOP_K, IS_FIRST, TILE_ROWS)
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = columns < OUT_SIZE
    inner = tl.arange(0, TILE_INNER)
    row_inputs = inputs + sources[:, None] * IN_SIZE + inner[None, :]
    in_stride = OUT_SIZE if IS_TRANSPOSED else 1
    out_stride = 1 if IS_TRANSPOSED else IN_SIZE
    matrix = weights + expert.to(tl.int64) * (IN_SIZE * OUT_SIZE)
    matrix_tile = matrix + inner[:, None] * in_stride + columns[None, :] * out_stride
    sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for first in range(0, IN_SIZE, TILE_INNER):
        is_inner = inner < IN_SIZE - first
        left = tl.load(row_inputs + first, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        right = tl.load(matrix_tile + first * in_stride, mask=is_inner[:, None] & is_column[None, :], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(biases + expert * OUT_SIZE + columns, mask=is_column, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    where = output + targets[:, None] * OUT_SIZE + columns[None, :]
    tl.store(where, sums.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    inputs,  # [num_rows, IN_SIZE], contiguous
    weight,  # [IN_SIZE, OUT_SIZE], contiguous; [OUT_SIZE, IN_SIZE] if IS_TRANSPOSED
    bias,  # [OUT_SIZE]
    output,  # [num_rows, OUT_SIZE], contiguous; [NUM_PARTS, num_rows, OUT_SIZE] float32 if IS_SPLIT
    num_rows,
    IN_SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART_SIZE: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
):
    """Compute a tile of the product of inputs and weight; if IS_SPLIT, part `program_id(2)` of its sums.

    The order of an output's sum depends on IN_SIZE, PART_SIZE and TILE_INNER: parts are summed each from zero, and
    added in their order, here or by `add_parts_kernel`.
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_row = rows < num_rows
    is_column = columns < OUT_SIZE
    cells = rows.to(tl.int64)[:, None] * OUT_SIZE + columns[None, :]
    is_cell = is_row[:, None] & is_column[None, :]
    row_inputs = inputs + rows.to(tl.int64)[:, None] * IN_SIZE
    column_weights = weight + columns.to(tl.int64)[None, :] * (IN_SIZE if IS_TRANSPOSED else 1)
    part = tl.program_id(2) if IS_SPLIT else 0
    sums = _part_of_product(
        row_inputs, column_weights, is_row, is_column, part, IN_SIZE, OUT_SIZE, PART_SIZE, IS_TRANSPOSED,
        TILE_ROWS, TILE_COLUMNS, TILE_INNER,
    )  # fmt: skip
    if IS_SPLIT:
        tl.store(output + tl.program_id(2).to(tl.int64) * num_rows * OUT_SIZE + cells, sums, mask=is_cell)
        return
    for part in range(1, NUM_PARTS):
        sums += _part_of_product(
            row_inputs, column_weights, is_row, is_column, part, IN_SIZE, OUT_SIZE, PART_SIZE, IS_TRANSPOSED,
            TILE_ROWS, TILE_COLUMNS, TILE_INNER,
        )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(output + cells, sums.to(output.dtype.element_ty), mask=is_cell)


@triton.jit
def _part_of_product(
    row_inputs, column_weights, is_row, is_column, part,
    IN_SIZE: tl.constexpr, OUT_SIZE: tl.constexpr, PART_SIZE: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_INNER: tl.constexpr,
):  # fmt: skip
    """Return the sums over inputs [part * PART_SIZE, (part + 1) * PART_SIZE)."""
    in_stride = 1 if IS_TRANSPOSED else OUT_SIZE
    begin = part * PART_SIZE
    sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for first in range(begin, tl.minimum(begin + PART_SIZE, IN_SIZE), TILE_INNER):
        inner = first + tl.arange(0, TILE_INNER)
        is_inner = inner < IN_SIZE
        left = tl.load(row_inputs + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
        right_mask = is_inner[:, None] & is_column[None, :]
        right = tl.load(column_weights + inner[:, None] * in_stride, mask=right_mask, other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def add_parts_kernel(
    parts, bias, output, num_rows, OUT_SIZE: tl.constexpr, NUM_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Add up a tile of row `program_id(0)` of `parts` [NUM_PARTS, num_rows, OUT_SIZE] float32 in their order."""
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = columns < OUT_SIZE
    row = tl.program_id(0).to(tl.int64)
    sums = tl.load(parts + row * OUT_SIZE + columns, mask=is_column, other=0.0)
    for part in range(1, NUM_PARTS):
        where = parts + (row + part * num_rows) * OUT_SIZE
        sums += tl.load(where + columns, mask=is_column, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(
        output + tl.program_id(0).to(tl.int64) * OUT_SIZE + columns, sums.to(output.dtype.element_ty), mask=is_column
    )


@triton.jit(do_not_specialize=["size"])
def row_sum_kernel(rows, sums, size, TILE: tl.constexpr):
    """Compute the sum of row `program_id(0)` of `rows` [num_rows, size], contiguous, in float32."""
    columns = tl.arange(0, TILE)
    row = rows + tl.program_id(0).to(tl.int64) * size
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, size, TILE):
        total += tl.load(row + first + columns, mask=first + columns < size, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
