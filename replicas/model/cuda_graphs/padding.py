"""Padding of steps to the shapes of captured graphs, planned on the host."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import Tensor

from replicas.engine.batch import BatchColumns, StateMove
from replicas.model.attention.plan import STATE_SLOTS, state_fields
from replicas.model.batch.inputs import ColumnOwners, FlatBatch, LastRows, newest_ids, table_of
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, Span

NUM_HEAD_WORDS = 2
"""Words before the inputs: the number of steps by which the positions have advanced since they were sent, and a zero.

They take 16 bytes, so that the inputs begin at a multiple of that.
"""
_NO_WORDS = np.zeros(0, np.int64)


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
    columns: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Number of words of each part of the inputs.

    The first part is `NUM_HEAD_WORDS`. Then come token ids, positions and rows in the block tables, one for each token.
    A row of -1 belongs to no sequence. For steps other than decodes follow the rows of the logits, the chunks of one
    token, and the longer ones; the padding is one more chunk. With recurrent state follow the slots of each decode, and
    the slots and snapshots of each longer chunk.
    """
    num_words: int = field(init=False, repr=False, compare=False)
    """Number of words of the inputs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", self._columns())
        object.__setattr__(self, "num_words", sum(self.columns))

    @classmethod
    def decodes(cls, num_rows: int, *, has_states: bool = False) -> StepShape:
        """Return the shape of `num_rows` decodes."""
        return cls(num_rows, num_rows, 0, has_states)

    @classmethod
    def mixed(cls, num_tokens: int, max_num_seqs: int, *, has_states: bool = False) -> StepShape:
        """Return the shape of steps of `num_tokens` tokens of any sequences."""
        num_rows, num_chunks = min(num_tokens, max_num_seqs), min(num_tokens // 2, max_num_seqs)
        return cls(num_tokens, num_rows, num_chunks, has_states)

    def _columns(self) -> tuple[int, ...]:
        of_tokens, slots = (NUM_HEAD_WORDS, *(self.num_tokens,) * 3), 2 * self.num_rows * self.has_states
        if self.num_chunks == 0:
            return (*of_tokens, slots)
        chunks = self.num_chunks + 1
        longer = STATE_SLOTS * chunks * self.has_states
        return (*of_tokens, self.num_rows, 4 * self.num_rows, 4 * chunks, slots, longer)


# Named tuples are made, hashed and compared in less than half of the time of frozen dataclasses.
class BlockTableUpdate(NamedTuple):
    """New blocks of the tables on the device."""

    cells: Span  # [num_new_blocks]: indices of the changed cells in the flattened tables
    blocks: Span  # [num_new_blocks]: the block ids for these cells

    def apply(self, tables: Tensor, on_device: DeviceBuffer) -> None:
        """Write the new blocks to `tables` [num_tables, num_rows, num_blocks] int32."""
        if self.cells:
            tables.view(-1).index_copy_(0, on_device.ints(self.cells), on_device.ints(self.blocks).to(tables.dtype))


class PaddedPlan(NamedTuple):
    """Inputs of a padded pass in a step's numbers."""

    shape: StepShape
    num_rows: int
    """Rows of the logits that belong to sequences: the first ones."""
    words: Span
    """The inputs, or the head words alone: then all others are those of the step before."""
    update: BlockTableUpdate
    has_placeholders: bool


_NO_UPDATE = BlockTableUpdate(Span(0), Span(0))


