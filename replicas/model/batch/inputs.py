"""Inputs of one forward pass over a flat batch: tensors on the device, and chunks on the host.

Dummy batches serve warm-up, memory measurements and checks. They use the scratch block, which no sequence owns.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from replicas.engine.batch import SCRATCH_STATE, BatchColumns, ScheduledBatch, ScheduledSequence, StateMove
from replicas.engine.sequence import Sequence
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, Span, no_tokens
from replicas.protocol import GenerateRequest, LogitBias, Pooling, SamplingParams

_NOBODY = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence in the flat batch: rows [row, row + num_tokens), positions [start, end)."""

    row: int
    start: int
    end: int
    block_table: array[int]
    """Block table of the sequence, a copy; block_table[p // block_size] holds position p."""
    state: StateMove = SCRATCH_STATE
    """Slots of the sequence's recurrent state."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed in this pass."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """Inputs of one forward pass over a flat batch: sequences are concatenated in one row, without padding."""

    input_ids: Tensor  # [1, num_tokens] int64
    position_ids: Tensor  # [1, num_tokens] int64
    slots: Tensor  # [num_tokens] int64: slot of each token's key and value
    partial_blocks: Tensor | None
    """[num_blocks] int64: blocks that this pass begins and does not fill; None if there are none.

    The gather backend clears them, since it also reads their unused slots, under a mask: a stale NaN times a zero
    weight is still NaN.
    """
    logits_rows: Tensor  # [num_rows] int64: rows of the tokens whose logits are computed, in order of the items
    chunks: tuple[Chunk, ...]
    """Chunks on the host, one per item. The attention backends make their own plans from them."""
    more: tuple[BatchInputs, ...] = ()
    """Inputs for the groups of layers after the first one. They differ in slots, partial blocks and block tables."""


def wants_prompt_logprobs(item: ScheduledSequence) -> bool:
    """Return True if the item gives log probabilities of prompt tokens."""
    return item.sequence.request.params.prompt_logprobs is not None and item.start < item.sequence.num_prompt_tokens - 1


def num_logits_rows(item: ScheduledSequence) -> int:
    """Return the number of logits rows that the item needs: all its positions to score, the last one to sample."""
    return item.num_tokens if wants_prompt_logprobs(item) else int(item.samples)


def pooled_range(item: ScheduledSequence) -> range:
    """Return the tokens of the item, from 0, whose hidden states its request pools."""
    params = item.sequence.request.params.pool
    if params is None:
        return range(0)
    match params.pooling:
        case Pooling.LAST:
            return range(item.num_tokens - 1, item.num_tokens) if item.end == item.sequence.num_tokens else range(0)
        case Pooling.FIRST:
            return range(1) if item.start == 0 else range(0)
        case Pooling.MEAN:
            return range(item.num_tokens)


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows of a flat batch whose hidden states are pooled, in a step's numbers."""

    rows: Span
    lengths: tuple[int, ...]
    """Number of rows of each item that has any, in order of the items."""

    @classmethod
    def of(cls, columns: BatchColumns, to_device: HostToDeviceBuffer) -> tuple[PooledRows | None, list[int]]:
        """Return the rows of the items, None if there are none, and the indices of the items that have some."""
        ranges = {index: pooled_range(columns.item(index)) for index in columns.special}
        pooled = {index: rows for index, rows in ranges.items() if rows}
        if not pooled:
            return None, []
        first_rows = columns.num_tokens.cumsum() - columns.num_tokens
        rows = [first_rows.item(index) + row for index, part in pooled.items() for row in part]
        return cls(to_device.ints(rows), tuple(map(len, pooled.values()))), list(pooled)


class ColumnOwners:
    """Owners of the columns of the engine's table, by the steps planned so far."""

    def __init__(self) -> None:
        self._last: np.ndarray | None = None
        """Columns of the last step's items."""
        self._admissions = np.zeros(0, np.int64)
        """Number of the admission of each column's owner; 0: it has none, -1: one that does not run."""

    def newcomers(self, columns: BatchColumns) -> np.ndarray:
        """Return the indices of the items whose columns had other owners, and of those that do not run."""
        if columns.rows is self._last:
            return _NOBODY
        rows = self._last = columns.rows
        if (num_rows := int(rows.max(initial=-1)) + 1) > len(self._admissions):
            self._admissions = np.append(self._admissions, np.zeros(num_rows - len(self._admissions), np.int64))
        is_new: np.ndarray = (self._admissions[rows] != columns.admissions) | (columns.admissions < 0)
        self._admissions[rows] = columns.admissions
        return is_new.nonzero()[0]

    def forget(self) -> None:
        """Forget all owners: the next steps' sequences are newcomers."""
        self._last = None
        self._admissions[:] = 0


