"""Triton kernels of the draw by several programs a row, which guess where the drawn token is and prove it.

1. `count_kernel` counts a row's tokens in buckets by their distance from the most probable one. Its programs divide the
   row. Every sum of these kernels is one of integers, which has no order.
2. `bracket_kernel` estimates the masses of the buckets, and from them a few buckets around each of three tokens: the
   last one of top-k, the last one of top-p, and the drawn one.
3. `gather_kernel` adds up the masses of the tokens before each bracket, and lists the tokens within them.
4. `settle_kernel` finds the three tokens in the list, as `draw_kernel` does in the whole row. It keeps the result if
   each sum is reached within its bracket. Else `draw_kernel` draws.

Of a row, `sums` [num_rows, 5] int64 has the masses before the three brackets, the mass of all tokens and the number of
listed ones; `brackets` [num_rows, 8] int32 has the first bucket and the end of each bracket, and the number of tokens
before the first one. Buckets are numbered from the most probable token on; no token in the last one has any mass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replicas.model.sampling.triton_kernels import (
    _keys_of,
    _keys_of_digit,
    _mass_of_key,
    _masses_of,
    _row_params,
    _unknown_bits,
    _with_digit,
)

_NEAR = tl.constexpr(1.0 / 2048)
"""Share of a sum by which an estimate may be wrong: buckets are narrow, and errors of their tokens cancel."""


@triton.jit
def _buckets_of(values, peak, temperature, scale, NUM_BUCKETS: tl.constexpr):
    distances = tl.minimum((peak - values) / temperature * scale, NUM_BUCKETS - 1.0)
    return tl.minimum(tl.maximum(distances.to(tl.int32), 0), NUM_BUCKETS - 1)


@triton.jit
def count_kernel(
    logits, rows, peaks, columns, counts, vocab_size, stride, scale, part_size,
    TILE: tl.constexpr, NUM_BUCKETS: tl.constexpr,
):  # fmt: skip
    """Add the tokens of part `program_id(1)` of row `program_id(0)` to its `counts` [NUM_BUCKETS] int32."""
    index = tl.program_id(0)
    row = tl.load(rows + index)
    start = logits + row * stride
    peak = tl.load(start + tl.load(peaks + row))
    temperature = tl.load(columns + index * 5 + 1).to(tl.float32)
    first = tl.program_id(1) * part_size
    last = tl.minimum(first + part_size, vocab_size)
    numbers = tl.zeros([NUM_BUCKETS], tl.int32)
    for begin in range(first, last, TILE):
        cells = begin + tl.arange(0, TILE)
        values = tl.load(start + cells, mask=cells < last, other=float("-inf"))
        numbers += tl.histogram(_buckets_of(values, peak, temperature, scale, NUM_BUCKETS), NUM_BUCKETS)
    buckets = tl.arange(0, NUM_BUCKETS)
    # The tile's cells beyond the part are in the last bucket, whose count nothing reads.
    is_needed = (numbers > 0) & (buckets < NUM_BUCKETS - 1)
    tl.atomic_add(counts + index * NUM_BUCKETS + buckets, numbers, mask=is_needed, sem="relaxed")


@triton.jit
def _around(target, before, masses, buckets, NUM_BUCKETS: tl.constexpr):
    """Return the buckets [first, end) in which an estimated sum may reach `target`."""
    is_near = (before <= target * (1.0 + _NEAR)) & (before + masses >= target * (1.0 - _NEAR)) & (masses > 0.0)
    first = tl.min(tl.where(is_near, buckets, NUM_BUCKETS - 1), 1)
    end = tl.max(tl.where(is_near, buckets + 1, 0), 1)
    return first, end


@triton.jit(do_not_specialize=["num_rows"])
def bracket_kernel(
    columns, counts, brackets, num_rows, vocab_size, scale, TILE_ROWS: tl.constexpr, NUM_BUCKETS: tl.constexpr
):  # fmt: skip
    """Write `brackets` of rows [program_id(0) * TILE_ROWS, ...)."""
    index = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = index < num_rows
    uniform, _, top_p, min_p, top_k = _row_params(columns, index, is_row, vocab_size)
    buckets = tl.arange(0, NUM_BUCKETS)[None, :]
    cells = counts + index[:, None] * NUM_BUCKETS + buckets
    number = tl.load(cells, mask=is_row[:, None] & (buckets < NUM_BUCKETS - 1), other=0)
    before = tl.cumsum(number, 1) - number
    is_last = (before < top_k[:, None]) & (before + number >= top_k[:, None]) & (top_k < vocab_size)[:, None]
    first_k = tl.min(tl.where(is_last, buckets, NUM_BUCKETS - 1), 1)
    end_k = tl.max(tl.where(is_last, buckets + 1, 0), 1)
    num_before = tl.sum(tl.where(is_last, before, 0), 1)

    weights = tl.exp(-(buckets.to(tl.float32) + 0.5) / scale)
    kept = tl.maximum(tl.minimum(number.to(tl.int64), top_k[:, None] - before), 0).to(tl.float32)
    masses = tl.where(weights >= min_p[:, None], weights, 0.0) * kept
    sums = tl.cumsum(masses, 1)
    total = tl.max(sums, 1) * tl.minimum(top_p, 1.0).to(tl.float32)
    first_p, end_p = _around(total[:, None], sums - masses, masses, buckets, NUM_BUCKETS)
    end_p = tl.where(top_p < 1.0, end_p, 0)
    reached = total * uniform.to(tl.float32)
    first_drawn, end_drawn = _around(reached[:, None], sums - masses, masses, buckets, NUM_BUCKETS)

    where = brackets + index * 8
    tl.store(where, first_k, mask=is_row)
    tl.store(where + 1, end_k, mask=is_row)
    tl.store(where + 2, first_p, mask=is_row)
    tl.store(where + 3, end_p, mask=is_row)
    tl.store(where + 4, first_drawn, mask=is_row)
    tl.store(where + 5, end_drawn, mask=is_row)
    tl.store(where + 6, num_before, mask=is_row)


@triton.jit
def _is_within(buckets, brackets, is_row, NUMBER: tl.constexpr):
    first = tl.load(brackets + 2 * NUMBER, mask=is_row, other=0)
    end = tl.load(brackets + 2 * NUMBER + 1, mask=is_row, other=0)
    return (buckets >= first[:, None]) & (buckets < end[:, None]), buckets < first[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def gather_kernel(
    logits, rows, peaks, columns, brackets, sums, listed_values, listed_ids, num_rows, vocab_size, stride, scale,
    part_size, TILE_ROWS: tl.constexpr, TILE: tl.constexpr, NUM_BUCKETS: tl.constexpr, CAPACITY: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Add the masses of part `program_id(1)` of some rows to `sums`, and its tokens within brackets to their lists."""
    index = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = index < num_rows
    row = tl.load(rows + index, mask=is_row, other=0)
    start = logits + row * stride
    peak = tl.load(start + tl.load(peaks + row, mask=is_row, other=0), mask=is_row, other=0.0)
    _, temperature, _, min_p, _ = _row_params(columns, index, is_row, vocab_size)
    bracket = brackets + index * 8
    before_k = tl.zeros([TILE_ROWS, TILE], tl.int64)
    before_p = tl.zeros([TILE_ROWS, TILE], tl.int64)
    before_drawn = tl.zeros([TILE_ROWS, TILE], tl.int64)
    total = tl.zeros([TILE_ROWS, TILE], tl.int64)
    first = tl.program_id(1) * part_size
    last = tl.minimum(first + part_size, vocab_size)
    for begin in range(first, last, TILE):
        cells = begin + tl.arange(0, TILE)[None, :]
        is_cell = is_row[:, None] & (cells < last)
        values = tl.load(start[:, None] + cells, mask=is_cell, other=float("-inf"))
        masses = _masses_of(values, peak[:, None], temperature[:, None], min_p[:, None], WHOLE)
        masses = tl.where(is_cell, masses, 0)
        buckets = _buckets_of(values, peak[:, None], temperature[:, None], scale, NUM_BUCKETS)
        in_k, is_before_k = _is_within(buckets, bracket, is_row, 0)
        in_p, is_before_p = _is_within(buckets, bracket, is_row, 1)
        in_drawn, is_before_drawn = _is_within(buckets, bracket, is_row, 2)
        total += masses
        before_k += tl.where(is_before_k, masses, 0)
        before_p += tl.where(is_before_p, masses, 0)
        before_drawn += tl.where(is_before_drawn, masses, 0)
        is_listed = ((in_k | in_p | in_drawn) & is_cell).to(tl.int32)
        number = tl.sum(is_listed, 1)
        slot = tl.atomic_add(sums + index * 5 + 4, number.to(tl.int64), mask=is_row & (number > 0), sem="relaxed")
        slots = slot[:, None] + tl.cumsum(is_listed, 1) - 1
        is_kept = (is_listed > 0) & (slots < CAPACITY)
        tl.store(listed_values + index[:, None] * CAPACITY + slots, values, mask=is_kept)
        tl.store(listed_ids + index[:, None] * CAPACITY + slots, cells + index[:, None] * 0, mask=is_kept)
    where = sums + index * 5
    tl.atomic_add(where, tl.sum(before_k, 1), mask=is_row, sem="relaxed")
    tl.atomic_add(where + 1, tl.sum(before_p, 1), mask=is_row, sem="relaxed")
    tl.atomic_add(where + 2, tl.sum(before_drawn, 1), mask=is_row, sem="relaxed")
    tl.atomic_add(where + 3, tl.sum(total, 1), mask=is_row, sem="relaxed")