class BlockTableRows:
    """Rows of the block tables on the device: what the planned steps write there.

    A running sequence has the row of its column in the engine's table, in the tables of all groups of layers. A block
    has its number in the tensors of the group: its id times the group's factor. After the `num_rows` rows each table has
    one that stays zero, the scratch block, for tokens that belong to no sequence: their row is -1.

    Invariants:
        After the planned steps a row holds the blocks of its last owner that are recorded as written. The cells after
        them, and those of blocks that the owner has given back, are undefined. Whoever cannot run a planned step calls
        `forget`.
    """

    def __init__(self, num_rows: int, num_columns: int, factors: Items[int] = (1,)) -> None:
        self._shape = num_rows + 1, num_columns
        self._factors = factors
        self._owners = ColumnOwners()
        self._num_written = np.zeros(num_rows, np.int64)
        """Number of blocks in each row that are its owner's."""

    def update(self, columns: BatchColumns, to_device: HostToDeviceBuffer) -> BlockTableUpdate:
        """Return the update after which every item's sequence has its whole table in its row."""
        rows, num_blocks = columns.rows, columns.num_table_blocks
        if len(newcomers := self._owners.newcomers(columns)):
            self._num_written[rows[newcomers]] = 0
        num_written = self._num_written[rows]
        growing = (num_written < num_blocks).nonzero()[0]
        if not len(growing):
            return _NO_UPDATE
        num_rows, num_columns = self._shape
        cells: list[int] = []
        blocks: list[int] = []
        for index in growing.tolist():
            start, end = num_written.item(index), num_blocks.item(index)
            for number, factor in enumerate(self._factors):
                # A sequence's table only grows until the sequence is preempted.
                new = table_of(columns.sequences[index], number)[start:end]
                first = (number * num_rows + rows.item(index)) * num_columns
                cells += range(first + start, first + end)
                blocks += new if factor == 1 else [block * factor for block in new]
        self._num_written[rows] = num_blocks
        return BlockTableUpdate(to_device.ints(cells), to_device.ints(blocks))

    def forget(self) -> None:
        """Forget the contents of all rows. The next steps send whole tables."""
        self._owners.forget()


