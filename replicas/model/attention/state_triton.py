"""Backend of recurrent state over Headway's Triton kernels, without synchronisation, so that graphs can be captured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from replicas.engine.batch import StateMove
from replicas.model.attention.plan import MAX_SNAPSHOTS, StatePlan, plan_states
from replicas.model.attention.recurrent import ConvCall, RuleCall
from replicas.model.attention.state_cache import LayerStates, StateCache
from replicas.model.attention.state_kernels import (
    advance_kernel,
    assign_rows_kernel,
    convolve_kernel,
    decode_kernel,
    store_inputs_kernel,
)
from replicas.model.batch.inputs import BatchInputs, Chunk

# Smallest number of rows and columns that the matrix units take.
_MIN_WIDTH = 16
# Columns of the state of a decode's program, and of another one.
_DECODE_TILE, _VALUE_TILE = 32, 16
# Rows of the state that a program multiplies at a time: the products of more need more registers than a thread has.
_KEY_PART = 16
# Parts of the state that are read ahead, and the one that is multiplied.
_NUM_STAGES = 3
# Rows and channels of one program of a convolution; a decode has one row.
_CONVOLVED_ROWS, _CONVOLVED_CHANNELS = 16, 128
# Alignments of strides that kernels are compiled for: 32 and 16 bytes of 16-bit numbers, or none.
_ALIGNMENTS = (16, 8, 1)
_ASSIGNED_ROWS = 128


class TritonStateBackend:
    """`StateBackend` over Triton's kernels."""

    def __init__(self, *, is_batch_invariant: bool = False) -> None:
        """Make a backend. A batch-invariant one computes decodes by the kernel of prompts."""
        self.is_batch_invariant = is_batch_invariant

    def __call__(self, cache: StateCache, inputs: BatchInputs) -> TritonStates:
        """Return the state of the chunks of `inputs`."""
        copied = [chunk.state.target for chunk in inputs.chunks if _overwrites_source(chunk, cache.block_size)]
        assert len(copied) <= 1, "a part of an item runs alone"
        chunks = [_from_scratch(chunk) for chunk in inputs.chunks] if copied else inputs.chunks
        states = self.planned(cache, plan_states(chunks, cache.device))
        return replace(states, copied=copied[0]) if copied else states

    def planned(self, cache: StateCache, plan: StatePlan) -> TritonStates:
        """Return the state of a plan that the caller made. Its tensors may outlive the forward pass."""
        chunk_of_row = plan.chunks.new_zeros(plan.num_tokens)  # Before a graph's first step its rows are in no chunk.
        assign_rows(plan, chunk_of_row)
        return TritonStates(cache, plan, chunk_of_row, self.is_batch_invariant)


@dataclass(frozen=True, slots=True)
class TritonStates:
    """Recurrent state of one forward pass."""

    cache: StateCache
    plan: StatePlan
    chunk_of_row: Tensor  # [num_tokens] int32
    is_batch_invariant: bool
    copied: int = 0
    """Slot that is copied to the scratch slot, which the pass reads in its place; 0: none."""

    def convolve(self, call: ConvCall) -> Tensor:
        """Convolve the call's channels, after those of earlier steps; store what later steps need."""
        layer = self.cache[call.layer]
        if self.copied:
            layer.inputs[0].copy_(layer.inputs[self.copied])
        output = torch.empty(call.inputs.shape, dtype=call.inputs.dtype, device=call.inputs.device)
        convolve(layer, self.plan, self.chunk_of_row, call, output)
        return output

    def advance(self, call: RuleCall) -> Tensor:
        """Advance the states of the call's layer and store them; the outputs have the dtype of the queries."""
        layer = self.cache[call.layer]
        if self.copied:
            for part in (layer.states, layer.keys, layer.updates, layer.decays):
                part[0].copy_(part[self.copied])
        output = call.query.new_empty(call.value.shape)
        num_decodes = 0 if self.is_batch_invariant else self.plan.num_decodes
        advance(layer, self.plan, num_decodes, call, output)
        return output


def _overwrites_source(chunk: Chunk, block_size: int) -> bool:
    """Return True for a later part of an item, which continues from the slot that the item writes."""
    crosses = chunk.start // block_size != chunk.end // block_size
    return crosses and chunk.start > 0 and chunk.state.source == chunk.state.target


def _from_scratch(chunk: Chunk) -> Chunk:
    return replace(chunk, state=StateMove(0, chunk.state.target, chunk.state.snapshots))


def assign_rows(plan: StatePlan, chunk_of_row: Tensor) -> None:
    """Write the index of each row's chunk."""
    assign_rows_kernel[(len(plan.chunks),)](plan.chunks, chunk_of_row, TILE=_ASSIGNED_ROWS)


