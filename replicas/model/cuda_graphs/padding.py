"""Padding of steps to the shapes of captured graphs, planned on the host."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from replicas.engine.batch import BatchColumns
from replicas.model.attention.plan import STATE_SLOTS, state_fields
from replicas.model.batch.inputs import ColumnOwners, FlatBatch, LastRows, newest_ids, table_of
from replicas.model.batch.transfers import HostToDeviceBuffer, Span

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

    The first part is `NUM_HEAD_WORDS`, the second one the state slots of each chunk of one token, if there are any.
    Then come token ids, positions and rows in the block tables, one for each token. A row of -1 belongs to no sequence.
    For steps other than decodes follow the rows of the logits, the chunks of one token, and the longer ones, which the
    padding is one of, and with recurrent state the slots and snapshots of these.
    """
    num_words: int = field(init=False, repr=False, compare=False)
    """Number of words of the inputs."""
    num_changing_words: int = field(init=False, repr=False, compare=False)
    """Number of the first words that change in each step of the same decodes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", self._columns())
        object.__setattr__(self, "num_words", sum(self.columns))
        object.__setattr__(self, "num_changing_words", sum(self.columns[:2]))

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
        of_tokens = NUM_HEAD_WORDS, 2 * self.num_rows * self.has_states, *(self.num_tokens,) * 3
        if self.num_chunks == 0:
            return of_tokens
        chunks = self.num_chunks + 1
        return (*of_tokens, self.num_rows, 4 * self.num_rows, 4 * chunks, STATE_SLOTS * chunks * self.has_states)


# A named tuple is made, hashed and compared in less than half of the time of a frozen dataclass.
class PaddedPlan(NamedTuple):
    """Inputs of a padded pass in a step's numbers."""

    shape: StepShape
    num_rows: int
    """Rows of the logits that belong to sequences: the first ones."""
    words: Span
    """The inputs, or those of their words that change in each step: then all others are those of the step before."""
    has_placeholders: bool


class BlockTableRows:
    """Rows of the block tables on the device: what the planned steps write there.

    A running sequence has the row of its column in the engine's table, in the tables of all groups of layers. A block
    has its number in the tensors of the group: its id times the group's factor. The last row of each table belongs to
    no sequence and stays zero, the scratch block: tokens of the padding have row -1.

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
        """Number of blocks in each row that are its owner's. Those of the rows `_last` are in `_num_last`."""
        self._last = self._num_last = self._first_cells = np.zeros(0, np.int64)
        """Rows of the last step, the numbers of blocks in them, and their first cells in the first table."""

    def update(self, columns: BatchColumns, to_device: HostToDeviceBuffer) -> int:
        """Add the changed cells of the flattened tables, and then the new block of each, to `to_device`.

        After that every item's sequence has its whole table in its row. Return the number of new blocks.
        """
        rows, num_blocks = columns.rows, columns.num_table_blocks
        if rows is not self._last:
            self._num_written[self._last] = self._num_last
            self._num_written[rows[self._owners.newcomers(columns)]] = 0
            self._last, self._num_last = rows, self._num_written[rows]
            self._first_cells = rows * self._shape[1]
        num_written, self._num_last = self._num_last, num_blocks
        growth = num_blocks - num_written
        growing = growth.nonzero()[0]
        if not len(growing):
            return 0
        if len(self._factors) == 1 and not np.count_nonzero(growth > 1):  # Most steps of decodes are planned here.
            _, numbers = to_device.room(2 * len(growing))
            numbers[: len(growing)] = (self._first_cells + num_written)[growing]
            numbers[len(growing) :] = columns.newest_blocks[growing] * self._factors[0]
            return len(growing)
        num_rows, num_columns = self._shape
        cells: list[int] = []
        blocks: list[int] = []
        for index in growing.tolist():
            start, end = num_written.item(index), num_blocks.item(index)
            for number, factor in enumerate(self._factors):
                first_cell = (number * num_rows + rows.item(index)) * num_columns
                cells += range(first_cell + start, first_cell + end)
                # A sequence's table only grows until the sequence is preempted.
                blocks += [block * factor for block in table_of(columns.sequences[index], number)[start:end]]
        to_device.ints(cells + blocks)
        return len(cells)

    def forget(self) -> None:
        """Forget the contents of all rows. The next steps send whole tables."""
        self._owners.forget()
        self._last = self._num_last = self._last[:0]


