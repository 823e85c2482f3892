"""Counts of each sequence's tokens, which stay on the device: penalties need no token on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replicas.engine.batch import BatchColumns, ScheduledSequence
from replicas.engine.sequence import Sequence, SequenceStatus
from replicas.model.batch.inputs import LastRows
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, Span

IN_PROMPT = 1 << 30
"""Bit of a count that says that the token is in the prompt. The bits below count it in the output."""

Penalize = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Change of logits [., vocab_size] float32 in place by the penalties of some of their rows.

The other arguments are the rows [num_rows] int64, the row of each in the counts [num_rows] int64, its repetition,
presence and frequency penalty [num_rows, 3] float64, and the counts [., vocab_size] int32.
"""


def penalize_by_definition(logits: Tensor, rows: Tensor, slots: Tensor, penalties: Tensor, counts: Tensor) -> None:
    """Change logits by their penalties, in plain torch. See `Penalize`."""
    of_rows, before = counts[slots], logits[rows]
    before, beyond = before[:, : counts.shape[1]], before[:, counts.shape[1] :]
    repetition, presence, frequency = penalties[:, :, None].unbind(dim=1)
    factor = repetition.float()
    scaled = torch.where(of_rows != 0, torch.where(before > 0, before / factor, before * factor), before)
    num_outputs = of_rows & (IN_PROMPT - 1)
    offsets = (-presence - frequency * num_outputs).float()
    after = torch.where(num_outputs > 0, scaled + offsets, scaled)
    logits[rows] = torch.cat([after, beyond], dim=1)


@dataclass(frozen=True, slots=True)
class PenaltyPlan:
    """Penalties of one step's rows, and the tokens by which the counts grow before, in the step's numbers."""

    rows: Span
    slots: Span
    penalties: Span
    new_slots: Span
    """Slots that begin a new count."""
    prompt_cells: Span
    output_cells: Span
    sampled_slots: Span
    """First cells of the slots whose newest token only the device knows."""
    sampled_rows: Span


class TokenCounts:
    """Counts of the tokens of sequences with penalties on the device, in one slot for each. `CountSlots` plans them."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, penalize: Penalize) -> None:
        """Allocate `num_slots` slots: as many as sequences run at a time."""
        self.penalize = penalize
        self._cells = torch.zeros(num_slots * vocab_size + 1, dtype=torch.int32, device=device)
        self.table = self._cells[:-1].view(num_slots, vocab_size)

    def apply(self, plan: PenaltyPlan, logits: Tensor, on_device: DeviceBuffer) -> None:
        """Let the counts grow, and change `logits` [., vocab_size] float32 in place. Called once for each plan."""
        self.grow_by_known(plan, on_device)
        if plan.sampled_slots:
            tokens = on_device.last_tokens[on_device.ints(plan.sampled_rows)]
            self.grow_by_sampled(on_device.ints(plan.sampled_slots), tokens)
        penalties = on_device.floats(plan.penalties).view(-1, 3)
        self.penalize(logits, on_device.ints(plan.rows), on_device.ints(plan.slots), penalties, self.table)

    def grow_by_known(self, plan: PenaltyPlan, on_device: DeviceBuffer) -> None:
        """Let the counts grow by the tokens that the host knows."""
        table, cells = self.table, self._cells
        if plan.new_slots:
            table.index_fill_(0, on_device.ints(plan.new_slots), 0)
        if plan.prompt_cells:
            cells.index_fill_(0, on_device.ints(plan.prompt_cells), IN_PROMPT)
        if plan.output_cells:
            grown = on_device.ints(plan.output_cells)
            cells.index_add_(0, grown, torch.ones_like(grown, dtype=cells.dtype))

    def grow_by_sampled(self, slots: Tensor, tokens: Tensor) -> None:
        """Let the counts grow by `tokens` [num_tokens] int64 in the slots that begin at the cells `slots`, -1: none."""
        # The last cell belongs to no slot: it takes tokens that are not in the vocabulary.
        is_counted = (tokens < self.table.shape[1]) & (slots >= 0)
        grown = torch.where(is_counted, slots + tokens, torch.full_like(tokens, self.table.numel()))
        self._cells.index_add_(0, grown, torch.ones_like(grown, dtype=self._cells.dtype))


@dataclass(slots=True)
class _Held:
    """Slot of a sequence, which counts its first `num_counted` tokens."""

    slot: int
    num_counted: int


@dataclass(slots=True)
class _Growth:
    """Numbers of one step's penalties."""

    rows: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    penalties: list[float] = field(default_factory=list)
    new_slots: list[int] = field(default_factory=list)
    prompt_cells: list[int] = field(default_factory=list)
    output_cells: list[int] = field(default_factory=list)
    sampled_slots: list[int] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)


class CountSlots:
    """Assignment of the slots of `TokenCounts` to sequences.

    A slot grows by the tokens since the last step, so a step costs the host the same for short and long sequences.

    Invariants: a slot belongs to at most one sequence. After the planned steps it counts the sequence's first
    `num_counted` tokens. Whoever cannot run a planned step calls `forget`.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._held: dict[Sequence, _Held] = {}
        self._free = list(range(num_slots))

    def plan(self, columns: BatchColumns, last_rows: LastRows, to_device: HostToDeviceBuffer) -> PenaltyPlan | None:
        """Add the penalties of the items, all of which sample, to `to_device`; return None if no item has any."""
        growth = _Growth()
        for row in columns.special:
            if columns.sequences[row].has_penalties:
                self._add(growth, row, columns.item(row), last_rows)
        if not growth.rows:
            return None
        return PenaltyPlan(
            rows=to_device.ints(growth.rows),
            slots=to_device.ints(growth.slots),
            penalties=to_device.floats(growth.penalties),
            new_slots=to_device.ints(growth.new_slots),
            prompt_cells=to_device.ints(growth.prompt_cells),
            output_cells=to_device.ints(growth.output_cells),
            sampled_slots=to_device.ints(growth.sampled_slots),
            sampled_rows=to_device.ints(growth.sampled_rows),
        )

    def forget(self) -> None:
        """Forget all counts. The next steps count again from the sequences' tokens."""
        self._held.clear()
        self._free = list(range(self._num_slots))

    def _add(self, growth: _Growth, row: int, item: ScheduledSequence, last_rows: LastRows) -> None:
        sequence, params = item.sequence, item.sequence.request.params
        held = self._held.get(sequence)
        if held is None:
            held = self._held[sequence] = _Held(self._free_slot(), 0)
        first = held.slot * self._vocab_size
        # A step that runs again counts anew: a token after it may have become another one.
        if not sequence.num_prompt_tokens <= held.num_counted < item.end:
            growth.new_slots.append(held.slot)
            growth.prompt_cells.extend(self._cells(first, sequence.token_ids[: sequence.num_prompt_tokens]))
            held.num_counted = sequence.num_prompt_tokens
        growth.output_cells.extend(self._cells(first, sequence.token_ids[held.num_counted : item.end]))
        if item.end > len(sequence.token_ids):
            growth.sampled_slots.append(first)
            growth.sampled_rows.append(last_rows[sequence])
        held.num_counted = item.end
        growth.rows.append(row)
        growth.slots.append(held.slot)
        growth.penalties += (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)

    def _cells(self, first: int, token_ids: list[int]) -> list[int]:
        return [first + token_id for token_id in token_ids if token_id < self._vocab_size]

    def _free_slot(self) -> int:
        if not self._free:
            for sequence in [held for held in self._held if held.status is not SequenceStatus.RUNNING]:
                self._free.append(self._held.pop(sequence).slot)
        return self._free.pop()
