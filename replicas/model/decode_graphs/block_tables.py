"""Block tables that stay on the device; each step sends only the new blocks."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from torch import Tensor

from replicas.engine.batch import ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, Span


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
    cells: Span
    """[num_new_blocks]: indices of the changed cells in the flattened tables."""
    blocks: Span
    """[num_new_blocks]: the block ids for these cells."""

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

    def _keeping(self, items: Items[ScheduledSequence]) -> dict[Sequence, _WrittenRow]:
        """Return the current owners of rows. If rows could run short, only those of `items` keep theirs."""
        if len(self._written) + len(items) <= self._num_rows:
            return dict(self._written)
        return {item.sequence: self._written[item.sequence] for item in items if item.sequence in self._written}

    def _free_rows(self, written: dict[Sequence, _WrittenRow]) -> list[int]:
        taken = {known.row for known in written.values()}
        return [row for row in range(self._num_rows) if row not in taken]
