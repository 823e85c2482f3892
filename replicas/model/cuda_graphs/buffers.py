"""Static input buffers of steps: a captured graph reads its inputs at fixed addresses.

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
from replicas.model.batch.inputs import FlatBatch, LastSampledTokens
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
    cells: Span  # [num_new_blocks]: indices of the changed cells in the flattened tables
    blocks: Span  # [num_new_blocks]: the block ids for these cells

    def apply(self, tables: Tensor, on_device: DeviceBuffer) -> None:
        """Write the new blocks to `tables` [num_rows, num_blocks] int32."""
        if len(self.cells) > 0:
            tables.view(-1).index_copy_(0, on_device.ints(self.cells), on_device.ints(self.blocks).to(tables.dtype))


class DeviceBlockTables:
    """Assignment of table rows to running sequences. A sequence keeps its row until another one may need it.

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
        num_new = sum(item.sequence not in self._written for item in items)
        if len(self._written) + num_new <= self._num_rows:
            return dict(self._written)
        return {item.sequence: self._written[item.sequence] for item in items if item.sequence in self._written}

    def _free_rows(self, written: dict[Sequence, _WrittenRow]) -> list[int]:
        taken = {known.row for known in written.values()}
        return [row for row in range(self._num_rows) if row not in taken]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes to which a step is padded."""

    num_tokens: int
    num_rows: int
    """Rows of logits, and most sequences of one token."""
    num_chunks: int
    """Most sequences of several tokens; 0: every token is a decode that samples."""

    @classmethod
    def decodes(cls, num_rows: int) -> StepShape:
        """Return the shape of `num_rows` decodes."""
        return cls(num_rows, num_rows, 0)

    @classmethod
    def mixed(cls, num_tokens: int, max_num_seqs: int) -> StepShape:
        """Return the shape of steps of `num_tokens` tokens of any sequences."""
        return cls(num_tokens, min(num_tokens, max_num_seqs), min(num_tokens // 2, max_num_seqs))

    @property
    def columns(self) -> tuple[int, ...]:
        """Number of words of each part of the inputs.

        The parts are token ids, positions and slots, one for each token, and then for decodes their rows in the block
        tables, for others the rows of the logits, the chunks of one token, and the longer ones. The padding is one more
        chunk.
        """
        if self.num_chunks == 0:
            return (self.num_tokens,) * 4
        return (*(self.num_tokens,) * 3, self.num_rows, 4 * self.num_rows, 4 * (self.num_chunks + 1))

    @property
    def num_words(self) -> int:
        """Number of words of the inputs."""
        return sum(self.columns)


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Inputs of a forward pass. Tokens without a sequence write to the scratch block."""

    input_ids: Tensor  # [1, num_tokens] int64, gathered from the buffers in each pass
    position_ids: Tensor  # [1, num_tokens] int64
    slots: Tensor  # [num_tokens] int64
    logits_rows: Tensor | None  # [num_rows] int64: tokens whose logits are computed; None: all
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class SentStep:
    """Inputs of one step, as added to the step's copy to the device."""

    shape: StepShape
    words: Span
    update: BlockTableUpdate
    last_sampled: LastSampledTokens | None
    """Tokens of the previous step; None if the host knows every input token."""


