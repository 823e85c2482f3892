"""Linear layers of experts in a Triton kernel, whose launch depends on no number that only the device knows."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from replicas.model.layers.experts import ExpertLayer, Routing
from replicas.model.layers.triton_kernels import expert_linear_kernel

_MIN_WIDTH = 16
"""Smallest number of rows and columns that the matrix units take."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Size of a program's tile, and its launch parameters: warps and pipeline stages."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


def choose_expert_tile(num_pairs: int, num_experts: int, itemsize: int) -> ProductTile:
    """Return the tile for `num_pairs` rows among `num_experts` experts, with numbers of `itemsize` bytes.

    With few rows for an expert, the reading of its weights takes the time: a tile then has few rows and much of the
    weights. Its pipeline stages fit the shared memory of every device since 2020.
    """
    is_small = num_pairs <= 2 * _MIN_WIDTH * num_experts
    if itemsize > 2:  # Exact products do not use the matrix units.
        return ProductTile(_MIN_WIDTH if is_small else 32, 32, 32, num_warps=4, num_stages=2)
    if is_small:
        return ProductTile(_MIN_WIDTH, 64, 128, num_warps=4, num_stages=3)
    return ProductTile(64, 128, 64, num_warps=4, num_stages=3)


def batch_invariant_tile(itemsize: int) -> ProductTile:
    """Return the tile of products of numbers of `itemsize` bytes for any number of rows."""
    if itemsize > 2:  # Exact products do not use the matrix units.
        return ProductTile(32, 32, 32, num_warps=4, num_stages=2)
    return ProductTile(64, 64, 64, num_warps=4, num_stages=3)


def expert_linear(inputs: Tensor, layer: ExpertLayer, routing: Routing, *, is_first: bool) -> Tensor:
    """Return the products of the rows with the matrices of their experts, [num_pairs, out_size]. See `ExpertLinear`."""
    tile = choose_expert_tile(len(routing.order), len(routing.starts) - 1, inputs.itemsize)
    return _multiply(inputs, layer, routing, tile, is_first=is_first)


def batch_invariant_expert_linear(inputs: Tensor, layer: ExpertLayer, routing: Routing, *, is_first: bool) -> Tensor:
    """Return the same products, in tiles whose size does not depend on the number of rows. See `ExpertLinear`."""
    return _multiply(inputs, layer, routing, batch_invariant_tile(inputs.itemsize), is_first=is_first)


def _multiply(inputs: Tensor, layer: ExpertLayer, routing: Routing, tile: ProductTile, *, is_first: bool) -> Tensor:
    assert isinstance(layer.weights, Tensor)
    num_pairs, num_experts = len(routing.order), len(layer.weights)
    assert inputs.is_contiguous() and layer.weights.is_contiguous()
    assert layer.biases is None or layer.biases.is_contiguous()
    output = inputs.new_empty(num_pairs, layer.out_size)
    # Every expert with rows has a last tile that is not full, in the worst case.
    num_tiles = num_pairs // tile.rows + min(num_experts, num_pairs)
    expert_linear_kernel[(triton.cdiv(layer.out_size, tile.columns), num_tiles)](
        inputs,
        layer.weights,
        output if layer.biases is None else layer.biases,
        output,
        routing.order,
        routing.starts,
        IN_SIZE=layer.in_size,
        OUT_SIZE=layer.out_size,
        NUM_EXPERTS=num_experts,
        EXPERT_WIDTH=int(triton.next_power_of_2(num_experts)),
        TOP_K=routing.top_k,
        IS_TRANSPOSED=layer.is_transposed,
        IS_FIRST=is_first,
        HAS_BIAS=layer.biases is not None,
        TILE_ROWS=tile.rows,
        TILE_COLUMNS=tile.columns,
        TILE_INNER=tile.inner,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return output
