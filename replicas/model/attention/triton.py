"""Attention backend over Headway's Triton kernels: any mixture of decodes and longer chunks, without synchronisation.

Each launch depends only on sizes that the host knows, so a forward pass can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.model.attention.interface import AttentionCall, with_dense_heads
from replicas.model.attention.kv_cache import KVCache, LayerCache
from replicas.model.attention.tiles import TileGroup, TilePlan, plan_tiles
from replicas.model.attention.triton_kernels import MAX_SPLITS, attend_kernel, combine_kernel
from replicas.model.attention.triton_shapes import LayerShape, TileShape, choose_tile, layer_shape
from replicas.model.attention.triton_write import write_keys_and_values
from replicas.model.batch.inputs import BatchInputs

# A second program per processor hides the latency of memory.
_PROGRAMS_PER_PROCESSOR = 2
# Smallest number of keys per part: a smaller part costs more time than it saves.
_MIN_PART_KEYS = 128


class TritonAttention:
    """Attention of one forward pass."""

    def __init__(self, cache: KVCache, slots: Tensor, plan: TilePlan, num_programs: int) -> None:
        self._cache = cache
        self._slots = slots
        self._plan = plan
        self._num_programs = num_programs

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the call's keys and values, and return its output [num_tokens, num_query_heads, value_size]."""
        layer = self._cache[call.layer]
        shape = layer_shape(call, layer)
        write_keys_and_values(layer, shape, self._slots, call)
        num_tokens, num_heads, _ = call.query.shape
        output = call.query.new_empty(num_tokens, num_heads, shape.value_size)
        if self._plan.decodes is not None:
            self._attend_group(call, layer, self._plan.decodes, output)
        prefills = self._plan.prefills(choose_tile(shape, is_decode=False).tokens, output.device)
        if prefills is not None:
            self._attend_group(call, layer, prefills, output)
        return output

    def _attend_group(self, call: AttentionCall, layer: LayerCache, group: TileGroup, output: Tensor) -> None:
        shape = layer_shape(call, layer)
        tile = choose_tile(shape, is_decode=group.tokens_per_tile == 1)
        assert tile.tokens == group.tokens_per_tile, "the group was cut for another shape"
        num_keys = group.longest if call.window is None else min(group.longest, call.window + tile.tokens)
        num_programs = len(group.tiles) * shape.num_kv_heads
        num_splits = max(1, min(self._num_programs // num_programs, num_keys // _MIN_PART_KEYS, MAX_SPLITS))
        launch = _Launch(call, layer, group, shape, tile, num_splits, output)
        parts = _Parts.of(launch)
        _attend(launch, parts)
        if num_splits > 1:
            _combine(launch, parts)


class TritonBackend:
    """`AttentionBackend` over Triton's kernels, for a device with `num_processors` multiprocessors."""

    def __init__(self, num_processors: int) -> None:
        self._num_programs = _PROGRAMS_PER_PROCESSOR * num_processors

    def __call__(self, cache: KVCache, inputs: BatchInputs) -> TritonAttention:
        """Return the attention of the chunks of `inputs`."""
        return self.planned(cache, inputs.slots, plan_tiles(inputs.chunks, inputs.slots.device))

    def planned(self, cache: KVCache, slots: Tensor, plan: TilePlan) -> TritonAttention:
        """Return the attention of a plan that the caller made. Its tensors may outlive the forward pass.

        `slots` [num_tokens] int64 are the slots for the keys and values.
        """
        return TritonAttention(cache, slots, plan, self._num_programs)


@dataclass(frozen=True, slots=True)
class _Launch:
    """Arguments of the kernels for one group of tiles in one layer."""

    call: AttentionCall
    layer: LayerCache
    group: TileGroup
    shape: LayerShape
    tile: TileShape
    num_splits: int
    """Number of parts that the keys are split into."""
    output: Tensor

    @property
    def sinks(self) -> Tensor:
        """Sinks of the layer; without sinks any tensor, which the kernels do not read."""
        return self.output if self.call.scoring.sinks is None else self.call.scoring.sinks.contiguous()


@dataclass(frozen=True, slots=True)
class _Parts:
    """Partial results, one for each part of the keys, in the order tile, KV head, part, row."""

    values: Tensor
    """[num_rows, value_width] float32"""
    sums: Tensor
    """[num_rows] float32: logarithm to base 2 of the sum of a part's softmax weights."""

    @classmethod
    def of(cls, launch: _Launch) -> _Parts:
        """Allocate memory for the parts. With one part, which needs no memory, use the output as a placeholder."""
        if launch.num_splits == 1:
            return cls(launch.output, launch.output)
        shape, num_programs = launch.shape, len(launch.group.tiles) * launch.shape.num_kv_heads * launch.num_splits
        num_rows = num_programs * launch.tile.tokens * shape.group_size
        values = launch.output.new_empty(num_rows, shape.value_width, dtype=torch.float32)
        return cls(values, launch.output.new_empty(num_rows, dtype=torch.float32))


def _attend(launch: _Launch, parts: _Parts) -> None:
    call, layer, group, shape, tile = launch.call, launch.layer, launch.group, launch.shape, launch.tile
    query = with_dense_heads(call.query)
    attend_kernel[(shape.num_kv_heads, len(group.tiles), launch.num_splits)](
        query,
        layer.keys,
        layer.values,
        launch.output,
        parts.values,
        parts.sums,
        group.tiles,
        group.tables,
        launch.sinks,
        call.scoring.scale,
        call.scoring.softcap or 1.0,
        call.window or 0,
        launch.num_splits,
        *query.stride()[:2],
        group.tables.stride(0),
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP_SIZE=shape.group_size,
        KEY_SIZE=shape.key_size,
        VALUE_SIZE=shape.value_size,
        KEY_WIDTH=shape.key_width,
        VALUE_WIDTH=shape.value_width,
        BLOCK_SIZE=layer.keys.shape[1],
        TILE_TOKENS=tile.tokens,
        TILE_ROWS=tile.rows,
        TILE_KEYS=tile.keys,
        HAS_WINDOW=call.window is not None,
        HAS_SOFTCAP=call.scoring.softcap is not None,
        HAS_SINKS=call.scoring.sinks is not None,
        IS_SPLIT=launch.num_splits > 1,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _combine(launch: _Launch, parts: _Parts) -> None:
    group, shape, tile = launch.group, launch.shape, launch.tile
    combine_kernel[(shape.num_kv_heads, len(group.tiles), tile.tokens * shape.group_size)](
        parts.values,
        parts.sums,
        launch.output,
        group.tiles,
        launch.sinks,
        launch.num_splits,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP_SIZE=shape.group_size,
        VALUE_SIZE=shape.value_size,
        VALUE_WIDTH=shape.value_width,
        TILE_TOKENS=tile.tokens,
        SPLIT_WIDTH=MAX_SPLITS,
        HAS_SINKS=launch.call.scoring.sinks is not None,
    )
