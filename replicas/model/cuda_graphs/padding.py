"""Padding of steps to the shapes of captured graphs, planned on the host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from torch import Tensor

from replicas.engine.batch import BatchColumns, StateMove
from replicas.model.attention.plan import STATE_SLOTS, state_fields
from replicas.model.batch.inputs import FlatBatch, LastRows, newest_ids, table_of
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
    num_tables: int = 1
    """Block tables of a sequence, one for each group of layers."""
    columns: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Number of words of each part of the inputs.

    The parts are token ids, positions and for each block table slots, one for each token, and then for decodes their
    rows in the block tables, for others the rows of the logits, the chunks of one token, and the longer ones. The
    padding is one more chunk. With recurrent state follow the slots of each decode, and the slots and snapshots of each
    longer chunk.
    """
    num_words: int = field(init=False, repr=False, compare=False)
    """Number of words of the inputs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", self._columns())
        object.__setattr__(self, "num_words", sum(self.columns))

    @classmethod
    def decodes(cls, num_rows: int, *, has_states: bool = False, num_tables: int = 1) -> StepShape:
        """Return the shape of `num_rows` decodes."""
        return cls(num_rows, num_rows, 0, has_states, num_tables)

    @classmethod
    def mixed(cls, num_tokens: int, max_num_seqs: int, *, has_states: bool = False, num_tables: int = 1) -> StepShape:
        """Return the shape of steps of `num_tokens` tokens of any sequences."""
        num_rows, num_chunks = min(num_tokens, max_num_seqs), min(num_tokens // 2, max_num_seqs)
        return cls(num_tokens, num_rows, num_chunks, has_states, num_tables)

    def _columns(self) -> tuple[int, ...]:
        of_tokens, slots = (self.num_tokens,) * (2 + self.num_tables), 2 * self.num_rows * self.has_states
        if self.num_chunks == 0:
            return (*of_tokens, self.num_rows, slots)
        chunks = self.num_chunks + 1
        longer = STATE_SLOTS * chunks * self.has_states
        return (*of_tokens, self.num_rows, 4 * self.num_rows, 4 * chunks, slots, longer)


@dataclass(frozen=True, slots=True)
class BlockTableUpdate:
    """New blocks of the tables on the device."""

    cells: Span  # [num_new_blocks]: indices of the changed cells in the flattened tables
    blocks: Span  # [num_new_blocks]: the block ids for these cells

    def apply(self, tables: Tensor, on_device: DeviceBuffer) -> None:
        """Write the new blocks to `tables` [num_tables, num_rows, num_blocks] int32."""
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


class BlockTableRows:
    """Rows of the block tables on the device, with a copy of what the planned steps write there.

    A running sequence has the row of its column in the engine's table, in the tables of all groups of layers. A block
    has its number in the tensors of the group: its id times the group's factor.

    Invariants:
        After the planned steps a row holds the blocks of its last owner that are recorded as written. The cells after
        them, and those of blocks that the owner has given back, are undefined. Whoever cannot run a planned step calls
        `forget`.
    """

    def __init__(self, num_rows: int, num_columns: int, factors: Items[int] = (1,)) -> None:
        self.tables = np.zeros((len(factors), num_rows, num_columns), np.int64)
        self._factors = factors
        self._admissions = np.zeros(num_rows, np.int64)
        """Number of the admission of each row's owner; 0: it has none, or one that does not run."""
        self._num_written = np.zeros(num_rows, np.int64)

    def update(self, columns: BatchColumns, to_device: HostToDeviceBuffer) -> BlockTableUpdate:
        """Return the update after which every item's sequence has its whole table in its row."""
        rows, num_blocks = columns.rows, columns.num_table_blocks
        num_written = np.where(self._admissions[rows] == columns.admissions, self._num_written[rows], 0)
        cells: list[int] = []
        blocks: list[int] = []
        for index in (num_written < num_blocks).nonzero()[0].tolist():
            row, first, end = rows.item(index), num_written.item(index), num_blocks.item(index)
            for number, factor in enumerate(self._factors):
                # A sequence's table only grows until the sequence is preempted.
                blocks.extend([block * factor for block in table_of(columns.sequences[index], number)[first:end]])
                first_cell = (number * self.tables.shape[1] + row) * self.tables.shape[2]
                cells.extend(range(first_cell + first, first_cell + end))
        if cells:
            self.tables.reshape(-1)[cells] = blocks
        self._admissions[rows] = np.maximum(columns.admissions, 0)
        self._num_written[rows] = num_blocks
        return BlockTableUpdate(to_device.ints(cells), to_device.ints(blocks))

    def slots(self, rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
        """Return the slots of `positions` in the tables of `rows`, [num_tables, num_positions]."""
        indices = positions // block_size
        # The block's first slot, plus the position in the block.
        slots: np.ndarray = (self.tables[:, rows, indices] - indices) * block_size + positions
        return slots

    def forget(self) -> None:
        """Forget the contents of all rows. The next steps send whole tables."""
        self._admissions[:] = 0


class StepPadding:
    """Planner of padded passes. It knows the rows of the block tables that stay on the device."""

    def __init__(self, shapes: Items[StepShape], block_size: int, max_blocks: int, factors: Items[int] = (1,)) -> None:
        """Make a planner for `shapes`, in order of size, and sequences of at most `max_blocks` blocks in each table.

        The shapes are those of decodes, then the others. `factors` are those of the groups of layers.
        """
        self._decode_shapes = [shape for shape in shapes if shape.num_chunks == 0]
        self._mixed_shapes = [shape for shape in shapes if shape.num_chunks > 0]
        self._max_rows = self._decode_shapes[-1].num_rows
        self._block_size = block_size
        self._no_rows = np.full(self._max_rows, -1)
        self._rows = BlockTableRows(self._max_rows, max_blocks, factors)

    def forget(self) -> None:
        """Forget the contents of the block tables, after a step that could not run."""
        self._rows.forget()

    def shape_of(self, columns: BatchColumns) -> StepShape | None:
        """Return the smallest shape that holds the items, of which none scores its prompt; None if none does."""
        if columns.rows.max() >= self._max_rows:
            return None
        are_decodes = np.count_nonzero((columns.num_tokens == 1) & columns.samples) == len(columns.sequences)
        shapes = self._decode_shapes if are_decodes else self._mixed_shapes
        index = bisect_left(shapes, int(columns.num_tokens.sum()), key=lambda shape: shape.num_tokens)
        return shapes[index] if index < len(shapes) else None

    def plan(
        self, columns: BatchColumns, shape: StepShape, last_rows: LastRows, to_device: HostToDeviceBuffer
    ) -> PaddedPlan:
        """Plan a pass over the items, padded to `shape`, which holds them, and add its numbers to `to_device`."""
        update = self._rows.update(columns, to_device)
        parts = (self._decodes if shape.num_chunks == 0 else self._mixed)(columns, shape, last_rows)
        words = np.zeros(shape.num_words, np.int64)
        start = 0
        for part, num_words in zip(parts, shape.columns, strict=True):
            assert len(part) <= num_words, "the items do not fit the shape"
            words[start : start + len(part)] = part
            start += num_words
        num_rows, has_placeholders = int(np.count_nonzero(columns.samples)), bool(np.count_nonzero(parts[0] < 0))
        return PaddedPlan(shape, num_rows, to_device.ints(words), update, has_placeholders)

    def _decodes(self, columns: BatchColumns, shape: StepShape, last_rows: LastRows) -> tuple[np.ndarray, ...]:
        """Return the parts of the inputs of decodes.

        They are those of `FlatBatch.of`, which takes longer: a decode has one token, and needs no chunk.
        """
        rows, positions = columns.rows, columns.starts
        table_rows = np.append(rows, self._no_rows[len(rows) : shape.num_tokens])
        slots = self._rows.slots(rows, positions, self._block_size)
        parts = newest_ids(columns, len(rows), last_rows), positions, *slots, table_rows
        return *parts, _words_of((move.source, move.target) for move in _states_of(columns, shape))

    def _mixed(self, columns: BatchColumns, shape: StepShape, last_rows: LastRows) -> tuple[np.ndarray, ...]:
        """Return the parts of the inputs of any step. A chunk of no tokens takes no rows."""
        batch = FlatBatch.of(columns, last_rows)
        slots = self._rows.slots(np.repeat(columns.rows, columns.num_tokens), batch.positions, self._block_size)
        num_tokens = len(batch.input_ids)
        chunks = np.stack([batch.first_rows, columns.starts, columns.num_tokens, columns.rows], axis=1)
        is_single = columns.num_tokens == 1
        padding = (num_tokens, 0, shape.num_tokens - num_tokens, -1)
        longer = np.append(chunks[~is_single], padding)
        parts = batch.input_ids, batch.positions, *slots, batch.logits_rows, chunks[is_single].ravel(), longer
        moves = list(zip(is_single.tolist(), _states_of(columns, shape), strict=False))
        return (
            *parts,
            _words_of((move.source, move.target) for is_alone, move in moves if is_alone),
            _words_of(state_fields(move) for is_alone, move in moves if not is_alone),
        )


def _states_of(columns: BatchColumns, shape: StepShape) -> Items[StateMove]:
    """Return the state slots of the items; none if the inputs have none."""
    return (columns.states or ()) if shape.has_states else ()


def _words_of(parts: Iterable[Items[int]]) -> np.ndarray:
    return np.array(list(chain.from_iterable(parts)), np.int64)
