"""Static input buffers of decodes: a captured graph reads its inputs at fixed addresses.

Block tables stay on the device too. Each step sends only the new blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.engine.batch import ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.attention.plan import AttentionPlan, ChunkGroup
from replicas.model.batch.inputs import LastSampledTokens
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, Span

_NUM_FIELDS = 5


@dataclass(frozen=True, slots=True)
class _WrittenRow:
    """Contents of a sequence's row: its first `num_blocks` blocks, after `preemption` preemptions."""

    row: int
    preemption: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BlockTableUpdate:
    """New blocks that are sent to the device, and the contents of the rows after the update."""

    rows: list[int]
    """Row of each item in the tables."""
    written: dict[Sequence, _WrittenRow]
    cells: Span  # [num_new_blocks]: indices of the changed cells in the flattened tables
    blocks: Span  # [num_new_blocks]: the block ids for these cells

    def apply(self, tables: Tensor, on_device: DeviceBuffer) -> None:
        """Write the new blocks to `tables` [num_rows, num_blocks] int32."""
        if len(self.cells) > 0:
            tables.view(-1).index_copy_(0, on_device.ints(self.cells), on_device.ints(self.blocks).to(tables.dtype))


class DeviceBlockTables:
    """Assignment of table rows to decoding sequences. A sequence keeps its row until another one may need it.

    Invariants:
        A row belongs to at most one sequence and holds the blocks that are recorded as written. The cells after them
        are undefined.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self._num_columns = num_columns
        self._num_rows = num_rows
        self._written: dict[Sequence, _WrittenRow] = {}

    def update(self, items: Items[ScheduledSequence], to_device: HostToDeviceBuffer) -> BlockTableUpdate:
        """Return the update after which every item's sequence has its whole table in a row.

        The rows' recorded contents do not change before `commit`.
        """
        written = self._kept_rows(items)
        free = self._free_rows(written)
        cells: list[int] = []
        blocks: list[int] = []
        for item in items:
            sequence, table = item.sequence, item.sequence.block_table
            known = written.get(sequence)
            if known is None:
                known = _WrittenRow(free.pop(), item.preemption, 0)
            elif known.preemption != item.preemption:
                known = _WrittenRow(known.row, item.preemption, 0)
            # A sequence's table only grows until the sequence is preempted.
            if known.num_blocks < len(table):
                first = known.row * self._num_columns
                cells.extend(range(first + known.num_blocks, first + len(table)))
                blocks.extend(table[known.num_blocks :])
                known = _WrittenRow(known.row, item.preemption, len(table))
            written[sequence] = known
        rows = [written[item.sequence].row for item in items]
        return BlockTableUpdate(rows, written, to_device.ints(cells), to_device.ints(blocks))

    def commit(self, update: BlockTableUpdate) -> None:
        """Record that `update` was applied."""
        self._written = update.written

    def _kept_rows(self, items: Items[ScheduledSequence]) -> dict[Sequence, _WrittenRow]:
        """Return the current owners of rows. If rows could run short, only those of `items` keep theirs."""
        if len(self._written) + len(items) <= self._num_rows:
            return dict(self._written)
        return {item.sequence: self._written[item.sequence] for item in items if item.sequence in self._written}

    def _free_rows(self, written: dict[Sequence, _WrittenRow]) -> list[int]:
        taken = {known.row for known in written.values()}
        return [row for row in range(self._num_rows) if row not in taken]


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Inputs of a forward pass over the first `num_rows` rows. Rows without a sequence write to the scratch block."""

    input_ids: Tensor  # [1, num_rows] int64, gathered from the buffers in each pass
    position_ids: Tensor  # [1, num_rows] int64
    slots: Tensor  # [num_rows] int64
    plan: AttentionPlan
    """Plan with one decode per row."""


@dataclass(frozen=True, slots=True)
class SentDecodes:
    """Inputs of one step's decodes, as added to the step's copy to the device."""

    num_rows: int
    fields: Span
    update: BlockTableUpdate
    last_sampled: LastSampledTokens | None
    """Tokens of the previous step; None if the host knows every input token."""


class DecodeBuffers:
    """Static buffers for the inputs of one step of decodes. Each step's copy to the device is copied into them.

    Block tables stay on the device, and each step sends only new blocks. The device works in launch order, so a step
    reads its own inputs and not those of a later one.
    """

    def __init__(self, max_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        """Allocate buffers for `max_rows` decodes, each of a sequence of at most `max_blocks` blocks."""
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
        """Add the inputs of `items`, of one token each, to `to_device`.

        The items take the first of `num_rows` rows. The other rows have no sequence.
        """
        update = self._block_tables.update(items, to_device)
        known_ids, sources = _token_sources(items, self._max_rows, last_sampled.row_by_sequence)
        positions = [item.start for item in items]
        columns = (known_ids, sources, positions, [self._slot(item) for item in items], update.rows)
        num_padded = num_rows - len(items)
        fields = to_device.ints(
            number for column in columns for number in (*column, *[-1 if column is update.rows else 0] * num_padded)
        )
        has_placeholders = any(source >= self._max_rows for source in sources)
        return SentDecodes(num_rows, fields, update, last_sampled if has_placeholders else None)

    def load(self, sent: SentDecodes, on_device: DeviceBuffer) -> None:
        """Copy the sent inputs into the static buffers."""
        self._fields[:, : sent.num_rows].copy_(on_device.ints(sent.fields).view(_NUM_FIELDS, sent.num_rows))
        sent.update.apply(self._tables, on_device)
        self._block_tables.commit(sent.update)
        if sent.last_sampled is not None:
            self._previous[: len(sent.last_sampled.tokens)].copy_(sent.last_sampled.tokens)

    def inputs(self, num_rows: int) -> StaticInputs:
        """Return the inputs of the first `num_rows` rows. Its operations are part of the captured forward pass."""
        tokens = torch.cat([self._fields[0], self._previous])
        _, sources, positions, slots, table_rows = self._fields[:, :num_rows]
        rows = self._rows[:num_rows]
        chunks = torch.stack([rows, positions, torch.ones_like(rows), table_rows], dim=1).int()
        group = ChunkGroup(chunks, self._tables, num_tokens=num_rows, longest=self._longest)
        return StaticInputs(tokens[sources][None], positions[None], slots, AttentionPlan(decodes=group))

    def _slot(self, item: ScheduledSequence) -> int:
        index, offset = divmod(item.start, self._block_size)
        return item.sequence.block_table[index] * self._block_size + offset


def _token_sources(
    items: Items[ScheduledSequence], max_rows: int, row_by_sequence: dict[Sequence, int]
) -> tuple[list[int], list[int]]:
    """Return each row's token id, and the index from which the device reads it.

    Ids that the host does not know are 0. An index below `max_rows` is a row of these ids; `max_rows` + r is row r of
    the tokens sampled last.
    """
    known_ids: list[int] = []
    sources: list[int] = []
    for row, item in enumerate(items):
        is_known = item.start < len(item.sequence.token_ids)
        known_ids.append(item.sequence.token_ids[item.start] if is_known else 0)
        sources.append(row if is_known else max_rows + row_by_sequence[item.sequence])
    return known_ids, sources
