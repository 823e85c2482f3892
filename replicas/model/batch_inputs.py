"""The tensors and numbers that one forward pass over a flat batch needs."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.engine.batch import ScheduledSequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence in the flat batch, for attention: rows [row, row + num_tokens), positions [start, end)."""

    row: int
    start: int
    end: int
    block_table: list[int]
    """The sequence's own list; block_table[p // block_size] holds position p."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this pass."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One forward pass: sequences laid end to end in one row, so that no token is padding."""

    input_ids: Tensor
    """[1, num_tokens] int64"""
    position_ids: Tensor
    """[1, num_tokens] int64"""
    slots: Tensor
    """[num_tokens] int64: where each token's key and value go."""
    begun_blocks: Tensor | None
    """[num_blocks] int64: blocks that this pass begins and does not fill; None: there are none.

    What a former owner left in them is read, although masked, and a NaN times 0 would still be a NaN.
    """
    logits_rows: Tensor
    """[num_rows] int64: tokens whose logits are wanted, in order of the items."""
    chunks: tuple[Chunk, ...]
    """One per item, host values only: attention makes of them what it needs."""


def wants_prompt_logprobs(item: ScheduledSequence) -> bool:
    """Whether some prompt token's log probabilities come out of this item."""
    return item.sequence.request.params.prompt_logprobs is not None and item.start < item.sequence.num_prompt_tokens - 1


def num_logits_rows(item: ScheduledSequence) -> int:
    """Rows of logits that the item needs: every position to score its prompt, the last one to sample."""
    return item.num_tokens if wants_prompt_logprobs(item) else int(item.samples)


def build_inputs(items: Items[ScheduledSequence], block_size: int, device: torch.device) -> BatchInputs:
    """Lay `items` end to end. Few host-to-device copies: one for the tokens, one for the rows."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    begun_blocks: list[int] = []
    rows: list[int] = []
    chunks: list[Chunk] = []
    for item in items:
        chunk = Chunk(len(input_ids), item.start, item.end, item.sequence.block_table)
        input_ids.extend(item.sequence.token_ids[item.start : item.end])
        positions.extend(range(item.start, item.end))
        _extend_slots(slots, chunk, block_size)
        if chunk.end % block_size > 0 and chunk.end - chunk.end % block_size >= chunk.start:
            begun_blocks.append(chunk.block_table[chunk.end // block_size])
        rows.extend(range(len(input_ids) - num_logits_rows(item), len(input_ids)))
        chunks.append(chunk)
    tokens = _place([input_ids, positions, slots], device)
    return BatchInputs(
        input_ids=tokens[0:1],
        position_ids=tokens[1:2],
        slots=tokens[2],
        begun_blocks=_place(begun_blocks, device) if begun_blocks else None,
        logits_rows=_place(rows, device),
        chunks=tuple(chunks),
    )


def _extend_slots(slots: list[int], chunk: Chunk, block_size: int) -> None:
    """Append the chunk's slots, a block at a time."""
    position = chunk.start
    while position < chunk.end:
        index, offset = divmod(position, block_size)
        length = min(block_size - offset, chunk.end - position)
        first = chunk.block_table[index] * block_size + offset
        slots.extend(range(first, first + length))
        position += length


def _place(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
