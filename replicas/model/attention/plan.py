"""Plans of attention and recurrent state: chunks of one forward pass on the device, planned once for all layers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from replicas.engine.batch import StateMove
from replicas.model.batch.inputs import Chunk
from replicas.model.batch.transfers import begin_copy


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Chunks of one launch. The launch depends on the tensors' shapes and on the bounds, not on the tensors' values.

    A captured graph can therefore be replayed with new values in the tensors, provided that they keep to the bounds.
    """

    chunks: Tensor
    """[num_chunks, 4] int32: first row in the flat batch, its position, number of tokens, row in `tables`.

    A chunk of no tokens takes no rows. With -1 in the place of the row in `tables`, the chunk's rows belong to no
    sequence: their output is zeros, and no key is read.
    """
    tables: Tensor
    """[num_sequences, num_blocks] int32: each sequence's blocks. The cells after them, and those of blocks behind the
    layers' window, are undefined."""
    num_tokens: int
    """Upper bound of the tokens of all chunks together."""
    longest: int
    """Upper bound of the keys that a token of these chunks sees."""
    work: dict[Any, Any] = field(default_factory=dict)
    """Lists that a backend has made from the chunks; copies of this group with other tables share them."""

    def max_tiles(self, tokens_per_tile: int) -> int:
        """Return an upper bound of the tiles of at most `tokens_per_tile` tokens that the chunks are cut into."""
        # The last tile of each chunk may have few tokens.
        return min(self.num_tokens, self.num_tokens // tokens_per_tile + len(self.chunks))


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Chunks of a forward pass: one group for single tokens and one for longer chunks; None: there are none.

    The attention output of rows that are in no chunk is undefined.
    """

    decodes: ChunkGroup | None
    prefills: ChunkGroup | None = None


MAX_SNAPSHOTS = 3
"""Most states that one chunk stores beside its last one."""
STATE_SLOTS = 2 + 2 * MAX_SNAPSHOTS
"""Numbers of a chunk's slots and snapshots."""
STATE_FIELDS = 4 + STATE_SLOTS
"""Numbers of a chunk for recurrent layers, the last one unused."""


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Chunks of a forward pass for recurrent layers. A launch depends on the shapes alone, not on the values."""

    chunks: Tensor
    """[num_chunks, STATE_FIELDS] int32: first row in the flat batch, its position, number of tokens, slot that is read,
    slot that is written; then up to three ends of blocks whose state is stored too, each with its slot (0: none).

    A chunk of no tokens takes no rows. Rows without a sequence are a chunk from position 0 with the scratch slot. The
    output of rows that are in no chunk is undefined.
    """
    num_decodes: int
    """Number of chunks, the first ones, that have one token or none."""
    num_tokens: int


def plan_states(chunks: Items[Chunk], device: torch.device) -> StatePlan:
    """Return the plan of a flat batch. The copies to the device are asynchronous."""
    ordered = sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)
    fields = array("i")
    for chunk in ordered:
        fields.extend((chunk.row, chunk.start, chunk.num_tokens, *state_fields(chunk.state)))
        fields.append(0)
    num_decodes = sum(chunk.num_tokens == 1 for chunk in chunks)
    return StatePlan(place(fields, len(chunks), device), num_decodes, sum(chunk.num_tokens for chunk in chunks))


def state_fields(state: StateMove) -> tuple[int, ...]:
    """Return the slots of an item, and its snapshots with zeros for those that it has not."""
    assert len(state.snapshots) <= MAX_SNAPSHOTS, "an item stores too many states"
    missing = (0,) * (2 * (MAX_SNAPSHOTS - len(state.snapshots)))
    return (state.source, state.target, *chain.from_iterable(state.snapshots), *missing)


def plan_attention(chunks: Items[Chunk], device: torch.device) -> AttentionPlan:
    """Return the plan of a flat batch. The copies to the device are asynchronous."""
    return AttentionPlan(
        decodes=_group([chunk for chunk in chunks if chunk.num_tokens == 1], device),
        prefills=_group([chunk for chunk in chunks if chunk.num_tokens > 1], device),
    )


def _group(chunks: Items[Chunk], device: torch.device) -> ChunkGroup | None:
    if not chunks:
        return None
    fields = [
        number
        for index, chunk in enumerate(chunks)
        for number in (chunk.row, chunk.start, chunk.num_tokens, index)
    ]  # fmt: skip
    return ChunkGroup(
        chunks=place(fields, len(chunks), device),
        tables=place(padded_tables(chunks), len(chunks), device),
        num_tokens=sum(chunk.num_tokens for chunk in chunks),
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