class StepPadding:
    """Planner of padded passes. It knows the rows of the block tables that stay on the device.

    While the same sequences decode and each takes the token of the step before, nothing is sent but new blocks and
    slots of recurrent state: the positions advance on the device.
    """

    def __init__(self, shapes: Items[StepShape], max_blocks: int, factors: Items[int] = (1,)) -> None:
        """Make a planner for `shapes`, in order of size, and sequences of at most `max_blocks` blocks in each table.

        The shapes are those of decodes, then the others. `factors` are those of the groups of layers.
        """
        self._decode_shapes = {shape.num_tokens: shape for shape in shapes if shape.num_chunks == 0}
        self._mixed_shapes = {shape.num_tokens: shape for shape in shapes if shape.num_chunks > 0}
        self._max_rows = max(self._decode_shapes)
        self._rows = BlockTableRows(self._max_rows, max_blocks, factors)
        self._sent: _SentDecodes | None = None

    def forget(self) -> None:
        """Forget what is on the device, after a step that could not run."""
        self._rows.forget()
        self._sent = None

    def shape_of(self, columns: BatchColumns) -> StepShape | None:
        """Return the smallest shape that holds the items, of which none scores its prompt; None if none does."""
        if int(columns.rows.max()) >= self._max_rows:
            return None
        num_tokens = columns.num_all_tokens
        are_decodes = num_tokens == len(columns.sequences) == np.count_nonzero(columns.samples)
        shapes = self._decode_shapes if are_decodes else self._mixed_shapes
        return next((shape for size, shape in shapes.items() if size >= num_tokens), None)

    def add_blocks(self, columns: BatchColumns, to_device: HostToDeviceBuffer) -> int:
        """Add the new blocks of the items of a padded pass to `to_device`, and return their number."""
        return self._rows.update(columns, to_device)

    def plan(
        self, columns: BatchColumns, shape: StepShape, last_rows: LastRows, to_device: HostToDeviceBuffer
    ) -> PaddedPlan:
        """Plan a pass over the items, padded to `shape`, which holds them, and add its numbers to `to_device`."""
        num_rows, self._sent = int(np.count_nonzero(columns.samples)), None
        if shape.num_chunks == 0 and last_rows.are_all_of(columns):
            self._sent = _SentDecodes(PaddedPlan(shape, num_rows, Span(shape.num_changing_words), True))
        parts = (self._decodes if shape.num_chunks == 0 else self._mixed)(columns, shape, last_rows)
        span, words = to_device.room(shape.num_words)
        start = NUM_HEAD_WORDS
        for part, num_words in zip(parts, shape.columns[1:], strict=True):
            assert len(part) <= num_words, "the items do not fit the shape"
            words[start : start + len(part)] = part
            start += num_words
        return PaddedPlan(shape, num_rows, span, has_placeholders=bool(np.count_nonzero(parts[1] < 0)))

    def advance(self, columns: BatchColumns, last_rows: LastRows, to_device: HostToDeviceBuffer) -> PaddedPlan | None:
        """Plan the next step of the decodes that were sent last; None: the items are others, or others came between."""
        sent = self._sent
        if sent is None or not last_rows.are_all_of(columns):
            return None
        sent.num_steps += 1
        span, words = to_device.room(len(sent.following.words))
        assert span.start == 0, "the numbers of a padded pass are the step's first"
        words[0] = sent.num_steps
        slots = _slots_of(columns, sent.following.shape)
        words[NUM_HEAD_WORDS : NUM_HEAD_WORDS + len(slots)] = slots
        return sent.following

    def _decodes(self, columns: BatchColumns, shape: StepShape, last_rows: LastRows) -> tuple[np.ndarray, ...]:
        """Return the parts of the inputs of decodes.

        They are those of `FlatBatch.of`, which takes longer: a decode has one token, and needs no chunk.
        """
        num_rows = len(columns.rows)
        # Later steps may take their tokens from the step before them by the same ids.
        ids = np.arange(-num_rows, 0) if self._sent is not None else newest_ids(columns, num_rows, last_rows)
        return _slots_of(columns, shape), ids, columns.starts, _table_rows(columns.rows, shape)

    def _mixed(self, columns: BatchColumns, shape: StepShape, last_rows: LastRows) -> tuple[np.ndarray, ...]:
        """Return the parts of the inputs of any step. A chunk of no tokens takes no rows."""
        batch = FlatBatch.of(columns, last_rows)
        table_rows = _table_rows(np.repeat(columns.rows, columns.num_tokens), shape)
        num_tokens = len(batch.input_ids)
        chunks = np.stack([batch.first_rows, columns.starts, columns.num_tokens, columns.rows], axis=1)
        is_single = columns.num_tokens == 1
        padding = (num_tokens, 0, shape.num_tokens - num_tokens, -1)
        longer = np.append(chunks[~is_single], padding)
        slots = slots_of_longer = _NO_WORDS
        if shape.has_states:
            assert columns.states is not None
            slots = columns.states.take(is_single.nonzero()[0]).words()
            moves = map(columns.states.move, (~is_single).nonzero()[0].tolist())
            slots_of_longer = np.array([*chain.from_iterable(map(state_fields, moves))], np.int64)
        parts = slots, batch.input_ids, batch.positions, table_rows, batch.logits_rows
        return *parts, chunks[is_single].ravel(), longer, slots_of_longer


@dataclass(slots=True)
class _SentDecodes:
    """Decodes whose inputs were sent last: each takes the token of the step before, in their order."""

    following: PaddedPlan
    """Plan of each step after them."""
    num_steps: int = 0
    """Number of these steps so far."""


def _slots_of(columns: BatchColumns, shape: StepShape) -> np.ndarray:
    """Return the state slots of decodes, two words for each; none if the inputs have none."""
    if not shape.has_states:
        return _NO_WORDS
    assert columns.states is not None
    return columns.states.words()


def _table_rows(rows: np.ndarray, shape: StepShape) -> np.ndarray:
    """Return the rows in the block tables of all tokens of a shape, of which the first are `rows`."""
    if len(rows) == shape.num_tokens:
        return rows
    table_rows = np.full(shape.num_tokens, -1)
    table_rows[: len(rows)] = rows
    return table_rows