class StepBuffers:
    """Static buffers for the inputs of one step. Each step's copy to the device is copied into them.

    Block tables stay on the device, and each step sends only new blocks. The device works in launch order, so a step
    reads its own inputs and not those of a later one.
    """

    def __init__(self, max_words: int, max_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        """Allocate buffers for shapes of `max_words` words, and `max_rows` sequences of at most `max_blocks` blocks."""
        self._max_rows = max_rows
        self._block_size = block_size
        self._longest = max_blocks * block_size
        self._words = torch.zeros(max_words, dtype=torch.int64, device=device)
        self._previous = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, device=device)
        self._block_tables = DeviceBlockTables(max_rows, max_blocks)

    def send(
        self,
        items: Items[ScheduledSequence],
        shape: StepShape,
        last_sampled: LastSampledTokens,
        to_device: HostToDeviceBuffer,
    ) -> SentStep:
        """Add the inputs of `items` to `to_device`, padded to `shape`, which holds them."""
        update = self._block_tables.update(items, to_device)
        columns, has_placeholders = (self._decodes if shape.num_chunks == 0 else self._mixed)(
            items, shape, last_sampled.row_by_sequence, update.rows
        )
        words = to_device.ints(number for column in columns for number in column)
        assert len(words) == shape.num_words, "the items do not fit the shape"
        return SentStep(shape, words, update, last_sampled if has_placeholders else None)

    def load(self, sent: SentStep, on_device: DeviceBuffer) -> None:
        """Copy the sent inputs into the static buffers."""
        self._words[: sent.shape.num_words].copy_(on_device.ints(sent.words))
        sent.update.apply(self._tables, on_device)
        self._block_tables.commit(sent.update)
        if sent.last_sampled is not None:
            self._previous[: len(sent.last_sampled.tokens)].copy_(sent.last_sampled.tokens)

    def inputs(self, shape: StepShape) -> StaticInputs:
        """Return the inputs of a step of `shape`. Its operations are part of the captured forward pass."""
        ids, positions, slots, *others = torch.split(self._words[: shape.num_words], list(shape.columns))
        # The id of a token that the host does not know is negative: the index from the end of the tokens sampled last.
        input_ids = torch.where(ids < 0, self._previous[ids.clamp(max=-1)], ids)
        if shape.num_chunks == 0:
            rows = self._rows[: shape.num_tokens]
            decodes, logits_rows = torch.stack([rows, positions, torch.ones_like(rows), others[0]], dim=1), None
            plan = AttentionPlan(self._group(decodes, shape.num_tokens))
        else:
            logits_rows, decodes, chunks = others[0], others[1].view(-1, 4), others[2].view(-1, 4)
            plan = AttentionPlan(self._group(decodes, shape.num_rows), self._group(chunks, shape.num_tokens))
        return StaticInputs(input_ids[None], positions[None], slots, logits_rows, plan)

    def _group(self, chunks: Tensor, num_tokens: int) -> ChunkGroup:
        return ChunkGroup(chunks.int(), self._tables, num_tokens, self._longest)

    def _decodes(
        self, items: Items[ScheduledSequence], shape: StepShape, rows: dict[Sequence, int], table_rows: list[int]
    ) -> tuple[Items[list[int]], bool]:
        """Return the parts of the inputs of decodes, and True if some token is a placeholder.

        They are those of `FlatBatch.of`, which takes longer: a decode has one token, and needs no chunk.
        """
        padding = [0] * (shape.num_tokens - len(items))
        ids = []
        for item in items:
            is_known = item.start < len(item.sequence.token_ids)
            ids.append(item.sequence.token_ids[item.start] if is_known else rows[item.sequence] - self._max_rows)
        positions = [item.start for item in items]
        slots = [self._slot(item) for item in items]
        columns = [*ids, *padding], [*positions, *padding], [*slots, *padding], [*table_rows, *(-1 for _ in padding)]
        return columns, any(number < 0 for number in ids)

    def _mixed(
        self, items: Items[ScheduledSequence], shape: StepShape, rows: dict[Sequence, int], table_rows: list[int]
    ) -> tuple[Items[list[int]], bool]:
        """Return the parts of the inputs of any step, and True if some token is a placeholder."""
        batch = FlatBatch.of(items, self._block_size)
        for row, sequence in batch.placeholders:
            batch.input_ids[row] = rows[sequence] - self._max_rows
        num_tokens = len(batch.input_ids)
        decodes: list[int] = []
        chunks: list[int] = []
        for chunk, table_row in zip(batch.chunks, table_rows, strict=True):
            of_kind = decodes if chunk.num_tokens == 1 else chunks
            of_kind += (chunk.row, chunk.start, chunk.num_tokens, table_row)
        chunks += (num_tokens, 0, shape.num_tokens - num_tokens, -1)
        parts = (batch.input_ids, batch.positions, batch.slots, batch.logits_rows, decodes, chunks)
        for part, num_words in zip(parts, shape.columns, strict=True):
            part += [0] * (num_words - len(part))  # A chunk of no tokens takes no rows.
        return parts, bool(batch.placeholders)

    def _slot(self, item: ScheduledSequence) -> int:
        index, offset = divmod(item.start, self._block_size)
        return item.sequence.block_table[index] * self._block_size + offset
