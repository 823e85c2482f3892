"""Block tables that stay on the device: which row is whose, and what it lacks."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from torch import Tensor

from replicas.engine.batch import ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, Span


@dataclass(frozen=True, slots=True)
class _WrittenRow:
    """What a sequence's row holds: its first blocks, as they were after so many preemptions."""

    row: int
    preemption: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BlockTableUpdate:
    """Blocks on their way to the device, and what the rows hold once they are there."""

    rows: list[int]
    """Each item's row in the tables."""
    written: dict[Sequence, _WrittenRow]
    cells: Span
    """[num_new_blocks]: which cells of the flattened tables change."""
    blocks: Span
    """[num_new_blocks]"""

    def apply(self, tables: Tensor, on_device: DeviceBuffer) -> None:
        """Write the new blocks to `tables` [num_rows, num_blocks] int32."""
        if len(self.cells) > 0:
            tables.view(-1).index_copy_(0, on_device.ints(self.cells), on_device.ints(self.blocks).to(tables.dtype))


class DeviceBlockTables:
    """Gives each sequence that decodes a row, and keeps it for as long as nobody else needs it.

    Invariants:
        A row belongs to one sequence at most, and holds the blocks that are noted as written.
        Past those it holds anything.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self._num_columns = num_columns
        self._num_rows = num_rows
        self._written: dict[Sequence, _WrittenRow] = {}

    def update(self, items: Items[ScheduledSequence], to_device: HostToDeviceBuffer) -> BlockTableUpdate:
        """What it takes for every item's sequence to have its whole table in a row; nothing counts before `commit`."""
        written = self._keeping(items)
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
            # A table only grows, until the sequence is preempted.
            if known.num_blocks < len(table):
                first = known.row * self._num_columns
                cells.extend(range(first + known.num_blocks, first + len(table)))
                blocks.extend(table[known.num_blocks :])
                known = _WrittenRow(known.row, item.preemption, len(table))
            written[sequence] = known
        rows = [written[item.sequence].row for item in items]
        return BlockTableUpdate(rows, written, to_device.ints(cells), to_device.ints(blocks))

    def commit(self, update: BlockTableUpdate) -> None:
        """Note that `update` has been applied."""
        self._written = update.written

    def _keeping(self, items: Items[ScheduledSequence]) -> dict[Sequence, _WrittenRow]:
        """The present owners, without those of no item where their rows may be needed."""
        if len(self._written) + len(items) <= self._num_rows:
            return dict(self._written)
        return {item.sequence: self._written[item.sequence] for item in items if item.sequence in self._written}

    def _free_rows(self, written: dict[Sequence, _WrittenRow]) -> list[int]:
        taken = {known.row for known in written.values()}
        return [row for row in range(self._num_rows) if row not in taken]