class LastRows:
    """Index of each sequence's token among those that the step before samples, from their end: negative."""

    def __init__(self, sampling: BatchColumns) -> None:
        """`sampling` are the items of the step before that sample, in order of their tokens."""
        self._sampling = sampling
        self._size = len(sampling.sequences)
        self._all_sample = b"\1" * self._size
        """Bytes of `samples` if all items do."""
        self._by_row: tuple[np.ndarray, np.ndarray] | None = None
        self._by_sequence: dict[Sequence, int] | None = None

    def __getitem__(self, sequence: Sequence) -> int:
        if self._by_sequence is None:
            self._by_sequence = {owner: index for index, owner in enumerate(self._sampling.sequences, -self._size)}
        return self._by_sequence[sequence]

    def after(self, sampling: BatchColumns) -> LastRows:
        """Return the rows after one more step, of which `sampling` are the items that sample."""
        if sampling.rows is not self._sampling.rows:
            return LastRows(sampling)
        self._sampling = sampling
        return self

    def are_all_of(self, columns: BatchColumns) -> bool:
        """Return True if every item decodes its token of the step before, and these were all tokens, in order.

        A step that was dropped has no tokens. Its sequences go on from where it began.
        """
        return (
            columns.rows is self._sampling.rows
            and columns.num_all_tokens == self._size
            # Bytes are compared in a fifth of the time of arrays.
            and columns.samples.tobytes() == self._all_sample
            and columns.starts.tobytes() == self._sampling.ends.tobytes()
        )

    def of(self, columns: BatchColumns, indices: np.ndarray) -> np.ndarray:
        """Return the indices of the items at `indices`."""
        if columns.rows is self._sampling.rows:
            return indices - self._size
        if self._by_row is None:
            self._by_row = self._table()
        of_rows, admissions_before = self._by_row
        rows, admissions = columns.rows[indices], columns.admissions[indices]
        last_rows: np.ndarray = of_rows.take(rows, mode="clip")
        is_other = (admissions_before.take(rows, mode="clip") != admissions) | (admissions < 0)
        for place in is_other.nonzero()[0].tolist():  # It was admitted anew since, or does not run.
            last_rows[place] = self[columns.sequences[indices.item(place)]]
        return last_rows

    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the index and the admission of the sequence in each column of the engine's table."""
        rows = self._sampling.rows
        of_rows, admissions = np.zeros((2, int(rows.max(initial=0)) + 1), np.int64)
        of_rows[rows] = np.arange(-self._size, 0)
        admissions[rows] = self._sampling.admissions
        return of_rows, admissions


NO_LAST_ROWS = LastRows(BatchColumns.of(()))
"""Rows of a step that follows none."""


def build_inputs(items: Items[ScheduledSequence], block_size: int, device: torch.device) -> BatchInputs:
    """Return the inputs of `items` on `device`. The host must know all tokens of the items."""
    to_device = HostToDeviceBuffer()
    plan = InputPlan.of(BatchColumns.of(items), block_size, NO_LAST_ROWS, to_device)
    return plan.place(DeviceBuffer.of(to_device.words, no_tokens(device)))


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Numbers of a flat batch on the host: one for each token in `input_ids` and `positions`."""

    input_ids: np.ndarray
    """Token ids; in the place of a placeholder its index among the tokens of the step before, which is negative."""
    positions: np.ndarray
    logits_rows: np.ndarray
    first_rows: np.ndarray
    """Row of each item's first token."""

    @classmethod
    def of(cls, columns: BatchColumns, last_rows: LastRows) -> FlatBatch:
        """Concatenate the tokens of the items."""
        num_tokens, starts = columns.num_tokens, columns.starts
        end_rows = num_tokens.cumsum()
        first_rows = end_rows - num_tokens
        positions = np.arange(columns.num_all_tokens) + np.repeat(starts - first_rows, num_tokens)
        num_single = columns.num_decodes if np.count_nonzero(num_tokens[: columns.num_decodes] != 1) == 0 else 0
        input_ids = np.empty(len(positions), np.int64)
        input_ids[:num_single] = newest_ids(columns, num_single, last_rows)
        rows = [columns.samples[:num_single].nonzero()[0]]
        for index in range(num_single, len(columns.sequences)):
            sequence, start, end = columns.sequences[index], starts.item(index), end_rows.item(index)
            known = sequence.token_ids[start : start + num_tokens.item(index)]
            if len(known) < num_tokens[index]:
                known.append(last_rows[sequence])
            input_ids[end - len(known) : end] = known
            rows.append(np.arange(end - num_logits_rows(columns.item(index)), end))
        return cls(input_ids, positions, np.concatenate(rows), first_rows)


