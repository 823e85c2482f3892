"""Attention backend over Headway's Triton kernels: any mixture of decodes and longer chunks, without synchronisation.

Each launch depends only on sizes that the host knows, so a forward pass can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from replicas.model.attention.interface import AttentionCall, with_dense_heads
from replicas.model.attention.kv_cache import KVCache, LayerCache
from replicas.model.attention.plan import AttentionPlan, ChunkGroup, plan_attention
from replicas.model.attention.triton_kernels import (
    MAX_PARTS,
    PIECE_FIELDS,
    attend_kernel,
    combine_kernel,
    plan_kernel,
    write_kernel,
)
from replicas.model.batch.inputs import BatchInputs

# A second program per processor hides the latency of memory.
_PROGRAMS_PER_PROCESSOR = 2
# Smallest number of keys per part: a smaller part costs more time than it saves.
_MIN_PART_KEYS = 128
# Smallest number of rows and columns that the matrix units take.
_MIN_WIDTH = 16
# Bytes of the keys of a tile.
_KEY_BYTES = 16 * 1024
# Compute capabilities whose matrix units read operands from shared memory: Hopper, and Blackwell of data centres.
READING_SHARED_MEMORY = (90, 100, 103)
# Compute capabilities with shared memory for two programs of the larger tiles.
_WITH_LARGE_MEMORY = (80, *READING_SHARED_MEMORY)
# Alignments of strides that kernels are compiled for: 32 and 16 bytes of 16-bit numbers, or none.
_ALIGNMENTS = (16, 8, 1)
# Query heads of a program over values in keys, whose sums are wide.
_MOST_LATENT_HEADS = 16
# Numbers that one program of the writing kernel copies.
_PROGRAM_NUMBERS = 4096
# Smallest number of keys per part where parts end at fixed positions.
_MIN_FIXED_PART_KEYS = 2048
# Chunks that the planning kernel computes at a time.
_PLANNED_CHUNKS = 128


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of a layer's attention. The kernels are compiled for it, and for the layer's kind of scores."""

    num_kv_heads: int
    group_size: int
    """Number of query heads that share a KV head."""
    key_size: int
    value_size: int
    itemsize: int
    """Size of a number of queries and of products, bytes."""
    has_values_in_keys: bool = False
    """True if a value is the first `value_size` numbers of its key."""
    heads_per_key: int = 1
    """Number of KV heads that are one head of the cache."""
    is_quantized: bool = False
    """True if the cache holds 8 bits of a number."""

    @property
    def key_width(self) -> int:
        """Width of a tile of keys, or of their values: their size, rounded up to a power of two."""
        return _width(self.value_size if self.has_values_in_keys else self.key_size)

    @property
    def value_width(self) -> int:
        """Width of a tile of values: the value size, rounded up to a power of two."""
        return _width(self.value_size)

    @property
    def rest_width(self) -> int:
        """Width of a tile of the numbers behind the values in keys; 0: values are not in the keys."""
        return _width(self.key_size - self.value_size) if self.has_values_in_keys else 0


def _width(size: int) -> int:
    return max(_MIN_WIDTH, int(triton.next_power_of_2(size)))


@dataclass(frozen=True, slots=True)
class TileShape:
    """Size of a program's tile, and its launch parameters: warps and pipeline stages."""

    tokens: int
    rows: int
    keys: int
    num_warps: int
    num_stages: int


def layer_shape(call: AttentionCall, layer: LayerCache) -> LayerShape:
    """Return the layer shape of `call`."""
    _, num_heads, key_size = call.query.shape
    _, num_kv_heads, value_size = call.value.shape
    group_size, heads_per_key = num_heads // num_kv_heads, 1
    if layer.has_values_in_keys:
        most = min(group_size, _MOST_LATENT_HEADS)
        heads_per_key = group_size // next(size for size in range(most, 0, -1) if group_size % size == 0)
    return LayerShape(
        num_kv_heads * heads_per_key,
        group_size // heads_per_key,
        key_size,
        value_size,
        call.query.itemsize,
        layer.has_values_in_keys,
        heads_per_key,
        layer.is_quantized,
    )


