"""Division of batch-invariant products among programs. The bits of a row depend on the layer's sizes alone.

A sum over the inputs is cut into parts at positions that follow from the layer. Each part is summed in steps of one
size by one matrix instruction, and the parts are added in their order. Two things depend on the number of rows, and
change no bit: the rows of a tile, and whether one program computes all parts of its tile or several programs one each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from replicas.model.layers.triton_experts import ProductTile

_PROGRAMS = 256
"""Programs that keep the processors of a GPU busy, for layers with few outputs; about two for each of an H100's."""
_MIN_PART_STEPS = 4
"""Fewest steps of a part: with fewer a pipeline does not fill."""
_MAX_PARTS = 16
_MAX_SPLIT_PROGRAMS = 512
"""Most programs that write partial sums. It bounds them: 512 tiles of 128 x 128 in float32 take 32 MiB."""
_TENSOR_MEMORY = (100, 103)
"""Compute capabilities whose one matrix instruction has the rows of the whole tile."""
_WARP_GROUPS = (90, *_TENSOR_MEMORY)
"""Compute capabilities whose matrix instruction needs 64 rows."""


@dataclass(frozen=True, slots=True)
class Division:
    """Programs of one product."""

    tile: ProductTile
    num_parts: int
    part_size: int
    """Inputs of a part, a multiple of the tile's step; the last part may have fewer."""
    is_split: bool
    """True if each part has a program of its own, and another kernel adds them up."""


def row_tiles(capability: int, itemsize: int) -> tuple[ProductTile, ...]:
    """Return the tiles that a device chooses from by the number of rows, smallest first.

    All use the same matrix instruction and the same step: rows of one tile have the bits of rows of another.
    """
    if itemsize > 2:  # Exact products do not use the matrix units.
        return (ProductTile(32, 32, 32, num_warps=4, num_stages=2),)
    small, large = ProductTile(64, 128, 64, 4, num_stages=3), ProductTile(128, 128, 64, 8, num_stages=3)
    if capability in _TENSOR_MEMORY:
        return (small,)
    if capability in _WARP_GROUPS:
        return small, large
    return ProductTile(16, 128, 64, 4, num_stages=3), small, large


@cache
def divide(capability: int, in_size: int, out_size: int, itemsize: int, num_rows: int) -> Division:
    """Return the programs of a product of `num_rows` rows: a pure function, equal on every replica."""
    tiles = row_tiles(capability, itemsize)
    tile = next((tile for tile in tiles if num_rows <= tile.rows), tiles[-1])
    num_steps, num_columns = _ceil(in_size, tile.inner), _ceil(out_size, tile.columns)
    most = min(_MAX_PARTS, _PROGRAMS // num_columns, num_steps // _MIN_PART_STEPS)
    part_steps = _ceil(num_steps, max(1, most))
    num_parts = _ceil(num_steps, part_steps)
    num_programs = _ceil(num_rows, tile.rows) * num_columns * num_parts
    is_split = num_parts > 1 and num_programs <= _MAX_SPLIT_PROGRAMS
    return Division(tile, num_parts, part_steps * tile.inner, is_split)


def _ceil(number: int, unit: int) -> int:
    return -(-number // unit)