def convolve(layer: LayerStates, plan: StatePlan, chunk_of_row: Tensor, call: ConvCall, output: Tensor) -> None:
    """Convolve the inputs of all chunks and store those that each chunk keeps."""
    inputs = call.inputs if call.inputs.stride(1) == 1 else call.inputs.contiguous()
    num_rows, num_channels = inputs.shape
    width = call.weight.shape[1]
    row_stride = _row_stride(inputs)
    are_decodes = plan.num_decodes == len(plan.chunks)
    tile_rows = 1 if are_decodes else _CONVOLVED_ROWS
    num_tiles = triton.cdiv(num_channels, _CONVOLVED_CHANNELS)
    sizes = {
        "NUM_CHANNELS": num_channels,
        "WIDTH": width,
        "BLOCK_SIZE": layer.inputs.shape[1] - width + 1,
        "TILE_CHANNELS": _CONVOLVED_CHANNELS,
        "STRIDE_ALIGNMENT": _alignment(row_stride),
    }
    convolve_kernel[(triton.cdiv(num_rows, tile_rows), num_tiles)](
        inputs,
        call.weight.contiguous(),
        output if call.bias is None else call.bias,
        output,
        layer.inputs,
        plan.chunks,
        chunk_of_row,
        num_rows,
        row_stride,
        TILE_ROWS=tile_rows,
        HAS_BIAS=call.bias is not None,
        HAS_SILU=call.has_silu,
        **sizes,
    )
    if not are_decodes:
        chunks = plan.chunks[plan.num_decodes :]
        store_inputs_kernel[(len(chunks), num_tiles, 1 + MAX_SNAPSHOTS)](
            inputs, layer.inputs, chunks, row_stride, TILE_ROWS=_CONVOLVED_ROWS, **sizes
        )


def advance(layer: LayerStates, plan: StatePlan, num_decodes: int, call: RuleCall, output: Tensor) -> None:
    """Advance the states by the first `num_decodes` chunks, of one token each, and by the others, block by block."""
    query, key, value = (_with_dense_rows(part) for part in (call.query, call.key, call.value))
    decay, beta = call.decay.contiguous(), None if call.beta is None else call.beta.contiguous()
    num_heads, key_size, value_size = layer.states.shape[1:]
    num_key_heads, block_size = layer.keys.shape[1:3]
    strides = [_row_stride(part) for part in (query, key, value)]
    tensors = (
        query,
        key,
        value,
        decay,
        decay if beta is None else beta,
        decay if call.gates is None else call.gates.rates,
        decay if call.gates is None else call.gates.bias,
        output,
        layer.states,
        layer.keys,
        layer.updates,
        layer.decays,
    )
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KEY_HEADS": num_key_heads,
        "KEY_SIZE": key_size,
        "VALUE_SIZE": value_size,
        "BLOCK_SIZE": block_size,
        "BLOCK_WIDTH": _width(block_size),
        "HAS_NORM": call.has_norm,
        "HAS_GATES": call.gates is not None,
        "HAS_BETA": beta is not None,
        "STRIDE_ALIGNMENT": _alignment(*strides),
    }
    numbers = (call.scale, *strides, num_heads)
    decodes, others = plan.chunks[:num_decodes], plan.chunks[num_decodes:]
    if len(decodes):
        tile = min(_DECODE_TILE, _width(value_size))
        decode_kernel[(len(decodes) * num_heads * triton.cdiv(value_size, tile),)](
            *tensors, decodes, *numbers, KEY_WIDTH=_width(key_size), VALUE_TILE=tile, **constants
        )
    if len(others):
        advance_kernel[(len(others) * num_heads * triton.cdiv(value_size, _VALUE_TILE),)](
            *tensors,
            others,
            *numbers,
            KEY_PART=_KEY_PART,
            VALUE_TILE=_VALUE_TILE,
            num_stages=_NUM_STAGES,
            **constants,
        )


def _width(size: int) -> int:
    return max(_MIN_WIDTH, int(triton.next_power_of_2(size)))


def _with_dense_rows(heads: Tensor) -> Tensor:
    """Return heads [num_tokens, num_heads, size] whose rows are contiguous."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()


def _row_stride(rows: Tensor) -> int:
    """Return the stride of rows; 0 for a single one, whose stride is arbitrary."""
    return rows.stride(0) if len(rows) > 1 else 0


def _alignment(*strides: int) -> int:
    return next(number for number in _ALIGNMENTS if not any(stride % number for stride in strides))