@cache
def choose_tile(shape: LayerShape, is_decode: bool, capability: int) -> TileShape:
    """Return the tile for `shape` on a device of `capability`, such as 90 for 9.0.

    Its pipeline stages fit the shared memory of every device since 2020, and what it computes fits the registers.
    """
    width = max(shape.key_width, shape.value_width)
    keys = min(64, max(_MIN_WIDTH, _KEY_BYTES // (width * shape.itemsize)))
    group_rows = int(triton.next_power_of_2(shape.group_size))
    if is_decode:
        has_registers = shape.itemsize == 2 and group_rows <= _MIN_WIDTH and width <= 256
        if shape.is_quantized and has_registers and capability in _WITH_LARGE_MEMORY:
            # As many bytes as in 16 bits; what a tile costs beside its keys is paid half as often.
            keys *= 2
        # A block id is read before the keys of the block, so two tiles of keys in flight need five stages.
        return TileShape(1, max(_MIN_WIDTH, group_rows), keys, num_warps=4, num_stages=5)
    if shape.itemsize > 2:
        # Exact products are unrolled and do not use the matrix units. Larger tiles would not fit the registers.
        rows = max(32, group_rows)
        return TileShape(rows // shape.group_size, rows, min(32, keys), num_warps=4, num_stages=2)
    is_narrow = width <= 128
    rows = max(128 if is_narrow else 64, group_rows)
    # A third stage copies the block ids ahead. On Blackwell, for heads of 64, it needs more registers than two programs
    # have.
    if capability in READING_SHARED_MEMORY:
        num_stages = 2 if capability >= 100 and width <= 64 else 3
        num_warps = 4 if 128 < width <= 256 else 8
        return TileShape(rows // shape.group_size, rows, keys, num_warps, num_stages)
    # Sums are in registers, and so are the operands of the matrix units.
    return TileShape(rows // shape.group_size, rows, min(32, keys), num_warps=8, num_stages=3)


def fixed_part_keys(max_model_len: int) -> int:
    """Return the multiple at which the parts of sequences of up to `max_model_len` tokens end."""
    return max(_MIN_FIXED_PART_KEYS, int(triton.next_power_of_2(triton.cdiv(max_model_len, MAX_PARTS))))


@dataclass(frozen=True, slots=True)
class PieceBounds:
    """Bounds of a list of pieces, known to the host: they depend on no value on the device."""

    num_pieces: int
    num_split_tiles: int
    """Most tiles of several parts."""
    num_part_rows: int
    """Most tokens of all parts of these tiles together; 0: no tile has several parts."""

    @classmethod
    def even(cls, group: ChunkGroup, tile_tokens: int, num_parts: int) -> PieceBounds:
        """Return the bounds for parts of at least one `num_parts`-th of all keys; 0: there are no parts.

        Each tile has a last part beside those that are full. A tile of several parts has more keys than a part.
        """
        num_tiles = group.max_tiles(tile_tokens)
        num_split_tiles = min(num_tiles, num_parts)
        return cls(num_tiles + num_parts, max(1, num_split_tiles), (num_split_tiles + num_parts) * tile_tokens)

    @classmethod
    def fixed(cls, group: ChunkGroup, tile_tokens: int, part_keys: int, num_keys: int) -> PieceBounds:
        """Return the bounds for parts that end at multiples of `part_keys`. A tile sees at most `num_keys` keys."""
        num_tiles = group.max_tiles(tile_tokens)
        # The first key of a window may be the last one of a part.
        most_parts = min(-(-group.longest // part_keys), 1 + -(-num_keys // part_keys))
        num_part_rows = group.num_tokens * most_parts if most_parts > 1 else 0
        return cls(num_tiles * most_parts, num_tiles, num_part_rows)


@dataclass(frozen=True, slots=True)
class WorkList:
    """Pieces of the attention of a group of chunks: one for each program of a KV head."""

    pieces: Tensor  # [num_pieces, PIECE_FIELDS] int32, see `triton_kernels`
    split_tiles: Tensor  # [num_split_tiles, PIECE_FIELDS] int32
    bounds: PieceBounds
    num_parts: int
    """Number of even parts that all keys are cut into, beside the last part of each tile."""
    part_keys: int | None = None
    """Multiple at which parts end; None: they are even."""

    @property
    def is_split(self) -> bool:
        """True if the kernel knows parts. With parts of a fixed size one kernel serves all batches."""
        return self.part_keys is not None or self.num_parts > 0


@dataclass(frozen=True, slots=True)
class _WorkKey:
    """Properties of layers that share a list of pieces."""

    tile: TileShape
    window: int | None
    num_parts: int


@dataclass(frozen=True, slots=True)
class TritonAttention:
    """Attention of one forward pass."""

    cache: KVCache
    slots: Tensor
    plan: AttentionPlan
    backend: TritonBackend

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the call's keys and values, and return its output [num_tokens, num_query_heads, value_size]."""
        layer = self.cache[call.layer]
        shape = layer_shape(call, layer)
        write_keys_and_values(layer, shape, self.slots, call)
        num_tokens, num_heads, _ = call.query.shape
        output = call.query.new_empty(num_tokens, num_heads, shape.value_size)
        for group in (self.plan.decodes, self.plan.prefills):
            if group is not None:
                self._attend_group(call, layer, group, output)
        return output

    def _attend_group(self, call: AttentionCall, layer: LayerCache, group: ChunkGroup, output: Tensor) -> None:
        shape = layer_shape(call, layer)
        # The sums of one kernel may have another order than those of another.
        is_decode = group is self.plan.decodes and self.backend.part_keys is None
        tile = choose_tile(shape, is_decode, self.backend.capability)
        launch = _Launch(call, layer, group, shape, tile, self._pieces(call.window, shape, group, tile), output)
        parts = _Parts.of(launch)
        _attend(launch, parts)
        if launch.work.bounds.num_part_rows > 0:
            _combine(launch, parts)

    def _pieces(self, window: int | None, shape: LayerShape, group: ChunkGroup, tile: TileShape) -> WorkList:
        """Return the pieces of a layer's work, which the first layer of a kind makes."""
        num_keys = group.longest if window is None else min(group.longest, window + tile.tokens + tile.keys)
        num_parts = self.backend.num_programs // shape.num_kv_heads if num_keys > _MIN_PART_KEYS else 0
        key = _WorkKey(tile, window, num_parts)
        if key not in group.work:
            part_keys = self.backend.part_keys
            bounds = (
                PieceBounds.even(group, tile.tokens, num_parts)
                if part_keys is None
                else PieceBounds.fixed(group, tile.tokens, part_keys, num_keys)
            )
            pieces, split_tiles = (
                group.chunks.new_empty(size, PIECE_FIELDS) for size in (bounds.num_pieces, bounds.num_split_tiles)
            )
            group.work[key] = WorkList(pieces, split_tiles, bounds, num_parts, part_keys)
            _plan(group.work[key], group, tile, window)
        work: WorkList = group.work[key]
        return work


class TritonBackend:
    """`AttentionBackend` over Triton's kernels, for a device with `num_processors` multiprocessors."""

    kernels = "Triton kernels"

    def __init__(self, num_processors: int, capability: int, part_keys: int | None = None) -> None:
        """Make a backend for a device of `capability`, such as 90 for 9.0.

        With `part_keys` it is batch-invariant: one kernel serves decodes and prompts, and the keys of all sequences are
        cut at the multiples of `part_keys`, into at most `MAX_PARTS` parts. Otherwise the batch decides.
        """
        self.num_programs = _PROGRAMS_PER_PROCESSOR * num_processors
        self.capability = capability
        self.part_keys = part_keys

    def __call__(self, cache: KVCache, inputs: BatchInputs) -> TritonAttention:
        """Return the attention of the chunks of `inputs`."""
        return self.planned(cache, inputs.slots, plan_attention(inputs.chunks, inputs.slots.device))

    def planned(self, cache: KVCache, slots: Tensor, plan: AttentionPlan) -> TritonAttention:
        """Return the attention of a plan that the caller made. Its tensors may outlive the forward pass.

        `slots` [num_tokens] int64 are the slots for the keys and values.
        """
        return TritonAttention(cache, slots, plan, self)

    @staticmethod
    def write(layer: LayerCache, slots: Tensor, call: AttentionCall) -> None:
        """Store the call's keys and values in `slots` [num_tokens] int64 of the layer."""
        write_keys_and_values(layer, layer_shape(call, layer), slots, call)


@dataclass(frozen=True, slots=True)
class _Launch:
    """Arguments of the kernels for one group of chunks in one layer."""

    call: AttentionCall
    layer: LayerCache
    group: ChunkGroup
    shape: LayerShape
    tile: TileShape
    work: WorkList
    output: Tensor

    @property
    def sinks(self) -> Tensor:
        """Sinks of the layer; without sinks any tensor, which the kernels do not read."""
        return self.output if self.call.scoring.sinks is None else self.call.scoring.sinks.contiguous()


@dataclass(frozen=True, slots=True)
class _Parts:
    """Partial results, one row for each token of each part."""

    values: Tensor  # [num_part_rows, num_query_heads, value_width] float32
    sums: Tensor  # [num_part_rows, num_query_heads] float32: logarithm to base 2 of the sum of softmax weights

    @classmethod
    def of(cls, launch: _Launch) -> _Parts:
        """Allocate memory for the parts. If there are none, use the output as a placeholder."""
        num_rows = launch.work.bounds.num_part_rows
        if num_rows == 0:
            return cls(launch.output, launch.output)
        num_heads = launch.output.shape[1]
        values = launch.output.new_empty(num_rows, num_heads, launch.shape.value_width, dtype=torch.float32)
        return cls(values, launch.output.new_empty(num_rows, num_heads, dtype=torch.float32))


def write_keys_and_values(layer: LayerCache, shape: LayerShape, slots: Tensor, call: AttentionCall) -> None:
    """Store the key and value of each token of `call` in the token's slot."""
    key, value = with_dense_heads(call.key), with_dense_heads(call.value)
    num_heads, key_width = shape.num_kv_heads // shape.heads_per_key, _width(shape.key_size)
    num_rows = len(slots) * num_heads
    tile_rows = max(1, _PROGRAM_NUMBERS // max(key_width, shape.value_width))
    strides = (*outer_strides(key), *outer_strides(value))
    write_kernel[(triton.cdiv(num_rows, tile_rows),)](
        key,
        value,
        *_numbers_and_scales(layer),
        slots,
        num_rows,
        *strides,
        NUM_KV_HEADS=num_heads,
        KEY_SIZE=shape.key_size,
        VALUE_SIZE=shape.value_size,
        KEY_WIDTH=key_width,
        VALUE_WIDTH=shape.value_width,
        BLOCK_SIZE=layer.keys.shape[1],
        TILE_ROWS=tile_rows,
        HAS_VALUES=not layer.has_values_in_keys,
        HAS_SCALES=layer.is_quantized,
        IS_FLOAT8=layer.keys.dtype == torch.float8_e4m3fn,
        STRIDE_ALIGNMENT=alignment(strides),
    )


def _numbers_and_scales(layer: LayerCache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return keys, values and their scales. Without scales the keys and values are there twice."""
    if layer.key_scales is None or layer.value_scales is None:
        return layer.keys, layer.values, layer.keys, layer.values
    return layer.keys.view(torch.int8), layer.values.view(torch.int8), layer.key_scales, layer.value_scales


def outer_strides(tensor: Tensor) -> tuple[int, int]:
    """Return the strides of tokens and of heads; 0 for a single one, whose stride is arbitrary."""
    num_tokens, num_heads, _ = tensor.shape
    return tensor.stride(0) if num_tokens > 1 else 0, tensor.stride(1) if num_heads > 1 else 0


def alignment(strides: tuple[int, ...]) -> int:
    """Return a number that divides all strides, of a few: each compiles the kernels once more."""
    return next(number for number in _ALIGNMENTS if not any(stride % number for stride in strides))


def _plan(work: WorkList, group: ChunkGroup, tile: TileShape, window: int | None) -> None:
    bounds = work.bounds
    plan_kernel[(1,)](
        group.chunks,
        work.pieces,
        work.split_tiles,
        len(group.chunks),
        bounds.num_pieces,
        bounds.num_split_tiles,
        max(1, work.num_parts),
        window or 0,
        work.part_keys or _MIN_PART_KEYS,
        TILE_TOKENS=tile.tokens,
        TILE_KEYS=tile.keys,
        NUM_LANES=_PLANNED_CHUNKS,
        MOST_PARTS=MAX_PARTS,
        HAS_WINDOW=window is not None,
        IS_FIXED=work.part_keys is not None,
    )


def _attend(launch: _Launch, parts: _Parts) -> None:
    call, layer, group, shape, tile = launch.call, launch.layer, launch.group, launch.shape, launch.tile
    query = with_dense_heads(call.query)
    strides = outer_strides(query)
    attend_kernel[(shape.num_kv_heads * launch.work.bounds.num_pieces,)](
        query,
        *_numbers_and_scales(layer),
        launch.output,
        parts.values,
        parts.sums,
        launch.work.pieces,
        group.tables,
        launch.sinks,
        call.scoring.scale,
        call.scoring.softcap or 1.0,
        call.window or 0,
        *strides,
        group.tables.stride(0),
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP_SIZE=shape.group_size,
        KEY_SIZE=shape.key_size,
        VALUE_SIZE=shape.value_size,
        KEY_WIDTH=shape.key_width,
        VALUE_WIDTH=shape.value_width,
        REST_WIDTH=shape.rest_width,
        HEADS_PER_KEY=shape.heads_per_key,
        BLOCK_SIZE=layer.keys.shape[1],
        TILE_ROWS=tile.rows,
        TILE_KEYS=tile.keys,
        HAS_WINDOW=call.window is not None,
        HAS_SOFTCAP=call.scoring.softcap is not None,
        HAS_SINKS=call.scoring.sinks is not None,
        HAS_SCALES=layer.is_quantized,
        IS_FLOAT8=layer.keys.dtype == torch.float8_e4m3fn,
        IS_SPLIT=launch.work.is_split,
        STRIDE_ALIGNMENT=alignment(strides),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _combine(launch: _Launch, parts: _Parts) -> None:
    shape, tile = launch.shape, launch.tile
    combine_kernel[(shape.num_kv_heads, launch.work.bounds.num_split_tiles, tile.tokens * shape.group_size)](
        parts.values,
        parts.sums,
        launch.output,
        launch.work.split_tiles,
        launch.sinks,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP_SIZE=shape.group_size,
        VALUE_SIZE=shape.value_size,
        VALUE_WIDTH=shape.value_width,
        MOST_PARTS=MAX_PARTS,
        HAS_SINKS=launch.call.scoring.sinks is not None,
    )