def newest_ids(columns: BatchColumns, num_items: int, last_rows: LastRows) -> np.ndarray:
    """Return the last token of each of the first `num_items` items, all of which decode, as in `FlatBatch`."""
    newest = columns.newest_tokens[:num_items]
    late = (newest < 0).nonzero()[0]
    if not len(late):
        return newest
    of_late = last_rows.of(columns, late)
    if len(late) == num_items:
        return of_late
    newest = newest.copy()
    newest[late] = of_late
    return newest


def known_ids(input_ids: Tensor, last_tokens: Tensor) -> Tensor:
    """Return the ids [num_tokens] int64 with the tokens of the step before in the places of placeholders."""
    return torch.where(input_ids < 0, last_tokens[input_ids.clamp(max=-1)], input_ids)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Inputs of a pass for one group of layers in a step's numbers, and its chunks."""

    slots: Span
    partial_blocks: Span
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(
        cls,
        items: Items[ScheduledSequence],
        tables: Items[array[int]],
        first_rows: Items[int],
        block_size: int,
        to_device: HostToDeviceBuffer,
    ) -> GroupPlan:
        """Plan the inputs of the group with these block tables, and add their numbers to `to_device`."""
        return cls(
            to_device.ints(flat_slots(items, tables, block_size)),
            to_device.ints(_partial_blocks(items, tables, block_size)),
            tuple(
                Chunk(row, item.start, item.end, table, item.state)
                for row, item, table in zip(first_rows, items, tables, strict=True)
            ),
        )


def _tables(items: Items[ScheduledSequence], number: int, factor: int) -> list[array[int]]:
    """Return copies of the items' block tables for the group of this number, with block ids times `factor`."""
    tables = []
    for item in items:
        table = table_of(item.sequence, number)
        tables.append(array("i", table if factor == 1 else [block * factor for block in table]))
    return tables


def table_of(sequence: Sequence, number: int) -> list[int]:
    """Return a sequence's block table for the group of layers of this number.

    Dummy sequences have one table for all groups.
    """
    return sequence.more_tables[number - 1] if number and sequence.more_tables else sequence.block_table


def flat_slots(items: Items[ScheduledSequence], tables: Items[Items[int]], block_size: int) -> list[int]:
    """Return the slot of each token of `items`, which have these block tables."""
    slots: list[int] = []
    for item, table in zip(items, tables, strict=True):
        position, end = item.start, item.end
        while position < end:
            index, offset = divmod(position, block_size)
            length = min(block_size - offset, end - position)
            first = table[index] * block_size + offset
            slots.extend(range(first, first + length))
            position += length
    return slots


@dataclass(frozen=True, slots=True)
class InputPlan:
    """Inputs of a pass over a flat batch in a step's numbers, and its chunks."""

    input_ids: Span
    positions: Span
    logits_rows: Span
    groups: tuple[GroupPlan, ...]
    """Inputs for each group of layers."""
    has_placeholders: bool

    @classmethod
    def of(
        cls,
        columns: BatchColumns,
        block_size: int,
        last_rows: LastRows,
        to_device: HostToDeviceBuffer,
        factors: Items[int] = (1,),
    ) -> InputPlan:
        """Plan a pass over the items and add its numbers to `to_device`.

        A block of a group of layers has the number id * factor in their tensors.
        """
        batch = FlatBatch.of(columns, last_rows)
        items, first_rows = [columns.item(index) for index in range(len(columns.sequences))], batch.first_rows.tolist()
        return cls(
            to_device.ints(batch.input_ids),
            to_device.ints(batch.positions),
            to_device.ints(batch.logits_rows),
            tuple(
                GroupPlan.of(items, _tables(items, number, factor), first_rows, block_size, to_device)
                for number, factor in enumerate(factors)
            ),
            has_placeholders=bool(np.count_nonzero(batch.input_ids < 0)),
        )

    def place(self, on_device: DeviceBuffer) -> BatchInputs:
        """Return the inputs as tensors on the device."""
        input_ids = on_device.ints(self.input_ids)
        if self.has_placeholders:
            input_ids = known_ids(input_ids, on_device.last_tokens)
        input_ids, positions = input_ids[None], on_device.ints(self.positions)[None]
        logits_rows = on_device.ints(self.logits_rows)
        first, *more = (
            BatchInputs(
                input_ids,
                positions,
                on_device.ints(group.slots),
                on_device.ints(group.partial_blocks) if group.partial_blocks else None,
                logits_rows,
                group.chunks,
            )
            for group in self.groups
        )
        return replace(first, more=tuple(more)) if more else first


