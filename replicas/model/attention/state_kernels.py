"""Triton kernels of recurrent layers over the state slots, for CUDA devices: convolution, and the rule of the state.

`state_torch` has the formulas, `plan.StatePlan` the fields of a chunk. A chunk that begins at position 0 reads no slot.
A chunk that reaches the end of a block reads another slot than it writes, and one that moves to another slot within a
block begins at the block's start. So no program reads what another one writes, and a repeated launch writes the same.
Slot 0 is scratch: what is written there, for rows without a sequence, is arbitrary.

`inputs` [num_slots, WIDTH - 1 + BLOCK_SIZE, NUM_CHANNELS] are inputs of the convolution, from WIDTH - 1 tokens before
the slot's boundary. `states` [num_slots, NUM_HEADS, KEY_SIZE, VALUE_SIZE], `keys` [num_slots, NUM_KEY_HEADS,
BLOCK_SIZE, KEY_SIZE], `updates` [num_slots, NUM_HEADS, BLOCK_SIZE, VALUE_SIZE] and `decays` [num_slots, NUM_HEADS,
BLOCK_SIZE] are float32.

With HAS_NORM queries and keys are divided by their length. Without HAS_BETA an update is the value. With HAS_GATES
`decay` and `beta` are the layer's numbers before the gates: the decay is -e^rate softplus(decay + bias), and beta
becomes its sigmoid. Sums are float32. Products of matrices are three products of TensorFloat-32, whose error is that of
float32; a row of them depends on no other row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replicas.model.attention.plan import MAX_SNAPSHOTS, STATE_FIELDS

_FIELDS = tl.constexpr(STATE_FIELDS)
_SNAPSHOTS = tl.constexpr(MAX_SNAPSHOTS)
_EPSILON = tl.constexpr(1e-6)


@triton.jit
def assign_rows_kernel(chunks, chunk_of_row, TILE: tl.constexpr):
    """Write the index of chunk `program_id(0)` to its rows in `chunk_of_row` [num_rows] int32."""
    chunk = chunks + tl.program_id(0) * _FIELDS
    row = tl.load(chunk)
    num_tokens = tl.load(chunk + 2)
    lanes = tl.arange(0, TILE)
    for first in range(0, num_tokens, TILE):
        tl.store(chunk_of_row + row + first + lanes, lanes * 0 + tl.program_id(0), mask=first + lanes < num_tokens)


@triton.jit(do_not_specialize=["num_rows", "row_stride"])
def convolve_kernel(
    rows_in,
    weight,
    bias,
    output,
    inputs,
    chunks,
    chunk_of_row,
    num_rows,
    row_stride,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    STRIDE_ALIGNMENT: tl.constexpr,
):
    """Convolve rows [num_rows, NUM_CHANNELS]; store the inputs that chunks of one token keep."""
    row_stride = row_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    channels = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)[None, :]
    is_row = rows < num_rows
    is_channel = channels < NUM_CHANNELS
    chunk = chunks + tl.load(chunk_of_row + rows, mask=is_row, other=0) * _FIELDS
    offset = rows - tl.load(chunk)
    start = tl.load(chunk + 1)
    source = tl.load(chunk + 3).to(tl.int64)
    target = tl.load(chunk + 4).to(tl.int64)
    in_block = start % BLOCK_SIZE
    is_kept = is_row & (tl.load(chunk + 2) == 1) & (target != 0)
    ends_block = in_block == BLOCK_SIZE - 1
    is_moved = (source != target) | (start == 0)
    # Place, in the slot, of the last row: a slot that is written at the end of a block begins after it.
    kept_place = tl.where(ends_block, WIDTH - 2, in_block + WIDTH - 1)
    stored_rows: tl.constexpr = WIDTH - 1 + BLOCK_SIZE
    total = tl.zeros([TILE_ROWS, TILE_CHANNELS], tl.float32)
    for tap in tl.static_range(WIDTH):
        back = WIDTH - 1 - tap
        in_batch = offset >= back
        cells = (rows - back).to(tl.int64)[:, None] * row_stride + channels
        numbers = tl.load(rows_in + cells, mask=(is_row & in_batch)[:, None] & is_channel, other=0.0)
        if back > 0:
            places = source * stored_rows + in_block + (WIDTH - 1) + offset - back
            is_stored = is_row & (offset < back) & (start > 0)
            earlier = tl.load(
                inputs + places[:, None] * NUM_CHANNELS + channels, mask=is_stored[:, None] & is_channel, other=0.0
            )
            numbers += earlier
        places = target * stored_rows + kept_place - back
        is_stored = is_kept & ((back == 0) | ends_block | is_moved) & (kept_place >= back)
        tl.store(inputs + places[:, None] * NUM_CHANNELS + channels, numbers, mask=is_stored[:, None] & is_channel)
        factors = tl.load(weight + channels * WIDTH + tap, mask=is_channel, other=0.0)
        total += numbers.to(tl.float32) * factors.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)
    if HAS_SILU:
        total = total / (1.0 + tl.exp(-total))
    cells = rows.to(tl.int64)[:, None] * NUM_CHANNELS + channels
    tl.store(output + cells, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_channel)


@triton.jit(do_not_specialize=["row_stride"])
def store_inputs_kernel(
    rows_in,
    inputs,
    chunks,
    row_stride,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
    STRIDE_ALIGNMENT: tl.constexpr,
):
    """Store the inputs that chunk `program_id(0)` keeps, for its target or one of its snapshots (`program_id(2)`)."""
    row_stride = row_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    chunk = chunks + tl.program_id(0) * _FIELDS
    start = tl.load(chunk + 1)
    end = start + tl.load(chunk + 2)
    source = tl.load(chunk + 3).to(tl.int64)
    target = tl.load(chunk + 4 + 2 * tl.program_id(2)).to(tl.int64)
    if (target == 0) | (end == start):
        return
    boundary = end - end % BLOCK_SIZE
    begin = boundary - (WIDTH - 1)
    if tl.program_id(2) > 0:
        boundary = tl.load(chunk + 3 + 2 * tl.program_id(2))
        begin = boundary - (WIDTH - 1)
        end = boundary
    elif (source == target) & (start > 0) & (start >= boundary):
        begin = start
    first_row = (tl.load(chunk) - start).to(tl.int64)
    channels = tl.program_id(1) * TILE_CHANNELS + tl.arange(0, TILE_CHANNELS)[None, :]
    is_channel = channels < NUM_CHANNELS
    stored_rows: tl.constexpr = WIDTH - 1 + BLOCK_SIZE
    source_place = source * stored_rows + (WIDTH - 1) - (start - start % BLOCK_SIZE)
    target_place = target * stored_rows + (WIDTH - 1) - boundary
    for first in range(begin, end, TILE_ROWS):
        positions = first + tl.arange(0, TILE_ROWS)
        is_row = positions < end
        cells = (first_row + positions)[:, None] * row_stride + channels
        numbers = tl.load(rows_in + cells, mask=(is_row & (positions >= start))[:, None] & is_channel, other=0.0)
        cells = (source_place + positions)[:, None] * NUM_CHANNELS + channels
        is_stored = is_row & (positions < start) & (start > 0)
        numbers += tl.load(inputs + cells, mask=is_stored[:, None] & is_channel, other=0.0)
        cells = (target_place + positions)[:, None] * NUM_CHANNELS + channels
        tl.store(inputs + cells, numbers, mask=is_row[:, None] & is_channel)


@triton.jit
def _decays_and_betas(decay, beta, rates, biases, cells, head, mask, HAS_GATES: tl.constexpr, HAS_BETA: tl.constexpr):
    """Return the decays and betas at `cells`, 0 where the mask is not set."""
    decays = tl.load(decay + cells, mask=mask, other=0.0).to(tl.float32)
    betas = decays
    if HAS_BETA:
        betas = tl.load(beta + cells, mask=mask, other=0.0).to(tl.float32)
    if HAS_GATES:
        steps = decays + tl.load(biases + head).to(tl.float32)
        steps = tl.where(steps > 20.0, steps, tl.log(1.0 + tl.exp(tl.minimum(steps, 20.0))))
        decays = tl.where(mask, -tl.exp(tl.load(rates + head).to(tl.float32)) * steps, 0.0)
        betas = tl.where(mask, 1.0 / (1.0 + tl.exp(-betas)), 0.0)
    return decays, betas


@triton.jit
def _load_chunk(chunk):
    """Return a chunk's first row, position, number of tokens, and the slots that it reads and writes."""
    row, start, num_tokens = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    return row.to(tl.int64), start, num_tokens, tl.load(chunk + 3).to(tl.int64), tl.load(chunk + 4).to(tl.int64)


