"""Triton kernels of linear layers whose weights are in panels of 4 or 8 bits. See `panels.py` for their layout.

Numbers become exact values of the inputs' type in registers, by their bits. Their products are summed in float32, and
the sum of a group of inputs is multiplied by its scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replicas.model.attention.triton_kernels import quantized
from replicas.model.layers.panels import PANEL, PanelFormat
from replicas.model.layers.triton_kernels import find_expert, find_rows

_PANEL = tl.constexpr(PANEL)
_INT4 = tl.constexpr(PanelFormat.INT4.value)
_TABLE4 = tl.constexpr(PanelFormat.TABLE4.value)
_FLOAT4 = tl.constexpr(PanelFormat.FLOAT4.value)
_INT8 = tl.constexpr(PanelFormat.INT8.value)


@triton.jit
def _from_bits(bits, IS_BFLOAT16: tl.constexpr):
    """Return numbers in bfloat16, or else float32, from the bits uint16 of bfloat16."""
    if IS_BFLOAT16:
        numbers = bits.to(tl.bfloat16, bitcast=True)
    else:
        numbers = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return numbers


@triton.jit
def _values(numbers, table, FORMAT: tl.constexpr, TYPE: tl.constexpr):
    """Return the values of numbers uint8 in TYPE, exactly. Those of INT4 are 8 less than the numbers.

    The bits 0x4300 | n are 128 + n in bfloat16 for n < 128, and 0x4380 is 256. Those of a float of 8 or 4 bits, moved
    to the fields of bfloat16, are 2 ** -120 or 2 ** -126 times its value.
    """
    IS_BFLOAT16: tl.constexpr = TYPE.is_bf16()
    bits = numbers.to(tl.uint16)
    if FORMAT == _TABLE4:
        values = tl.load(table + numbers)
    elif FORMAT == _INT4:
        values = _from_bits(bits | 0x4300, IS_BFLOAT16) - 136.0
    elif FORMAT == _FLOAT4:
        values = _from_bits(((bits & 8) << 12) | ((bits & 7) << 6), IS_BFLOAT16) * 8.507059173023462e37
    elif FORMAT == _INT8:
        low = _from_bits((bits & 0x7F) | 0x4300, IS_BFLOAT16)
        values = low - _from_bits((bits & 0x80) | 0x4300, IS_BFLOAT16)
    else:
        signed = numbers.to(tl.int8, bitcast=True).to(tl.int16).to(tl.uint16, bitcast=True)
        values = _from_bits((signed << 4) & 0x87F0, IS_BFLOAT16) * 1.329227995784916e36
    return values.to(TYPE)


@triton.jit
def _scaled(part, input_sums, scales, zero_points, is_column, MIDDLE: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr):
    """Return the sums of a group from those of its numbers; `scales` and `zero_points` point to its outputs'."""
    if HAS_ZERO_POINTS:
        zeros = tl.load(zero_points, mask=is_column, other=0).to(tl.float32) - MIDDLE
        part -= zeros[:, None] * input_sums[None, :]
    return part * tl.load(scales, mask=is_column, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _add_products(
    part, input_sums, numbers, table, row_inputs, is_row, first, in_size,
    FORMAT: tl.constexpr, BYTES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr,
):  # fmt: skip
    """Add the products of numbers [COLUMNS, BYTES] with inputs [first, first + BYTES), and the sums of those inputs."""
    inner = first + tl.arange(0, BYTES)
    rows = tl.load(row_inputs + inner[None, :], mask=is_row[:, None] & (inner < in_size)[None, :], other=0.0)
    part = tl.dot(_values(numbers, table, FORMAT, rows.dtype), tl.trans(rows), part, input_precision="ieee")
    if HAS_ZERO_POINTS:
        input_sums += tl.sum(rows.to(tl.float32), 1)
    return part, input_sums


@triton.jit
def _panel_sums(
    row_inputs, is_row, stored, table, scales, zero_points, is_column, begin, end, out_size, in_size,
    FORMAT: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, HAS_ONE_GROUP: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sums [TILE_COLUMNS, TILE_ROWS] over units [begin, end).

    `stored` points to the first unit of each output, `scales` and `zero_points` to those of its first group.
    """
    IS_4_BITS: tl.constexpr = FORMAT <= _FLOAT4
    UNIT: tl.constexpr = 2 * BYTES if IS_4_BITS else BYTES
    none = tl.zeros([TILE_COLUMNS, TILE_ROWS], tl.float32)
    no_inputs = tl.zeros([TILE_ROWS], tl.float32)
    sums, part, input_sums = none, none, no_inputs
    for unit in range(begin, end):
        tile = tl.load(stored + unit * (_PANEL * BYTES), mask=is_column[:, None], other=0)
        first = unit * UNIT
        if IS_4_BITS:
            part, input_sums = _add_products(
                part, input_sums, tile & 15, table, row_inputs, is_row, first, in_size, FORMAT, BYTES, HAS_ZERO_POINTS
            )
            if GROUP == BYTES:  # The halves are groups of their own.
                group = first // GROUP * out_size
                sums += _scaled(
                    part, input_sums, scales + group, zero_points + group, is_column, MIDDLE, HAS_ZERO_POINTS
                )
                part, input_sums = none, no_inputs
            first += BYTES
            tile >>= 4
        part, input_sums = _add_products(
            part, input_sums, tile, table, row_inputs, is_row, first, in_size, FORMAT, BYTES, HAS_ZERO_POINTS
        )
        if not HAS_ONE_GROUP:
            # Inputs after the last one have no group. Their sums are 0.
            group = tl.minimum(first, in_size - 1) // GROUP * out_size
            sums += _scaled(part, input_sums, scales + group, zero_points + group, is_column, MIDDLE, HAS_ZERO_POINTS)
            part, input_sums = none, no_inputs
    if HAS_ONE_GROUP:
        sums = _scaled(part, input_sums, scales, zero_points, is_column, MIDDLE, HAS_ZERO_POINTS)
    return sums


@triton.jit(do_not_specialize=["num_rows", "out_size", "in_sixteenths", "part_units"])
def panel_linear_kernel(
    inputs,  # [num_rows, in_size], contiguous
    numbers,  # [num_panels, num_units, PANEL, BYTES] uint8
    scales,  # [num_groups, out_size]
    zero_points,  # [num_groups, out_size]
    table,  # [16] bfloat16
    bias,  # [out_size]
    output,  # [num_rows, out_size], contiguous; [num_parts, num_rows, out_size] float32 if IS_SPLIT
    num_rows,
    out_size,
    in_sixteenths,
    part_units,
    FORMAT: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ONE_GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Compute a tile of the product of inputs and weight; if IS_SPLIT, the sums over units of part `program_id(2)`.

    The weight's outputs are the rows of the matrix instruction, so few rows of inputs fill it.
    """
    IS_4_BITS: tl.constexpr = FORMAT <= _FLOAT4
    UNIT: tl.constexpr = 2 * BYTES if IS_4_BITS else BYTES
    in_size = in_sixteenths * 16  # So the compiler knows that rows are aligned.
    num_units = tl.cdiv(in_size, UNIT)
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    rows = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_column = columns < out_size
    is_row = rows < num_rows
    row_inputs = inputs + rows.to(tl.int64)[:, None] * in_size
    places = (columns // _PANEL).to(tl.int64) * num_units * _PANEL + columns % _PANEL
    stored = numbers + places[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    scales += columns
    zero_points += columns
    begin = tl.program_id(2) * part_units
    sums = _panel_sums(
        row_inputs, is_row, stored, table, scales, zero_points, is_column, begin,
        tl.minimum(begin + part_units, num_units), out_size, in_size, FORMAT, BYTES, GROUP, HAS_ONE_GROUP, MIDDLE,
        HAS_ZERO_POINTS, TILE_ROWS, TILE_COLUMNS,
    )  # fmt: skip
    cells = rows.to(tl.int64)[None, :] * out_size + columns[:, None]
    is_cell = is_row[None, :] & is_column[:, None]
    if IS_SPLIT:
        tl.store(output + tl.program_id(2).to(tl.int64) * num_rows * out_size + cells, sums, mask=is_cell)
        return
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    tl.store(output + cells, sums.to(output.dtype.element_ty), mask=is_cell)


@triton.jit
def panel_expert_kernel(
    inputs,  # [num_inputs, IN_SIZE], contiguous
    numbers,  # [NUM_EXPERTS, num_panels, num_units, PANEL, BYTES] uint8
    scales,  # [NUM_EXPERTS, NUM_GROUPS, OUT_SIZE]
    zero_points,  # [NUM_EXPERTS, NUM_GROUPS, OUT_SIZE]
    table,  # [16] bfloat16
    biases,  # [NUM_EXPERTS, OUT_SIZE]
    output,  # [num_pairs, OUT_SIZE], contiguous
    order,  # [num_pairs] int64: pairs of a token and an expert, sorted by expert
    starts,  # [NUM_EXPERTS + 1] int64: first pair of each expert in `order`, and the number of pairs
    IN_SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_FIRST: tl.constexpr,
    FORMAT: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Multiply the rows of each expert with the expert's weight. See `expert_linear_kernel` for rows and pairs."""
    UNIT: tl.constexpr = 2 * BYTES if FORMAT <= _FLOAT4 else BYTES
    NUM_UNITS: tl.constexpr = (IN_SIZE + UNIT - 1) // UNIT
    PANEL_BYTES: tl.constexpr = NUM_UNITS * _PANEL * BYTES
    EXPERT_BYTES: tl.constexpr = (OUT_SIZE + _PANEL - 1) // _PANEL * PANEL_BYTES
    expert, first, end = find_expert(starts, NUM_EXPERTS, EXPERT_WIDTH, TILE_ROWS)
    if expert >= NUM_EXPERTS:
        return
    is_row, sources, targets = find_rows(order, first, end, TOP_K, IS_FIRST, TILE_ROWS)
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = columns < OUT_SIZE
    places = (columns // _PANEL) * PANEL_BYTES + columns % _PANEL * BYTES
    stored = numbers + expert.to(tl.int64) * EXPERT_BYTES + places[:, None] + tl.arange(0, BYTES)[None, :]
    groups = expert.to(tl.int64) * (NUM_GROUPS * OUT_SIZE) + columns
    sums = _panel_sums(
        inputs + sources[:, None] * IN_SIZE, is_row, stored, table, scales + groups, zero_points + groups, is_column, 0,
        NUM_UNITS, OUT_SIZE, IN_SIZE, FORMAT, BYTES, GROUP, NUM_GROUPS == 1, MIDDLE, HAS_ZERO_POINTS, TILE_ROWS,
        TILE_COLUMNS,
    )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(biases + expert * OUT_SIZE + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    where = output + targets[None, :] * OUT_SIZE + columns[:, None]
    tl.store(where, sums.to(output.dtype.element_ty), mask=is_row[None, :] & is_column[:, None])


@triton.jit(do_not_specialize=["first_panel", "out_size", "in_sixteenths"])
def widen_kernel(
    numbers,  # [num_panels, num_units, PANEL, BYTES] uint8
    scales,  # [num_groups, out_size]
    zero_points,  # [num_groups, out_size]
    table,  # [16] bfloat16
    output,  # [outputs from first_panel on, in_size], contiguous
    first_panel,
    out_size,
    in_sixteenths,
    FORMAT: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    MIDDLE: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
):
    """Write the values of unit `program_id(0)` of panel `first_panel` + `program_id(1)`, each rounded once."""
    IS_4_BITS: tl.constexpr = FORMAT <= _FLOAT4
    in_size = in_sixteenths * 16
    num_units = tl.num_programs(0)
    panel = first_panel + tl.program_id(1)
    place = panel.to(tl.int64) * num_units + tl.program_id(0)
    lanes = tl.arange(0, _PANEL)
    inner = tl.arange(0, BYTES)
    tile = tl.load(numbers + (place * _PANEL + lanes)[:, None] * BYTES + inner[None, :])
    columns = panel * _PANEL + lanes
    target = output + (tl.program_id(1).to(tl.int64) * _PANEL + lanes)[:, None] * in_size
    first = tl.program_id(0) * (2 * BYTES if IS_4_BITS else BYTES)
    if IS_4_BITS:
        _store_values(
            tile & 15, target, scales, zero_points, table, columns, first, out_size, in_size,
            FORMAT, BYTES, GROUP, MIDDLE, HAS_ZERO_POINTS,
        )  # fmt: skip
        first += BYTES
        tile >>= 4
    _store_values(
        tile, target, scales, zero_points, table, columns, first, out_size, in_size,
        FORMAT, BYTES, GROUP, MIDDLE, HAS_ZERO_POINTS,
    )  # fmt: skip


@triton.jit
def _store_values(
    numbers, target, scales, zero_points, table, columns, first, out_size, in_size,
    FORMAT: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr,
    HAS_ZERO_POINTS: tl.constexpr,
):  # fmt: skip
    """Write the values of numbers [PANEL, BYTES] of inputs [first, first + BYTES)."""
    inner = first + tl.arange(0, BYTES)
    is_column = columns < out_size
    group = tl.minimum(first, in_size - 1) // GROUP * out_size
    values = _values(numbers, table, FORMAT, tl.float32)
    if HAS_ZERO_POINTS:
        zeros = tl.load(zero_points + group + columns, mask=is_column, other=0).to(tl.float32)
        values = values + MIDDLE - zeros[:, None]
    values *= tl.load(scales + group + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    is_cell = is_column[:, None] & (inner < in_size)[None, :]
    tl.store(target + inner[None, :], values.to(target.dtype.element_ty), mask=is_cell)


@triton.jit
def round_rows_kernel(
    rows,  # [num_rows, SIZE], contiguous
    numbers,  # [num_rows, SIZE] uint8
    scales,  # [num_rows] float32
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Round row `program_id(0)` to e4m3, so that its largest number becomes 448."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)[None, :]
    is_column = columns < SIZE
    values = tl.load(rows + row * SIZE + columns, mask=is_column, other=0.0)
    bits, scale = quantized(values, True)
    tl.store(numbers + row * SIZE + columns, bits.to(tl.uint8), mask=is_column)
    tl.store(scales + row + tl.zeros([1, 1], tl.int32), scale)
