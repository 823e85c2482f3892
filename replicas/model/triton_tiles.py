"""What the kernels of `triton_kernels` are told about one forward pass: made on the host, once for all layers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.model.batch_inputs import Chunk
from replicas.model.transfers import begin_copy


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles that one launch attends to. The launch depends on the shapes and on `longest`, on no value in a tensor.

    A captured graph may therefore be replayed after new values were copied into the tensors, as long as no tile sees
    more than `longest` keys.
    """

    tiles: Tensor
    """[num_tiles, 4] int32: first row in the flat batch, its position, number of tokens, row in `tables`.

    A tile of no tokens stands for a row that holds no sequence: zeros come out for it, and nothing is read.
    """
    tables: Tensor
    """[num_sequences, num_blocks] int32: each sequence's blocks; past its own anything."""
    tokens_per_tile: int
    longest: int
    """Most keys that a token of these tiles sees, or more."""


class TilePlan:
    """The tiles of a forward pass: single tokens in one group, chunks of several cut to a layer's tiles in another.

    Rows of the flat batch that are in no tile get no attention: what comes out for them is undefined.
    """

    def __init__(self, decodes: TileGroup | None, prefills: tuple[Chunk, ...] = ()) -> None:
        self.decodes = decodes
        self._chunks = prefills
        self._prefills: dict[tuple[int, torch.device], TileGroup] = {}

    def prefills(self, tokens_per_tile: int, device: torch.device) -> TileGroup | None:
        """The chunks of several tokens, cut to tiles of `tokens_per_tile`; None: there are none."""
        if not self._chunks:
            return None
        key = (tokens_per_tile, device)
        if key not in self._prefills:
            self._prefills[key] = _group(self._chunks, tokens_per_tile, device)
        return self._prefills[key]


def plan_tiles(chunks: Items[Chunk], device: torch.device) -> TilePlan:
    """The plan of a flat batch. Copies to the device are not waited for."""
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
    # Those that see most begin first, so that none of them is left alone at the end.
    fields.sort(key=lambda tile: -tile[1])
    return TileGroup(
        tiles=place([number for tile in fields for number in tile], len(fields), device),
        tables=place(padded_tables(chunks), len(chunks), device),
        tokens_per_tile=tokens_per_tile,
        longest=max(chunk.end for chunk in chunks),
    )


def padded_tables(chunks: Items[Chunk]) -> array[int]:
    """The block tables end to end, each as long as the longest, with zeros."""
    width = max(len(chunk.block_table) for chunk in chunks)
    numbers = array("i")
    for chunk in chunks:
        numbers.extend(chunk.block_table)
        numbers.frombytes(bytes(numbers.itemsize * (width - len(chunk.block_table))))
    return numbers


def place(numbers: list[int] | array[int], num_rows: int, device: torch.device) -> Tensor:
    """The numbers as [num_rows, ...] int32 on `device`; by way of `array`, which reads long lists faster than torch."""
    words = torch.frombuffer(numbers if isinstance(numbers, array) else array("i", numbers), dtype=torch.int32)
    return begin_copy(words, device).view(num_rows, -1)
