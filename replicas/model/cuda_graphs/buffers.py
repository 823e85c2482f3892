"""Static input buffers of steps on the device: a captured graph reads its inputs at fixed addresses.

Block tables stay on the device too. Each step sends only the new blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from replicas.model.attention.plan import STATE_FIELDS, AttentionPlan, ChunkGroup, StatePlan
from replicas.model.batch.inputs import known_ids
from replicas.model.batch.transfers import DeviceBuffer
from replicas.model.cuda_graphs.padding import PaddedPlan, StepShape


@dataclass(frozen=True, slots=True)
class StaticGroup:
    """Inputs for one group of layers."""

    slots: Tensor  # [num_tokens] int64
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Inputs of a forward pass. Tokens without a sequence write to the scratch block."""

    input_ids: Tensor  # [1, num_tokens] int64, gathered from the buffers in each pass
    position_ids: Tensor  # [1, num_tokens] int64
    logits_rows: Tensor | None  # [num_rows] int64: tokens whose logits are computed; None: all
    groups: tuple[StaticGroup, ...]
    states: StatePlan | None
    """Plan of recurrent layers; None: the model has none."""


class StepBuffers:
    """Static buffers for the inputs of one step. Each step's copy to the device is copied into them.

    The device works in launch order, so a step reads its own inputs and not those of a later one.
    """

    def __init__(
        self, shapes: Items[StepShape], max_blocks: int, block_size: int, device: torch.device, num_tables: int = 1
    ) -> None:
        """Allocate buffers for `shapes`. A sequence has `num_tables` tables of at most `max_blocks` blocks."""
        self._block_size = block_size
        max_rows = max(shape.num_rows for shape in shapes)
        self._longest = max_blocks * block_size
        self._words = torch.zeros(max(shape.num_words for shape in shapes), dtype=torch.int64, device=device)
        self._last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """The tokens of the step before are at the end, as a placeholder is an index from there."""
        self._tables = torch.zeros(num_tables, max_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, device=device)

    def load(self, plan: PaddedPlan, on_device: DeviceBuffer, num_new_blocks: int) -> None:
        """Copy the planned inputs, and the new blocks at the end of the step's numbers, into the static buffers."""
        self._words[: len(plan.words)].copy_(on_device.ints(plan.words))
        if plan.has_placeholders:
            self._last_tokens[-len(on_device.last_tokens) :].copy_(on_device.last_tokens)
        if num_new_blocks:
            self.write_blocks(on_device.words[-2 * num_new_blocks :])

    def write_blocks(self, new_blocks: Tensor) -> None:
        """Write blocks into the tables: `new_blocks` are cells of the flattened tables, then the block of each."""
        cells, blocks = new_blocks.view(2, -1)
        self._tables.view(-1).index_copy_(0, cells, blocks.to(self._tables.dtype))

    def inputs(self, shape: StepShape) -> StaticInputs:
        """Return the inputs of a step of `shape`. Its operations are part of the captured forward pass."""
        parts = torch.split(self._words[: shape.num_words], list(shape.columns))
        head, state_slots, ids, starts, table_rows, *others = parts
        # Positions of the padding stay below those of the decodes, and 0 if they are chunks of recurrent layers.
        positions = starts + (head[0] * (table_rows >= 0) if shape.has_states else head[0])
        slots = self._slots(table_rows, positions)
        input_ids = known_ids(ids, self._last_tokens)
        if shape.num_chunks == 0:
            rows = self._rows[: shape.num_tokens]
            decodes, logits_rows = torch.stack([rows, positions, torch.ones_like(rows), table_rows], dim=1), None
            plans = self._plans(self._group(decodes, shape.num_tokens))
            of_states = [(decodes, state_slots)]
        else:
            logits_rows, decodes, chunks = others[0], others[1].view(-1, 4), others[2].view(-1, 4)
            plans = self._plans(self._group(decodes, shape.num_rows), self._group(chunks, shape.num_tokens))
            of_states = [(decodes, state_slots), (chunks, others[3])]
        states = _state_plan(of_states, shape) if shape.has_states else None
        groups = tuple(map(StaticGroup, slots, plans))
        return StaticInputs(input_ids[None], positions[None], logits_rows, groups, states)

    def _slots(self, table_rows: Tensor, positions: Tensor) -> Tensor:
        """Return the slots [num_tables, num_tokens] int64 of positions in rows of the tables."""
        blocks = self._tables[:, table_rows, positions // self._block_size]  # Row -1 is the last one.
        return torch.add(positions % self._block_size, blocks, alpha=self._block_size)

    def _group(self, chunks: Tensor, num_tokens: int) -> ChunkGroup:
        return ChunkGroup(chunks.int(), self._tables[0], num_tokens, self._longest)

    def _plans(self, decodes: ChunkGroup, prefills: ChunkGroup | None = None) -> Iterator[AttentionPlan]:
        """Yield the plan of each group of layers. They have the same chunks."""
        for tables in self._tables:
            yield AttentionPlan(
                replace(decodes, tables=tables), None if prefills is None else replace(prefills, tables=tables)
            )


def _state_plan(groups: Items[tuple[Tensor, Tensor]], shape: StepShape) -> StatePlan:
    """Return the plan of chunks [num_chunks, 4] with the slots of each group, the decodes first."""
    parts = []
    for chunks, slots in groups:
        fields = torch.cat([chunks[:, :3], slots.view(len(chunks), -1)], dim=1)
        parts.append(functional.pad(fields, (0, STATE_FIELDS - fields.shape[1])))
    return StatePlan(torch.cat(parts).int(), shape.num_rows, shape.num_tokens)
