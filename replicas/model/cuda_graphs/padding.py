"""Padding of steps to the shapes of captured graphs, planned on the host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from replicas.engine.batch import ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.attention.plan import STATE_SLOTS, state_fields
from replicas.model.batch.inputs import FlatBatch, LastRows, flat_slots
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, Span


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes to which a step is padded."""

    num_tokens: int
    num_rows: int
    """Rows of logits, and most sequences of one token."""
    num_chunks: int
    """Most sequences of several tokens; 0: every token is a decode that samples."""
    has_states: bool = False
    """True if the inputs have the slots of recurrent state."""

    @classmethod
    def decodes(cls, num_rows: int, *, has_states: bool = False) -> StepShape:
        """Return the shape of `num_rows` decodes."""
        return cls(num_rows, num_rows, 0, has_states)

    @classmethod
    def mixed(cls, num_tokens: int, max_num_seqs: int, *, has_states: bool = False) -> StepShape:
        """Return the shape of steps of `num_tokens` tokens of any sequences."""
        return cls(num_tokens, min(num_tokens, max_num_seqs), min(num_tokens // 2, max_num_seqs), has_states)

    @property
    def columns(self) -> tuple[int, ...]:
        """Number of words of each part of the inputs.

        The parts are token ids, positions and slots, one for each token, and then for decodes their rows in the block
        tables, for others the rows of the logits, the chunks of one token, and the longer ones. The padding is one more
        chunk. With recurrent state follow the slots of each decode, and the slots and snapshots of each longer chunk.
        """
        slots = 2 * self.num_rows * self.has_states
        if self.num_chunks == 0:
            return (*(self.num_tokens,) * 4, slots)
        chunks = self.num_chunks + 1
        longer = STATE_SLOTS * chunks * self.has_states
        return (*(self.num_tokens,) * 3, self.num_rows, 4 * self.num_rows, 4 * chunks, slots, longer)

    @property
    def num_words(self) -> int:
        """Number of words of the inputs."""
        return sum(self.columns)


@dataclass(frozen=True, slots=True)
class BlockTableUpdate:
    """New blocks of the tables on the device."""

    cells: Span  # [num_new_blocks]: indices of the changed cells in the flattened tables
    blocks: Span  # [num_new_blocks]: the block ids for these cells

    def apply(self, tables: Tensor, on_device: DeviceBuffer) -> None:
        """Write the new blocks to `tables` [num_rows, num_blocks] int32."""
        if self.cells:
            tables.view(-1).index_copy_(0, on_device.ints(self.cells), on_device.ints(self.blocks).to(tables.dtype))


@dataclass(frozen=True, slots=True)
class PaddedPlan:
    """Inputs of a padded pass in a step's numbers."""

    shape: StepShape
    num_rows: int
    """Rows of the logits that belong to sequences: the first ones."""
    words: Span
    update: BlockTableUpdate
    has_placeholders: bool


@dataclass(slots=True)
class _WrittenRow:
    """Contents of a sequence's row: its first `num_blocks` blocks, after `preemption` preemptions."""

    row: int
    preemption: int
    num_blocks: int


class BlockTableRows:
    """Assignment of the device's table rows to running sequences. A sequence keeps its row while there are free ones.

    Invariants:
        A row belongs to at most one sequence, or is free. After the planned steps it holds the blocks that are recorded
        as written. The cells after them are undefined. Whoever cannot run a planned step calls `forget`.
    """

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self._num_rows = num_rows
        self._num_columns = num_columns
        self._written: dict[Sequence, _WrittenRow] = {}
        self._free = list(range(num_rows))

    def update(self, items: Items[ScheduledSequence], to_device: HostToDeviceBuffer) -> BlockTableUpdate:
        """Return the update after which every item's sequence has its whole table in a row."""
        self._make_room(items)
        cells: list[int] = []
        blocks: list[int] = []
        for item in items:
            sequence, table = item.sequence, item.sequence.block_table
            written = self._written.get(sequence)
            if written is None:
                written = self._written[sequence] = _WrittenRow(self._free.pop(), item.preemption, 0)
            elif written.preemption != item.preemption:
                written.preemption, written.num_blocks = item.preemption, 0
            # A sequence's table only grows until the sequence is preempted.
            if written.num_blocks < len(table):
                first = written.row * self._num_columns
                cells.extend(range(first + written.num_blocks, first + len(table)))
                blocks.extend(table[written.num_blocks :])
                written.num_blocks = len(table)
        return BlockTableUpdate(to_device.ints(cells), to_device.ints(blocks))

    def rows_of(self, items: Items[ScheduledSequence]) -> list[int]:
        """Return the row of each item of the last update."""
        return [self._written[item.sequence].row for item in items]

    def forget(self) -> None:
        """Forget the contents of all rows. The next steps send whole tables."""
        self._written.clear()
        self._free = list(range(self._num_rows))

    def _make_room(self, items: Items[ScheduledSequence]) -> None:
        """Free the rows of all sequences that are not in `items`, if there are too few free ones."""
        if sum(item.sequence not in self._written for item in items) <= len(self._free):
            return
        present = {item.sequence for item in items}
        for sequence in [owner for owner in self._written if owner not in present]:
            self._free.append(self._written.pop(sequence).row)


class StepPadding:
    """Planner of padded passes. It knows the rows of the block tables that stay on the device."""

    def __init__(self, shapes: Items[StepShape], block_size: int, max_blocks: int) -> None:
        """Make a planner for `shapes`, in order of size, and sequences of at most `max_blocks` blocks.

        The shapes are those of decodes, then the others.
        """
        self._decode_shapes = [shape for shape in shapes if shape.num_chunks == 0]
        self._mixed_shapes = [shape for shape in shapes if shape.num_chunks > 0]
        self._max_rows = self._decode_shapes[-1].num_rows
        self._block_size = block_size
        self._rows = BlockTableRows(self._max_rows, max_blocks)

    def forget(self) -> None:
        """Forget the contents of the block tables, after a step that could not run."""
        self._rows.forget()

    def shape_of(self, items: Items[ScheduledSequence]) -> StepShape | None:
        """Return the smallest shape that holds `items`, of which none scores its prompt; None if none does."""
        if len(items) > self._max_rows:
            return None
        are_decodes = all(item.num_tokens == 1 and item.samples for item in items)
        num_tokens = sum(item.num_tokens for item in items)
        shapes = self._decode_shapes if are_decodes else self._mixed_shapes
        index = bisect_left(shapes, num_tokens, key=lambda shape: shape.num_tokens)
        return shapes[index] if index < len(shapes) else None

    def plan(
        self,
        items: Items[ScheduledSequence],
        shape: StepShape,
        last_rows: LastRows,
        to_device: HostToDeviceBuffer,
    ) -> PaddedPlan:
        """Plan a pass over `items`, padded to `shape`, which holds them, and add its numbers to `to_device`."""
        update = self._rows.update(items, to_device)
        parts = (self._decodes if shape.num_chunks == 0 else self._mixed)(items, shape, last_rows)
        words = to_device.ints(chain.from_iterable(parts))
        assert len(words) == shape.num_words, "the items do not fit the shape"
        num_rows = sum(item.samples for item in items)
        return PaddedPlan(shape, num_rows, words, update, has_placeholders=min(parts[0]) < 0)

    def _decodes(self, items: Items[ScheduledSequence], shape: StepShape, last_rows: LastRows) -> tuple[list[int], ...]:
        """Return the parts of the inputs of decodes.

        They are those of `FlatBatch.of`, which takes longer: a decode has one token, and needs no chunk.
        """
        padding = [0] * (shape.num_tokens - len(items))
        ids = []
        for item in items:
            is_known = item.start < len(item.sequence.token_ids)
            ids.append(item.sequence.token_ids[item.start] if is_known else last_rows[item.sequence])
        positions = [item.start for item in items]
        slots = [self._slot(item) for item in items]
        table_rows = self._rows.rows_of(items)
        states = [slot for item in items for slot in (item.state.source, item.state.target)] if shape.has_states else []
        states += [0] * (2 * len(padding) * shape.has_states)
        table_rows += [-1] * len(padding)
        return [*ids, *padding], [*positions, *padding], [*slots, *padding], table_rows, states

    def _mixed(self, items: Items[ScheduledSequence], shape: StepShape, last_rows: LastRows) -> tuple[list[int], ...]:
        """Return the parts of the inputs of any step."""
        batch = FlatBatch.of(items, last_rows)
        slots = flat_slots(items, [item.sequence.block_table for item in items], self._block_size)
        num_tokens = len(batch.input_ids)
        decodes: list[int] = []
        chunks: list[int] = []
        decode_states: list[int] = []
        chunk_states: list[int] = []
        for row, item, table_row in zip(batch.first_rows, items, self._rows.rows_of(items), strict=True):
            of_kind = decodes if item.num_tokens == 1 else chunks
            of_kind += (row, item.start, item.num_tokens, table_row)
            if shape.has_states and item.num_tokens == 1:
                decode_states += (item.state.source, item.state.target)
            elif shape.has_states:
                chunk_states += state_fields(item.state)
        chunks += (num_tokens, 0, shape.num_tokens - num_tokens, -1)
        states = (decode_states, chunk_states)
        parts = (batch.input_ids, batch.positions, slots, batch.logits_rows, decodes, chunks, *states)
        for part, num_words in zip(parts, shape.columns, strict=True):
            part += [0] * (num_words - len(part))  # A chunk of no tokens takes no rows.
        return parts

    def _slot(self, item: ScheduledSequence) -> int:
        index, offset = divmod(item.start, self._block_size)
        return item.sequence.block_table[index] * self._block_size + offset