@triton.jit
def _load_head(head_at, columns, SIZE: tl.constexpr, HAS_NORM: tl.constexpr):
    """Return one head of one token, float32."""
    numbers = tl.load(head_at + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    if HAS_NORM:
        numbers = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) + _EPSILON)
    return numbers


@triton.jit
def _add_tail(
    state, total, keys, updates, decays, columns, value_columns, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Return the state with all updates of a tail that lacks its last token; `total` is the sum of all decays."""
    sum_before = 0.0
    for token in range(BLOCK_SIZE - 1):
        sum_before += tl.load(decays + token)
        key = tl.load(keys + token * KEY_SIZE + columns, mask=columns < KEY_SIZE, other=0.0)
        update = tl.load(updates + token * VALUE_SIZE + value_columns, mask=value_columns < VALUE_SIZE, other=0.0)
        state += (key * tl.exp(total - sum_before))[:, None] * update[None, :]
    return state


@triton.jit(do_not_specialize=["query_stride", "key_stride", "value_stride", "gate_stride"])
def decode_kernel(  # noqa: PLR0915  (parts of it would take most of its arguments)
    query,
    key,
    value,
    decay,
    beta,
    rates,
    biases,
    output,
    states,
    keys,
    updates,
    decays,
    chunks,
    scale,
    query_stride,
    key_stride,
    value_stride,
    gate_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_GATES: tl.constexpr,
    HAS_BETA: tl.constexpr,
    STRIDE_ALIGNMENT: tl.constexpr,
):
    """Advance one head of a chunk of one token: VALUE_TILE columns of its state, which is read once."""
    num_tiles: tl.constexpr = (VALUE_SIZE + VALUE_TILE - 1) // VALUE_TILE
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    tile, head = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles % NUM_HEADS
    key_head = head // group
    row, start, num_tokens, source, target = _load_chunk(chunks + tl.program_id(0) // (num_tiles * NUM_HEADS) * _FIELDS)
    if num_tokens == 0:
        return
    query += row * (query_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT) + key_head * KEY_SIZE
    key += row * (key_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT) + key_head * KEY_SIZE
    value += row * (value_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT) + head * VALUE_SIZE
    num_before = start % BLOCK_SIZE
    columns = tl.arange(0, KEY_WIDTH)
    value_columns = tile * VALUE_TILE + tl.arange(0, VALUE_TILE)
    tokens = tl.arange(0, BLOCK_WIDTH)
    is_column, is_value, is_before = columns < KEY_SIZE, value_columns < VALUE_SIZE, tokens < num_before
    in_state = head * (KEY_SIZE * VALUE_SIZE) + columns[:, None] * VALUE_SIZE + value_columns[None, :]
    is_state = is_column[:, None] & is_value[None, :]
    state_size: tl.constexpr = NUM_HEADS * KEY_SIZE * VALUE_SIZE

    state = tl.load(states + source * state_size + in_state, mask=is_state & (start > 0), other=0.0)
    q = _load_head(query, columns, KEY_SIZE, HAS_NORM) * scale
    k = _load_head(key, columns, KEY_SIZE, HAS_NORM)
    u = _load_head(value, value_columns, VALUE_SIZE, False)
    gates_at = row * gate_stride + head
    g, b = _decays_and_betas(decay, beta, rates, biases, gates_at, head, start >= 0, HAS_GATES, HAS_BETA)
    keys_at = keys + (source * NUM_KEY_HEADS + key_head) * (BLOCK_SIZE * KEY_SIZE)
    updates_at = updates + (source * NUM_HEADS + head) * (BLOCK_SIZE * VALUE_SIZE)
    decays_at = decays + (source * NUM_HEADS + head) * BLOCK_SIZE
    tail_keys = tl.load(
        keys_at + tokens[:, None] * KEY_SIZE + columns[None, :], mask=is_before[:, None] & is_column[None, :], other=0.0
    )
    tail_updates = tl.load(
        updates_at + tokens[:, None] * VALUE_SIZE + value_columns[None, :],
        mask=is_before[:, None] & is_value[None, :],
        other=0.0,
    )
    tail_decays = tl.load(decays_at + tokens, mask=is_before, other=0.0)
    total = tl.sum(tail_decays, 0) + g
    since = tl.exp(total)
    between = tl.exp(total - tl.cumsum(tail_decays, 0))
    if HAS_BETA:
        weights = tl.sum(tail_keys * k[None, :], 1) * between
        u = b * (u - since * tl.sum(state * k[:, None], 0) - tl.sum(tail_updates * weights[:, None], 0))
    weights = tl.sum(tail_keys * q[None, :], 1) * between
    result = since * tl.sum(state * q[:, None], 0) + tl.sum(tail_updates * weights[:, None], 0) + tl.sum(q * k, 0) * u
    output_at = output + (row * NUM_HEADS + head) * VALUE_SIZE + value_columns
    tl.store(output_at, result.to(output.dtype.element_ty), mask=is_value)

    if target == 0:
        return
    states += target * state_size
    if num_before == BLOCK_SIZE - 1:
        following = _add_tail(
            since * state + k[:, None] * u[None, :], total, keys_at, updates_at, decays_at, columns, value_columns,
            KEY_SIZE, VALUE_SIZE, BLOCK_SIZE,
        )  # fmt: skip
        tl.store(states + in_state, following, mask=is_state)
    else:
        if source != target:
            tl.store(states + in_state, state, mask=is_state)
        cell = (target * NUM_HEADS + head) * BLOCK_SIZE + num_before
        tl.store(updates + cell * VALUE_SIZE + value_columns, u, mask=is_value)
        if tile == 0:
            tl.store(decays + cell, g)
            if head % group == 0:
                cell = (target * NUM_KEY_HEADS + key_head) * BLOCK_SIZE + num_before
                tl.store(keys + cell * KEY_SIZE + columns, k, mask=is_column)


@triton.jit
def _load_part(rows_in, rows, stride, mask, first, SIZE: tl.constexpr, PART: tl.constexpr):
    """Return the numbers [first, first + PART) of a head in each of the rows, float32."""
    columns = first + tl.arange(0, PART)
    cells = rows[:, None] * stride + columns[None, :]
    return tl.load(rows_in + cells, mask=mask[:, None] & (columns < SIZE)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _inverse_lengths(rows_in, rows, stride, mask, SIZE: tl.constexpr, PART: tl.constexpr, HAS_NORM: tl.constexpr):
    """Return 1 by the length of a head in each of the rows, [num_rows, 1]; without HAS_NORM 1."""
    squares = tl.zeros([rows.shape[0], PART], tl.float32)
    if HAS_NORM:
        for first in range(0, SIZE, PART):
            numbers = _load_part(rows_in, rows, stride, mask, first, SIZE, PART)
            squares += numbers * numbers
        return tl.rsqrt(tl.sum(squares, 1) + _EPSILON)[:, None]
    return tl.sum(squares, 1)[:, None] + 1.0


@triton.jit
def _multiply(one, other, sums):
    return tl.dot(one, other, sums, input_precision="tf32x3")


@triton.jit
def _snapshot_at(chunk, boundary):
    """Return the slot for the state at `boundary`; 0: there is none."""
    slot = tl.zeros([], tl.int64)
    for number in tl.static_range(_SNAPSHOTS):
        is_here = tl.load(chunk + 5 + 2 * number) == boundary
        slot = tl.where(is_here, tl.load(chunk + 6 + 2 * number).to(tl.int64), slot)
    return slot


@triton.jit
def _correct(u, factors, num_tokens, BLOCK_WIDTH: tl.constexpr):
    """Subtract from each token's update those of the tokens before it, times their factors, in order of the tokens."""
    tokens = tl.arange(0, BLOCK_WIDTH)
    for token in range(num_tokens - 1):
        update = tl.sum(tl.where(tokens[:, None] == token, u, 0.0), 0)
        factor = tl.sum(tl.where(tokens[None, :] == token, factors, 0.0), 1)
        u -= tl.where(tokens > token, factor, 0.0)[:, None] * update[None, :]
    return u


@triton.jit(do_not_specialize=["query_stride", "key_stride", "value_stride", "gate_stride"])
def advance_kernel(  # noqa: PLR0915
    query,
    key,
    value,
    decay,
    beta,
    rates,
    biases,
    output,
    states,
    keys,
    updates,
    decays,
    chunks,
    scale,
    query_stride,
    key_stride,
    value_stride,
    gate_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_PART: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_GATES: tl.constexpr,
    HAS_BETA: tl.constexpr,
    STRIDE_ALIGNMENT: tl.constexpr,
):
    """Advance one head of a chunk, block by block: VALUE_TILE columns of its state.

    A block always has the same shape. Tokens of earlier steps come from the tail, and those that are not there yet are
    zeros, so a token's numbers do not depend on the chunks in which its block was computed. The state is read and
    written in parts of KEY_PART rows, since registers do not hold its products: with each block it goes to the slot
    that the chunk writes.
    """
    num_tiles: tl.constexpr = (VALUE_SIZE + VALUE_TILE - 1) // VALUE_TILE
    group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    tile, head = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles % NUM_HEADS
    key_head = head // group
    chunk = chunks + tl.program_id(0) // (num_tiles * NUM_HEADS) * _FIELDS
    first_row, start, num_tokens, source, target = _load_chunk(chunk)
    if num_tokens == 0:
        return
    query_stride = query_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    key_stride = key_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    value_stride = value_stride // STRIDE_ALIGNMENT * STRIDE_ALIGNMENT
    query, key, value = query + key_head * KEY_SIZE, key + key_head * KEY_SIZE, value + head * VALUE_SIZE
    end = start + num_tokens
    tokens = tl.arange(0, BLOCK_WIDTH)
    is_earlier = tokens[:, None] >= tokens[None, :]
    value_columns = tile * VALUE_TILE + tl.arange(0, VALUE_TILE)
    is_value = (value_columns < VALUE_SIZE)[None, :]
    columns = tl.arange(0, KEY_PART)
    in_state = head * (KEY_SIZE * VALUE_SIZE) + columns[:, None] * VALUE_SIZE + value_columns[None, :]
    in_tail = (head * BLOCK_SIZE + tokens[:, None]) * VALUE_SIZE + value_columns[None, :]
    keys += key_head * (BLOCK_SIZE * KEY_SIZE)
    decays += head * BLOCK_SIZE
    state_size: tl.constexpr = NUM_HEADS * KEY_SIZE * VALUE_SIZE
    keys_size: tl.constexpr = NUM_KEY_HEADS * BLOCK_SIZE * KEY_SIZE
    decays_size: tl.constexpr = NUM_HEADS * BLOCK_SIZE
    state_slot = source
    has_state = start > 0
    for boundary in range(start - start % BLOCK_SIZE, end, BLOCK_SIZE):
        positions = boundary + tokens
        is_new = (positions >= start) & (positions < end) & (tokens < BLOCK_SIZE)
        is_before = (positions < start) & (tokens < BLOCK_SIZE)  # Only the first block has tokens of earlier steps.
        rows = first_row + (positions - start)
        gates_at = rows * gate_stride + head
        g, b = _decays_and_betas(decay, beta, rates, biases, gates_at, head, is_new, HAS_GATES, HAS_BETA)
        g += tl.load(decays + source * decays_size + tokens, mask=is_before, other=0.0)
        key_factors = _inverse_lengths(key, rows, key_stride, is_new, KEY_SIZE, KEY_PART, HAS_NORM)
        known = tl.zeros([BLOCK_WIDTH, VALUE_TILE], tl.float32)
        result = tl.zeros([BLOCK_WIDTH, VALUE_TILE], tl.float32)
        factors = tl.zeros([BLOCK_WIDTH, BLOCK_WIDTH], tl.float32)
        weights = tl.zeros([BLOCK_WIDTH, BLOCK_WIDTH], tl.float32)
        for first in range(0, KEY_SIZE, KEY_PART):
            k = _load_part(key, rows, key_stride, is_new, first, KEY_SIZE, KEY_PART) * key_factors
            k += _load_part(keys + source * keys_size, tokens, KEY_SIZE, is_before, first, KEY_SIZE, KEY_PART)
            q = _load_part(query, rows, query_stride, is_new, first, KEY_SIZE, KEY_PART)
            mask = (first + columns < KEY_SIZE)[:, None] & is_value & has_state
            state = tl.load(states + state_slot * state_size + first * VALUE_SIZE + in_state, mask=mask, other=0.0)
            if HAS_BETA:
                known = _multiply(k, state, known)
                factors = _multiply(k, tl.trans(k), factors)
            result = _multiply(q, state, result)
            weights = _multiply(q, tl.trans(k), weights)

        sums = tl.cumsum(g, 0)
        since = tl.exp(sums)[:, None]
        between = tl.exp(tl.where(is_earlier, sums[:, None] - sums[None, :], float("-inf")))
        is_cell = is_new[:, None] & is_value
        values_at = value + rows[:, None] * value_stride + value_columns[None, :]
        u = tl.load(values_at, mask=is_cell, other=0.0).to(tl.float32)
        if HAS_BETA:
            u = b[:, None] * (u - since * known)
        updates_at = updates + source * (decays_size * VALUE_SIZE) + in_tail
        u += tl.load(updates_at, mask=is_before[:, None] & is_value, other=0.0)
        if HAS_BETA:
            u = _correct(u, factors * between * b[:, None], tl.minimum(end - boundary, BLOCK_SIZE), BLOCK_WIDTH)
        result = _multiply(weights * between, u, since * result)
        result *= _inverse_lengths(query, rows, query_stride, is_new, KEY_SIZE, KEY_PART, HAS_NORM) * scale
        output_at = output + (rows[:, None] * NUM_HEADS + head) * VALUE_SIZE + value_columns[None, :]
        tl.store(output_at, result.to(output.dtype.element_ty), mask=is_cell)

        is_full = boundary + BLOCK_SIZE <= end
        if (target != 0) & (boundary + BLOCK_SIZE > end):
            tl.store(updates + target * (decays_size * VALUE_SIZE) + in_tail, u, mask=is_cell)
            tl.store(decays + target * decays_size + tokens, g, mask=is_new & (tile == 0))
        last = tl.sum(tl.where(tokens == BLOCK_SIZE - 1, sums, 0.0), 0)
        forget = tl.exp(last)
        u *= tl.exp(last - sums)[:, None]
        snapshot = _snapshot_at(chunk, boundary + BLOCK_SIZE)
        for first in range(0, KEY_SIZE, KEY_PART):
            k = _load_part(key, rows, key_stride, is_new, first, KEY_SIZE, KEY_PART) * key_factors
            k += _load_part(keys + source * keys_size, tokens, KEY_SIZE, is_before, first, KEY_SIZE, KEY_PART)
            if is_full:
                mask = (first + columns < KEY_SIZE)[:, None] & is_value
                state_at = states + first * VALUE_SIZE
                state = tl.load(state_at + state_slot * state_size + in_state, mask=mask & has_state, other=0.0)
                state = _multiply(tl.trans(k), u, forget * state)
                tl.store(state_at + target * state_size + in_state, state, mask=mask)
                tl.store(state_at + snapshot * state_size + in_state, state, mask=mask & (snapshot != 0))
            elif (target != 0) & (tile == 0) & (head % group == 0):
                keys_at = keys + target * keys_size + tokens[:, None] * KEY_SIZE + first + columns[None, :]
                tl.store(keys_at, k, mask=is_new[:, None] & (first + columns < KEY_SIZE)[None, :])
        if is_full:
            state_slot = target
            has_state = start >= 0
        tl.debug_barrier()  # The next block reads what other threads have written.
    if (target != 0) & (state_slot == source) & (source != target):
        for first in range(0, KEY_SIZE, KEY_PART):
            mask = (first + columns < KEY_SIZE)[:, None] & is_value
            state_at = states + first * VALUE_SIZE
            state = tl.load(state_at + source * state_size + in_state, mask=mask & has_state, other=0.0)
            tl.store(state_at + target * state_size + in_state, state, mask=mask)
