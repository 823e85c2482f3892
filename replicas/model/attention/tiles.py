"""Tile plans: the work of the Triton kernels in one forward pass, planned on the host once for all layers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.model.batch.inputs import Chunk
from replicas.model.batch.transfers import begin_copy


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles of one launch. The launch depends on the tensors' shapes and on `longest`, not on the tensors' values.

    A captured graph can therefore be replayed with new values in the tensors, provided that no tile sees more than
    `longest` keys.
    """

    tiles: Tensor
    """[num_tiles, 4] int32: first row in the flat batch, its position, number of tokens, row in `tables`.

    A tile of no tokens is a row without a sequence. Its output is zeros, and no key is read.
    """
    tables: Tensor  # [num_sequences, num_blocks] int32: each sequence's blocks; the cells after them are undefined
    tokens_per_tile: int
    longest: int
    """Upper bound of the keys that a token of these tiles sees."""


class TilePlan:
    """Tiles of a forward pass: one group for single tokens, and one for chunks, cut to the tile size of a layer.

    The attention output of rows that are in no tile is undefined.
    """

    def __init__(self, decodes: TileGroup | None, prefills: tuple[Chunk, ...] = ()) -> None:
        self.decodes = decodes
        self._chunks = prefills
        self._prefills: dict[tuple[int, torch.device], TileGroup] = {}

    def prefills(self, tokens_per_tile: int, device: torch.device) -> TileGroup | None:
        """Return the chunks of several tokens, cut to tiles of `tokens_per_tile` tokens; None if there are none."""
        if not self._chunks:
            return None
        key = (tokens_per_tile, device)
        if key not in self._prefills:
            self._prefills[key] = _group(self._chunks, tokens_per_tile, device)
        return self._prefills[key]


def plan_tiles(chunks: Items[Chunk], device: torch.device) -> TilePlan:
    """Return the plan of a flat batch. The copies to the device are asynchronous."""
    singles = [chunk for chunk in chunks if chunk.num_tokens == 1]
    return TilePlan(
        decodes=_group(singles, 1, device) if singles else None,
        prefills=tuple(chunk for chunk in chunks if chunk.num_tokens > 1),
    )


def _group(chunks: Items[Chunk], tokens_per_tile: int, device: torch.device) -> TileGroup:
    fields = [
        [chunk.row + offset, chunk.start + offset, min(tokens_per_tile, chunk.num_tokens - offset), index]
        for index, chunk in enumerate(chunks)
        for offset in range(0, chunk.num_tokens, tokens_per_tile)
    ]
    # Launch the tiles with most keys first, so none of them runs alone at the end.
    fields.sort(key=lambda tile: -tile[1])
    return TileGroup(
        tiles=place([number for tile in fields for number in tile], len(fields), device),
        tables=place(padded_tables(chunks), len(chunks), device),
        tokens_per_tile=tokens_per_tile,
        longest=max(chunk.end for chunk in chunks),
    )


def padded_tables(chunks: Items[Chunk]) -> array[int]:
    """Return the block tables concatenated, each padded with zeros to the length of the longest."""
    width = max(len(chunk.block_table) for chunk in chunks)
    numbers = array("i")
    for chunk in chunks:
        numbers.extend(chunk.block_table)
        numbers.frombytes(bytes(numbers.itemsize * (width - len(chunk.block_table))))
    return numbers


def place(numbers: list[int] | array[int], num_rows: int, device: torch.device) -> Tensor:
    """Return the numbers as a tensor [num_rows, ...] int32 on `device`.

    The list passes through `array`, which reads long lists faster than torch.
    """
    words = torch.frombuffer(numbers if isinstance(numbers, array) else array("i", numbers), dtype=torch.int32)
    return begin_copy(words, device).view(num_rows, -1)
