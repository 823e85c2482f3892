"""Inputs of decodes at addresses that never change, as a captured graph needs them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.engine.batch import ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.attention.tiles import TileGroup, TilePlan
from replicas.model.batch.inputs import LastSampledTokens
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, Span
from replicas.model.decode_graphs.block_tables import BlockTableUpdate, DeviceBlockTables

_NUM_FIELDS = 6


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """What a forward pass over the first so many rows reads. A row without a sequence writes to the scratch block."""

    input_ids: Tensor
    """[1, num_rows] int64, gathered from the buffers anew"""
    position_ids: Tensor
    """[1, num_rows] int64"""
    slots: Tensor
    """[num_rows] int64"""
    plan: TilePlan
    """One decode per row; of no token where a row has no sequence."""


@dataclass(frozen=True, slots=True)
class SentDecodes:
    """What one step's decodes need, on its way to the device."""

    num_rows: int
    fields: Span
    update: BlockTableUpdate
    last_sampled: LastSampledTokens | None
    """Where some token is known to the device alone."""


class DecodeBuffers:
    """The inputs of one step of decodes, copied to fixed addresses from what travels to the device each step.

    Block tables stay there: only blocks that are new travel. What is written for a step is read by it alone, as the
    device works in the order of the launches.
    """

    def __init__(self, max_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        """Room for `max_rows` decodes, each of a sequence of up to `max_blocks` blocks."""
        self._max_rows = max_rows
        self._block_size = block_size
        self._longest = max_blocks * block_size
        self._fields = torch.zeros(_NUM_FIELDS, max_rows, dtype=torch.int64, device=device)
        self._previous = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, device=device)
        self._block_tables = DeviceBlockTables(max_rows, max_blocks)

    def send(
        self,
        items: Items[ScheduledSequence],
        num_rows: int,
        last_sampled: LastSampledTokens,
        to_device: HostToDeviceBuffer,
    ) -> SentDecodes:
        """Ask for `items`, of one token each, in the first of `num_rows` rows; the others have no sequence."""
        update = self._block_tables.update(items, to_device)
        known_ids, sources = _token_sources(items, self._max_rows, last_sampled.row_by_sequence)
        positions = [item.start for item in items]
        columns = (known_ids, sources, positions, [self._slot(item) for item in items], [1] * len(items), update.rows)
        padding = [0] * (num_rows - len(items))
        fields = to_device.ints(number for column in columns for number in (*column, *padding))
        has_placeholders = any(source >= self._max_rows for source in sources)
        return SentDecodes(num_rows, fields, update, last_sampled if has_placeholders else None)

    def load(self, sent: SentDecodes, on_device: DeviceBuffer) -> None:
        """Put what was sent where the forward pass reads it."""
        self._fields[:, : sent.num_rows].copy_(on_device.ints(sent.fields).view(_NUM_FIELDS, sent.num_rows))
        sent.update.apply(self._tables, on_device)
        self._block_tables.commit(sent.update)
        if sent.last_sampled is not None:
            self._previous[: len(sent.last_sampled.tokens)].copy_(sent.last_sampled.tokens)

    def inputs(self, num_rows: int) -> StaticInputs:
        """The first `num_rows` rows; what is computed here is a part of the forward pass."""
        tokens = torch.cat([self._fields[0], self._previous])
        _, sources, positions, slots, counts, table_rows = self._fields[:, :num_rows]
        tiles = torch.stack([self._rows[:num_rows], positions, counts, table_rows], dim=1).int()
        group = TileGroup(tiles, self._tables, tokens_per_tile=1, longest=self._longest)
        return StaticInputs(tokens[sources][None], positions[None], slots, TilePlan(decodes=group))

    def _slot(self, item: ScheduledSequence) -> int:
        index, offset = divmod(item.start, self._block_size)
        return item.sequence.block_table[index] * self._block_size + offset


def _token_sources(
    items: Items[ScheduledSequence], max_rows: int, row_by_sequence: dict[Sequence, int]
) -> tuple[list[int], list[int]]:
    """Ids that the host knows (else 0), and where each row's id is among those and, from `max_rows` on, the sampled."""
    known_ids: list[int] = []
    sources: list[int] = []
    for row, item in enumerate(items):
        is_known = item.start < len(item.sequence.token_ids)
        known_ids.append(item.sequence.token_ids[item.start] if is_known else 0)
        sources.append(row if is_known else max_rows + row_by_sequence[item.sequence])
    return known_ids, sources
