"""Triton kernel of sampling from the most probable tokens of a row, without a sort, for CUDA devices.

Logits are ordered by keys: unsigned integers in the same order. A set of the most probable tokens is all keys above
one, and the first of the tokens with that key by id. Four-way searches find such a key by the tokens above it: by their
number for top-k, by their mass for top-p and for the draw. The mass of a token is its weight as an integer, so sums
do not depend on the order of additions.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _keys_of(values):
    """Return unsigned integers in the order of `values`; both zeros have one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _packed(values, cells):
    """Return int64 numbers in the order of `values`, equal ones by falling `cells`; a NaN is before all numbers."""
    keys = tl.where(values == values, _keys_of(values), 0xFFFFFFFF).to(tl.int64)
    return (keys << 31) | (0x7FFFFFFF - cells)


@triton.jit
def peak_kernel(logits, peaks, vocab_size, stride, part_size, TILE: tl.constexpr):
    """Raise `peaks[program_id(0)]` to the largest packed logit of part `program_id(1)` of the row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * part_size
    last = tl.minimum(first + part_size, vocab_size)
    highest = tl.zeros([TILE], tl.int64)
    for begin in range(first, last, TILE):
        cells = begin + tl.arange(0, TILE)
        values = tl.load(logits + row * stride + cells, mask=cells < last, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, tl.where(cells < last, _packed(values, cells), 0))
    tl.atomic_max(peaks + row, tl.max(highest, 0), sem="relaxed")


@triton.jit
def score_kernel(
    logits, best, log_sums, vocab_size, stride, num_parts, TILE: tl.constexpr, NUM_TOP: tl.constexpr
):  # fmt: skip
    """Find the most probable tokens and the weights of part `program_id(1)`, TILE tokens, of row `program_id(0)`.

    `best` [num_rows, num_parts, NUM_TOP] int64 gets the largest packed logits, the largest first. What is missing is 0,
    which is below all packed logits. `log_sums` [num_rows, num_parts] gets the logarithm of the sum of all weights.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cells = part * TILE + tl.arange(0, TILE)
    is_cell = cells < vocab_size
    values = tl.load(logits + row * stride + cells, mask=is_cell, other=float("-inf")).to(tl.float32)
    peak = tl.max(values, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(log_sums + row * num_parts + part, peak + tl.log(tl.sum(tl.exp(values - peak), 0)))
    packed = tl.where(is_cell, _packed(values, cells), 0)
    where = best + (row * num_parts + part) * NUM_TOP
    for number in range(NUM_TOP):
        highest = tl.max(packed, 0)
        tl.store(where + number, highest)
        packed = tl.where(packed == highest, 0, packed)


@triton.jit
def _values_of(keys):
    bits = tl.where((keys >> 31) == 1, keys & 0x7FFFFFFF, keys ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _masses_of(values, peak, temperature, min_p, WHOLE: tl.constexpr):
    weights = tl.exp((values - peak) / temperature)
    return tl.where(weights >= min_p, weights * WHOLE, 0.0).to(tl.int64)


@triton.jit
def _sums_above(
    start, is_row, vocab_size, peak, temperature, min_p, first, second, third, counts,
    TILE_ROWS: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the masses above three keys, each [TILE_ROWS] int64; with `counts` the numbers of tokens above them."""
    above_first = tl.zeros([TILE_ROWS, TILE], tl.int64)
    above_second = tl.zeros([TILE_ROWS, TILE], tl.int64)
    above_third = tl.zeros([TILE_ROWS, TILE], tl.int64)
    for begin in range(0, vocab_size, TILE):
        columns = begin + tl.arange(0, TILE)
        is_cell = is_row[:, None] & (columns < vocab_size)[None, :]
        values = tl.load(start[:, None] + columns[None, :], mask=is_cell, other=float("-inf"))
        keys = _keys_of(values)
        masses = _masses_of(values, peak[:, None], temperature[:, None], min_p[:, None], WHOLE)
        masses = tl.where(is_cell, tl.where(counts > 0, 1, masses), 0)
        above_first += tl.where(keys > first[:, None], masses, 0)
        above_second += tl.where(keys > second[:, None], masses, 0)
        above_third += tl.where(keys > third[:, None], masses, 0)
    return tl.sum(above_first, 1), tl.sum(above_second, 1), tl.sum(above_third, 1)


@triton.jit
def _row_params(columns, index, is_row, vocab_size):
    """Return uniform number, temperature, top-p, min-p and top-k of rows."""
    params = columns + index * 5
    uniform = tl.load(params, mask=is_row, other=0.0)
    temperature = tl.load(params + 1, mask=is_row, other=1.0).to(tl.float32)
    top_p = tl.load(params + 2, mask=is_row, other=1.0)
    min_p = tl.load(params + 3, mask=is_row, other=0.0).to(tl.float32)
    top_k = tl.minimum(tl.load(params + 4, mask=is_row, other=1.0), vocab_size).to(tl.int64)
    return uniform, temperature, top_p, min_p, top_k


@triton.jit
def _keys_of_digit(key, digit, TILE_ROWS: tl.constexpr):
    """Return the place of a digit of two bits, and the greatest keys that have 0, 1 and 2 there."""
    shift = (tl.zeros([TILE_ROWS], tl.int32) + (30 - 2 * digit)).to(tl.uint32)
    one = (tl.zeros([TILE_ROWS], tl.uint32) + 1) << shift
    rest = one - 1
    return shift, key | rest, key | one | rest, key | (one << 1) | rest


@triton.jit
def _with_digit(key, above, bound, shift, first, second, third):
    """Return the key with its next digit, and the sum above it; `first` to `third` are those above the three keys."""
    above = tl.where(third < bound, third, above)
    above = tl.where(second < bound, second, above)
    above = tl.where(first < bound, first, above)
    passed = (first >= bound).to(tl.uint32) + (second >= bound).to(tl.uint32) + (third >= bound).to(tl.uint32)
    return key | (passed << shift), above


@triton.jit
def _unknown_bits(key, num_digits):
    unknown = (32 - 2 * num_digits).to(tl.uint32)
    return ((tl.zeros_like(key) + 1) << unknown) - 1


@triton.jit
def _search(
    bound, start, is_row, vocab_size, peak, temperature, min_p, counts, num_digits,
    TILE_ROWS: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the least key above which the sum is below `bound`, its unknown bits set, and that sum."""
    key = tl.zeros([TILE_ROWS], tl.uint32)
    above = tl.zeros([TILE_ROWS], tl.int64)
    for digit in range(num_digits):
        shift, first_key, second_key, third_key = _keys_of_digit(key, digit, TILE_ROWS)
        first, second, third = _sums_above(
            start, is_row, vocab_size, peak, temperature, min_p, first_key, second_key, third_key,
            counts, TILE_ROWS, TILE, WHOLE,
        )  # fmt: skip
        key, above = _with_digit(key, above, bound, shift, first, second, third)
    return key | _unknown_bits(key, num_digits), above


@triton.jit
def _mass_of_key(key, num_digits, peak, temperature, min_p, WHOLE: tl.constexpr):
    """Return the mass of a token with this key. Of a key with unknown bits, those of its value are zeros."""
    ones = _unknown_bits(key, num_digits)
    key = tl.where((key >> 31) == 1, key - (key & ones), key | ones)
    return _masses_of(_values_of(key), peak, temperature, min_p, WHOLE)


@triton.jit
def penalize_kernel(
    logits, rows, slots, penalties, counts, vocab_size, stride, TILE: tl.constexpr, IN_PROMPT: tl.constexpr
):  # fmt: skip
    """Change a tile of row `rows[program_id(0)]` of `logits` by the penalties and counts of the row.

    The arguments are those of `Penalize`. Rounding is that of plain torch: penalties apply in float32, and the sum of
    presence and frequency penalties is rounded once.
    """
    index = tl.program_id(0)
    cells = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_cell = cells < vocab_size
    count = tl.load(counts + tl.load(slots + index) * vocab_size + cells, mask=is_cell, other=0)
    repetition = tl.load(penalties + 3 * index).to(tl.float32)
    presence = tl.load(penalties + 3 * index + 1)
    frequency = tl.load(penalties + 3 * index + 2)
    where = logits + tl.load(rows + index) * stride + cells
    before = tl.load(where, mask=is_cell, other=0.0)
    factor = tl.zeros([TILE], tl.float32) + repetition
    scaled = tl.where(before > 0, tl.div_rn(before, factor), before * factor)
    num_outputs = count & (IN_PROMPT - 1)
    offsets = (-presence - frequency * num_outputs.to(tl.float64)).to(tl.float32)
    after = tl.where(num_outputs > 0, scaled + offsets, scaled)
    tl.store(where, after, mask=is_cell & (count != 0))


@triton.jit
def mask_kernel(logits, bits, vocab_size, stride, bits_stride, TILE: tl.constexpr):
    """Change a tile of row `program_id(0)` of `logits` to -inf for each token whose bit in the row of `bits` is 0."""
    row = tl.program_id(0).to(tl.int64)
    cells = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_cell = cells < vocab_size
    byte = tl.load(bits + row * bits_stride + cells // 8, mask=is_cell, other=255).to(tl.int32)
    is_forbidden = is_cell & (((byte >> (cells % 8)) & 1) == 0)
    where = logits + row * stride + cells
    before = tl.load(where, mask=is_forbidden, other=0.0)
    tl.store(where, before + float("-inf"), mask=is_forbidden)  # A NaN remains one.


@triton.jit
def mass_kernel(
    logits, rows, columns, peaks, masses, vocab_size, stride, TILE: tl.constexpr, NUM_PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the mass of part `program_id(1)` of row `rows[program_id(0)]` to `masses` [num_rows, NUM_PARTS] int64.

    A part is TILE tokens; those beyond the row have no mass. Rows of temperature 0 have no masses.
    """
    index, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(columns + index * 5 + 1).to(tl.float32)
    if temperature == 0.0:
        return
    row = tl.load(rows + index)
    start = logits + row * stride
    peak = tl.load(start + tl.load(peaks + row)).to(tl.float32)
    cells = part * TILE + tl.arange(0, TILE)
    values = tl.load(start + cells, mask=cells < vocab_size, other=float("-inf")).to(tl.float32)
    tl.store(masses + index * NUM_PARTS + part, tl.sum(_masses_of(values, peak, temperature, 0.0, WHOLE), 0))


@triton.jit
def full_kernel(
    logits, rows, columns, peaks, masses, tokens, vocab_size, stride, TILE: tl.constexpr, NUM_PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Draw `tokens[program_id(0)]` from the whole row, whose parts have `masses`: the first at which they are reached.

    Rows of temperature 0 keep their tokens.
    """
    index = tl.program_id(0)
    temperature = tl.load(columns + index * 5 + 1).to(tl.float32)
    if temperature == 0.0:
        return
    of_parts = tl.load(masses + index * NUM_PARTS + tl.arange(0, NUM_PARTS))
    sums = tl.cumsum(of_parts, 0)
    total = tl.sum(of_parts, 0)
    reached = tl.minimum((tl.load(columns + index * 5) * total.to(tl.float64)).to(tl.int64), total - 1)
    part = tl.sum((sums <= reached).to(tl.int32), 0)
    reached -= tl.sum(tl.where(sums <= reached, of_parts, 0), 0)
    row = tl.load(rows + index)
    start = logits + row * stride
    peak = tl.load(start + tl.load(peaks + row)).to(tl.float32)
    cells = part * TILE + tl.arange(0, TILE)
    values = tl.load(start + cells, mask=cells < vocab_size, other=float("-inf")).to(tl.float32)
    inside = tl.cumsum(_masses_of(values, peak, temperature, 0.0, WHOLE), 0)
    token = part * TILE + tl.sum((inside <= reached).to(tl.int32), 0)
    tl.store(tokens + index, tl.minimum(token, vocab_size - 1).to(tl.int64))  # Of a row without numbers, any token.


@triton.jit(do_not_specialize=["num_rows", "has_top_k", "has_top_p"])
def draw_kernel(
    logits, rows, columns, tokens, num_rows, vocab_size, stride, has_top_k, has_top_p,
    TILE_ROWS: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Draw a token for rows [program_id(0) * TILE_ROWS, ...) of `rows`, which are rows of `logits` [., vocab_size].

    Rows whose token is not -1 keep it.

    `columns` [num_rows, 5] float64 holds uniform number, temperature, top-p, min-p and top-k of each row. WHOLE is the
    mass of the most probable token, a power of 2. The masses of all tokens fit 63 bits.
    """
    index = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = (index < num_rows) & (tl.load(tokens + index, mask=index < num_rows, other=0) < 0)
    if tl.max(is_row.to(tl.int32), 0) == 0:
        return
    start = logits + tl.load(rows + index, mask=is_row, other=0) * stride
    uniform, temperature, top_p, min_p, top_k = _row_params(columns, index, is_row, vocab_size)

    highest = tl.full([TILE_ROWS, TILE], float("-inf"), tl.float32)
    fraction = tl.zeros([TILE_ROWS, TILE], tl.uint32)
    for begin in range(0, vocab_size, TILE):
        cells = begin + tl.arange(0, TILE)
        is_cell = is_row[:, None] & (cells < vocab_size)[None, :]
        values = tl.load(start[:, None] + cells[None, :], mask=is_cell, other=float("-inf"))
        highest = tl.maximum(highest, values)
        fraction = fraction | (values.to(tl.uint32, bitcast=True) & 0xFFFF)
    peak = tl.max(highest, 1)
    # Logits in bfloat16 have 16 bits; the others are zeros, and need no search.
    num_digits = tl.where(tl.max(tl.max(fraction.to(tl.int32), 1), 0) == 0, 8, 16)

    last = tl.zeros([TILE_ROWS], tl.uint32)
    num_last = tl.zeros([TILE_ROWS], tl.int64)
    if has_top_k > 0:
        last, num_above = _search(
            top_k, start, is_row, vocab_size, peak, temperature, min_p, 1, num_digits, TILE_ROWS, TILE, WHOLE
        )
        num_last = top_k - num_above
    total, _, _ = _sums_above(
        start, is_row, vocab_size, peak, temperature, min_p, last, last, last, 0, TILE_ROWS, TILE, WHOLE
    )  # fmt: skip
    total += num_last * _mass_of_key(last, num_digits, peak, temperature, min_p, WHOLE)
    if has_top_p > 0:
        bound = tl.minimum(tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1), total)
        least, above = _search(
            bound, start, is_row, vocab_size, peak, temperature, min_p, 0, num_digits, TILE_ROWS, TILE, WHOLE
        )
        mass = tl.maximum(_mass_of_key(least, num_digits, peak, temperature, min_p, WHOLE), 1)
        total = above + (bound - above + mass - 1) // mass * mass
    reached = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    chosen, above = _search(
        reached + 1, start, is_row, vocab_size, peak, temperature, min_p, 0, num_digits, TILE_ROWS, TILE, WHOLE
    )
    rank = (reached - above) // tl.maximum(_mass_of_key(chosen, num_digits, peak, temperature, min_p, WHOLE), 1)

    unknown = (32 - 2 * num_digits).to(tl.uint32)
    seen = tl.zeros([TILE_ROWS], tl.int64)
    token = tl.zeros([TILE_ROWS], tl.int32)
    for begin in range(0, vocab_size, TILE):
        cells = begin + tl.arange(0, TILE)
        is_cell = is_row[:, None] & (cells < vocab_size)[None, :]
        values = tl.load(start[:, None] + cells[None, :], mask=is_cell, other=float("-inf"))
        is_equal = (((_keys_of(values) >> unknown) == (chosen >> unknown)[:, None]) & is_cell).to(tl.int32)
        order = seen[:, None] + tl.cumsum(is_equal, 1) - 1
        is_token = (is_equal > 0) & (order == rank[:, None])
        token = tl.maximum(token, tl.max(tl.where(is_token, cells[None, :], 0), 1))
        seen += tl.sum(is_equal, 1)
    tl.store(tokens + index, token.to(tl.int64), mask=is_row)