def _partial_blocks(items: Items[ScheduledSequence], tables: Items[array[int]], block_size: int) -> list[int]:
    """Return the blocks that the items begin and do not fill."""
    return [
        table[item.end // block_size]
        for item, table in zip(items, tables, strict=True)
        if item.end % block_size > 0 and item.end - item.end % block_size >= item.start
    ]


_TRUNCATED = SamplingParams(max_tokens=1, top_p=0.9)
_EVERY_KIND = (
    SamplingParams(max_tokens=2, temperature=0.0),
    SamplingParams(max_tokens=2),
    SamplingParams(max_tokens=2, top_p=0.9, top_k=40, min_p=0.01),
    SamplingParams(max_tokens=2, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=2, temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1, min_tokens=2),
    SamplingParams(max_tokens=2, logit_bias=(LogitBias(0, 1.0),), stop_token_ids=(0,), min_tokens=2),
    SamplingParams(max_tokens=2, allowed_token_ids=(0, 1)),
)
_DEMANDING = SamplingParams(
    max_tokens=2,
    top_p=0.9,
    logprobs=2,
    repetition_penalty=1.1,
    logit_bias=(LogitBias(0, 1.0),),
    allowed_token_ids=(0, 1),
)
_SCORED = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2, logprobs=2)


def dummy_item(start: int, num_tokens: int, block_size: int, params: SamplingParams = _TRUNCATED) -> ScheduledSequence:
    """Return an item that computes positions [start, start + num_tokens) in the scratch block and samples randomly."""
    end = start + num_tokens
    sequence = Sequence(GenerateRequest("scratch", (0,) * end, params), arrival_s=0.0, deadline_s=None, arrival_index=0)
    sequence.block_table = [0] * -(-end // block_size)
    return ScheduledSequence.of(sequence, start, num_tokens)


def batches_of_every_kind(max_num_seqs: int, block_size: int) -> list[ScheduledBatch]:
    """Return small steps with every kind of sampling: decodes alone, decodes beside a prompt, and a scored prompt."""
    decodes = [dummy_item(2, 1, block_size, params) for params in _EVERY_KIND]
    prefills = [dummy_item(0, 3, block_size, params) for params in (_TRUNCATED, _SCORED)]
    return [
        *(ScheduledBatch((decode,)) for decode in decodes),
        *(ScheduledBatch((decode, prefill)[-max_num_seqs:]) for decode in decodes for prefill in prefills),
    ]


def dummy_batches(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> list[ScheduledBatch]:
    """Return the steps that use most memory.

    They are long prefills, many short prefills, short prefills beside a decode at full length, and many decodes at full
    length, at last with every change of their logits.
    """
    num_whole, rest = divmod(max_num_batched_tokens, max_model_len)
    lengths = ([max_model_len] * num_whole + ([rest] if rest else []))[:max_num_seqs]
    prefills = tuple(dummy_item(max_model_len - length, length, block_size) for length in lengths)
    share = min(max(1, max_num_batched_tokens // max_num_seqs), max_model_len)
    short, decode = dummy_item(0, share, block_size), dummy_item(max_model_len - 1, 1, block_size)
    return [
        ScheduledBatch(prefills),
        ScheduledBatch((short,) * max_num_seqs),
        ScheduledBatch((decode, *(short,) * (max_num_seqs - 1))),
        ScheduledBatch((decode,) * max_num_seqs),
        ScheduledBatch((dummy_item(max_model_len - 1, 1, block_size, _DEMANDING),) * max_num_seqs),
    ]