@triton.jit
def _search_listed(bound, before, keys, masses, num_digits, TILE_ROWS: tl.constexpr):
    """Return the least key above which the sum is below `bound`, its unknown bits set, and that sum. See `_search`."""
    key = tl.zeros([TILE_ROWS], tl.uint32)
    above = before
    for digit in range(num_digits):
        shift, first_key, second_key, third_key = _keys_of_digit(key, digit, TILE_ROWS)
        first = before + tl.sum(tl.where(keys > first_key[:, None], masses, 0), 1)
        second = before + tl.sum(tl.where(keys > second_key[:, None], masses, 0), 1)
        third = before + tl.sum(tl.where(keys > third_key[:, None], masses, 0), 1)
        key, above = _with_digit(key, above, bound, shift, first, second, third)
    return key | _unknown_bits(key, num_digits), above


@triton.jit(do_not_specialize=["num_rows"])
def settle_kernel(
    logits, rows, peaks, columns, brackets, sums, listed_values, listed_ids, tokens, num_rows, vocab_size, stride,
    scale, TILE_ROWS: tl.constexpr, NUM_BUCKETS: tl.constexpr, CAPACITY: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the tokens of rows whose brackets hold what they have to; -1 for all others."""
    index = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = index < num_rows
    row = tl.load(rows + index, mask=is_row, other=0)
    peak = tl.load(logits + row * stride + tl.load(peaks + row, mask=is_row, other=0), mask=is_row, other=0.0)
    uniform, temperature, top_p, min_p, top_k = _row_params(columns, index, is_row, vocab_size)
    bracket, where = brackets + index * 8, sums + index * 5
    before_p = tl.load(where + 1, mask=is_row, other=0)
    before_drawn = tl.load(where + 2, mask=is_row, other=0)
    num_listed = tl.load(where + 4, mask=is_row, other=0)
    slots = tl.arange(0, CAPACITY)[None, :]
    is_listed = is_row[:, None] & (slots < num_listed[:, None])
    values = tl.load(listed_values + index[:, None] * CAPACITY + slots, mask=is_listed, other=float("-inf"))
    ids = tl.load(listed_ids + index[:, None] * CAPACITY + slots, mask=is_listed, other=0)
    keys = _keys_of(values)
    masses = _masses_of(values, peak[:, None], temperature[:, None], min_p[:, None], WHOLE)
    buckets = _buckets_of(values, peak[:, None], temperature[:, None], scale, NUM_BUCKETS)
    fraction = tl.where(is_listed, (values.to(tl.uint32, bitcast=True) & 0xFFFF).to(tl.int32), 0)
    num_digits = tl.where(tl.max(tl.max(fraction, 1), 0) == 0, 8, 16)
    is_sure = is_row & (num_listed > 0) & (num_listed <= CAPACITY)

    # Without such a bracket all tokens that have any mass are among the `top_k` most probable.
    in_k, _ = _is_within(buckets, bracket, is_row, 0)
    in_k = (in_k & is_listed).to(tl.int64)
    has_k = tl.sum(in_k, 1) > 0
    num_before = tl.load(bracket + 6, mask=is_row, other=0).to(tl.int64)
    last, num_above = _search_listed(top_k, num_before, keys, in_k, num_digits, TILE_ROWS)
    above = tl.load(where, mask=is_row, other=0) + tl.sum(tl.where((in_k > 0) & (keys > last[:, None]), masses, 0), 1)
    left = above + (top_k - num_above) * _mass_of_key(last, num_digits, peak, temperature, min_p, WHOLE)
    total = tl.where(has_k, left, tl.load(where + 3, mask=is_row, other=0))

    in_p, _ = _is_within(buckets, bracket, is_row, 1)
    masses_p = tl.where(in_p & is_listed, masses, 0)
    bound = tl.minimum(tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1), total)
    least, above = _search_listed(bound, before_p, keys, masses_p, num_digits, TILE_ROWS)
    is_sure &= (top_p >= 1.0) | ((before_p < bound) & (bound <= before_p + tl.sum(masses_p, 1)))
    mass = tl.maximum(_mass_of_key(least, num_digits, peak, temperature, min_p, WHOLE), 1)
    total = tl.where(top_p < 1.0, above + (bound - above + mass - 1) // mass * mass, total)

    in_drawn, _ = _is_within(buckets, bracket, is_row, 2)
    masses_drawn = tl.where(in_drawn & is_listed, masses, 0)
    reached = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    chosen, above = _search_listed(reached + 1, before_drawn, keys, masses_drawn, num_digits, TILE_ROWS)
    is_sure &= (before_drawn <= reached) & (reached < before_drawn + tl.sum(masses_drawn, 1))
    rank = (reached - above) // tl.maximum(_mass_of_key(chosen, num_digits, peak, temperature, min_p, WHOLE), 1)

    # The list has no order: the token is the least id up to which enough tokens have the key.
    unknown = (32 - 2 * num_digits).to(tl.uint32)
    is_equal = (is_listed & ((keys >> unknown) == (chosen >> unknown)[:, None])).to(tl.int32)
    token = tl.zeros([TILE_ROWS], tl.int32)
    for bit in range(31):
        step = (tl.zeros([TILE_ROWS], tl.int32) + 1) << (30 - bit)
        num_below = tl.sum(tl.where(ids < (token + step)[:, None], is_equal, 0), 1)
        token = tl.where(num_below <= rank, token + step, token)
    token = tl.minimum(token, vocab_size - 1)  # A row that is not of numbers may find no id.
    tl.store(tokens + index, tl.where(is_sure, token, -1).to(tl.int64), mask=is_row)