class StepPadding:
    """Planner of padded passes. It knows the rows of the block tables that stay on the device.

    While the same sequences decode and each takes the token of the step before, nothing but new blocks is sent: the
    positions advance on the device.
    """

    def __init__(self, shapes: Items[StepShape], max_blocks: int, factors: Items[int] = (1,)) -> None:
        """Make a planner for `shapes`, in order of size, and sequences of at most `max_blocks` blocks in each table.

        The shapes are those of decodes, then the others. `factors` are those of the groups of layers.
        """
        self._decode_shapes = {shape.num_tokens: shape for shape in shapes if shape.num_chunks == 0}
        self._mixed_shapes = {shape.num_tokens: shape for shape in shapes if shape.num_chunks > 0}
        self._max_rows = max(self._decode_shapes)
        self._last: np.ndarray | None = None
        self._fits = False
        """True if there is a row for each of the columns of the engine's table in `_last`."""
        self._rows = BlockTableRows(self._max_rows, max_blocks, factors)
        self._sent: _SentDecodes | None = None

    def forget(self) -> None:
        """Forget what is on the device, after a step that could not run."""
        self._rows.forget()
        self._sent = None

    def shape_of(self, columns: BatchColumns) -> StepShape | None:
        """Return the smallest shape that holds the items, of which none scores its prompt; None if none does."""
        if columns.rows is not self._last:
            self._last, self._fits = columns.rows, int(columns.rows.max()) < self._max_rows
        if not self._fits:
            return None
        num_tokens = columns.num_all_tokens
        are_decodes = num_tokens == len(columns.sequences) == np.count_nonzero(columns.samples)
        shapes = self._decode_shapes if are_decodes else self._mixed_shapes
        return next((shape for size, shape in shapes.items() if size >= num_tokens), None)

    def plan(
        self, columns: BatchColumns, shape: StepShape, last_rows: LastRows, to_device: HostToDeviceBuffer
    ) -> PaddedPlan:
        """Plan a pass over the items, padded to `shape`, which holds them, and add its numbers to `to_device`."""
        update = self._rows.update(columns, to_device)
        are_last = shape.num_chunks == 0 and last_rows.are_of(columns)
        if are_last and self._sent is not None and (num_steps := self._sent.num_steps_to(columns)):
            head, words = to_device.room(NUM_HEAD_WORDS)
            words[0] = num_steps
            return PaddedPlan(shape, len(columns.sequences), head, update, has_placeholders=True)
        parts = (self._decodes if shape.num_chunks == 0 else self._mixed)(columns, shape, last_rows)
        span, words = to_device.room(shape.num_words)
        start = NUM_HEAD_WORDS
        for part, num_words in zip(parts, shape.columns[1:], strict=True):
            assert len(part) <= num_words, "the items do not fit the shape"
            words[start : start + len(part)] = part
            start += num_words
        self._sent = _SentDecodes(columns) if are_last and not shape.has_states else None
        num_rows, has_placeholders = int(np.count_nonzero(columns.samples)), bool(np.count_nonzero(parts[0] < 0))
        return PaddedPlan(shape, num_rows, span, update, has_placeholders)

    def _decodes(self, columns: BatchColumns, shape: StepShape, last_rows: LastRows) -> tuple[np.ndarray, ...]:
        """Return the parts of the inputs of decodes.

        They are those of `FlatBatch.of`, which takes longer: a decode has one token, and needs no chunk.
        """
        states = _states_of(columns, shape)
        moves = _words_of((move.source, move.target) for move in states) if states else _NO_WORDS
        ids = newest_ids(columns, len(columns.rows), last_rows)
        return ids, columns.starts, _table_rows(columns.rows, shape), moves

    def _mixed(self, columns: BatchColumns, shape: StepShape, last_rows: LastRows) -> tuple[np.ndarray, ...]:
        """Return the parts of the inputs of any step. A chunk of no tokens takes no rows."""
        batch = FlatBatch.of(columns, last_rows)
        table_rows = _table_rows(np.repeat(columns.rows, columns.num_tokens), shape)
        num_tokens = len(batch.input_ids)
        chunks = np.stack([batch.first_rows, columns.starts, columns.num_tokens, columns.rows], axis=1)
        is_single = columns.num_tokens == 1
        padding = (num_tokens, 0, shape.num_tokens - num_tokens, -1)
        longer = np.append(chunks[~is_single], padding)
        parts = batch.input_ids, batch.positions, table_rows, batch.logits_rows, chunks[is_single].ravel(), longer
        moves = list(zip(is_single.tolist(), _states_of(columns, shape), strict=False))
        return (
            *parts,
            _words_of((move.source, move.target) for is_alone, move in moves if is_alone),
            _words_of(state_fields(move) for is_alone, move in moves if not is_alone),
        )


class _SentDecodes:
    """Decodes whose inputs were sent last: each takes the token of the step before, in their order."""

    def __init__(self, columns: BatchColumns) -> None:
        self._rows = columns.rows
        self._starts = columns.starts
        self._num_steps = 0

    def num_steps_to(self, columns: BatchColumns) -> int:
        """Return the number of steps by which `columns` follow these, and count one more; 0: they do not follow."""
        num_steps = self._num_steps + 1
        if columns.rows is not self._rows or np.count_nonzero(columns.starts - self._starts != num_steps):
            return 0
        self._num_steps = num_steps
        return num_steps


def _table_rows(rows: np.ndarray, shape: StepShape) -> np.ndarray:
    """Return the rows in the block tables of all tokens of a shape, of which the first are `rows`."""
    if len(rows) == shape.num_tokens:
        return rows
    table_rows = np.full(shape.num_tokens, -1)
    table_rows[: len(rows)] = rows
    return table_rows


def _states_of(columns: BatchColumns, shape: StepShape) -> Items[StateMove]:
    """Return the state slots of the items; none if the inputs have none."""
    return (columns.states or ()) if shape.has_states else ()


def _words_of(parts: Iterable[Items[int]]) -> np.ndarray:
    return np.array(list(chain.from_iterable(parts)), np.int64)
