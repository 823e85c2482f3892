"""Logits processors: penalties, logit bias and forbidden tokens; they change only the logits concerned."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replicas.engine.batch import BatchColumns, ScheduledSequence
from replicas.engine.sequence import Sequence
from replicas.model.batch.inputs import LastRows
from replicas.model.batch.transfers import DeviceBuffer, HostToDeviceBuffer, Span
from replicas.model.sampling.token_counts import CountSlots, PenaltyPlan, TokenCounts

_LAST_CHOICE = -1e30
"""Logit of a token that is chosen only if all others are forbidden."""


@dataclass(frozen=True, slots=True)
class EntrySpans:
    """Entries in a step's numbers."""

    rows: Span
    token_ids: Span
    values: Span

    def index(self, on_device: DeviceBuffer) -> tuple[Tensor, Tensor]:
        """Return rows and token ids, each [num_entries] int64."""
        return on_device.ints(self.rows), on_device.ints(self.token_ids)

    def numbers(self, on_device: DeviceBuffer) -> Tensor:
        """Return values [num_entries] float32."""
        return on_device.floats(self.values).float()


@dataclass(slots=True)
class _Entries:
    """List of single logits, by row and token id, with a value for each."""

    rows: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, token_ids: Items[int], values: Items[float]) -> None:
        self.rows.extend([row] * len(token_ids))
        self.token_ids.extend(token_ids)
        self.values.extend(values)

    def spans(self, to_device: HostToDeviceBuffer) -> EntrySpans | None:
        """Add the entries to `to_device` and return their spans; None if there are no entries."""
        if not self.rows:
            return None
        return EntrySpans(to_device.ints(self.rows), to_device.ints(self.token_ids), to_device.floats(self.values))


@dataclass(frozen=True, slots=True)
class LogitsChanges:
    """Changes of the logits of one step's rows, in the order in which they apply.

    1. Repetition penalty: divides positive logits, and multiplies other logits, of tokens in the prompt or output.
    2. Presence and frequency penalties: subtracted for tokens in the output, once and once per occurrence.
    3. Logit bias: added.
    4. Stop tokens before `min_tokens`, and the last tokens of bad words: forbidden. A constrained sequence takes a stop
       token if its constraint allows no other.

    Penalties apply by counts on the device, which `penalties` plans, or by the tokens that the host knows.
    """

    penalties: PenaltyPlan | None
    repetition: EntrySpans | None
    added: EntrySpans | None
    forbidden: EntrySpans | None

    @property
    def is_empty(self) -> bool:
        """True if no logit changes."""
        return all(part is None for part in (self.penalties, self.repetition, self.added, self.forbidden))

    def apply(self, logits: Tensor, on_device: DeviceBuffer, counts: TokenCounts | None) -> Tensor:
        """Return a changed copy of `logits` [num_rows, vocab_size] float32; `logits` itself if nothing changes.

        `counts` are those on the device; None: no row has `penalties`.
        """
        if self.is_empty:
            return logits
        logits = logits.clone()
        if self.penalties is not None:
            assert counts is not None
            counts.apply(self.penalties, logits, on_device)
        if self.repetition is not None:
            index, penalty = self.repetition.index(on_device), self.repetition.numbers(on_device)
            before = logits[index]
            logits[index] = torch.where(before > 0, before / penalty, before * penalty)
        if self.added is not None:
            logits[self.added.index(on_device)] += self.added.numbers(on_device)
        if self.forbidden is not None:
            logits[self.forbidden.index(on_device)] = self.forbidden.numbers(on_device)
        return logits


NO_CHANGES = LogitsChanges(None, None, None, None)


class LogitsProcessors:
    """Planner of the changes of logits, from the parameters and tokens of sequences."""

    def __init__(self, eos_token_ids: frozenset[int], vocab_size: int, slots: CountSlots | None) -> None:
        """Make a planner. Penalties apply by counts on the device in `slots`; None: the host counts the tokens."""
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._slots = slots

    def plan(self, columns: BatchColumns, last_rows: LastRows, to_device: HostToDeviceBuffer) -> LogitsChanges:
        """Plan the changes of one row per item, and add their numbers to `to_device`."""
        rows = [row for row in columns.special if columns.sequences[row].changes_logits]
        if not rows:
            return NO_CHANGES
        penalties = None if self._slots is None else self._slots.plan(columns, last_rows, to_device)
        repetition, added, forbidden = _Entries(), _Entries(), _Entries()
        for row in rows:
            item = columns.item(row)
            self._penalize_repetition(repetition, row, item.sequence)
            self._add_offsets(added, row, item.sequence)
            self._forbid_stops(forbidden, row, item)
            self._forbid_bad_words(forbidden, row, item.sequence)
        return LogitsChanges(penalties, repetition.spans(to_device), added.spans(to_device), forbidden.spans(to_device))

    def _penalize_repetition(self, entries: _Entries, row: int, sequence: Sequence) -> None:
        penalty = sequence.request.params.repetition_penalty
        if penalty != 1.0 and self._slots is None:
            seen = self._known(set(sequence.token_ids))
            entries.add(row, seen, [penalty] * len(seen))

    def _add_offsets(self, entries: _Entries, row: int, sequence: Sequence) -> None:
        """Add penalties and bias as one entry per token: the sum must not depend on a device's order of additions."""
        params = sequence.request.params
        offsets: dict[int, float] = defaultdict(float)
        if (params.presence_penalty or params.frequency_penalty) and self._slots is None:
            for token_id, count in Counter(sequence.token_ids[sequence.num_prompt_tokens :]).items():
                offsets[token_id] = -params.presence_penalty - params.frequency_penalty * count
        for entry in params.logit_bias:
            offsets[entry.token_id] += entry.bias
        token_ids = self._known(offsets)
        entries.add(row, token_ids, [offsets[token_id] for token_id in token_ids])

    def _forbid_stops(self, entries: _Entries, row: int, item: ScheduledSequence) -> None:
        params = item.sequence.request.params
        if item.output_index >= params.min_tokens:
            return
        stops = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        token_ids = self._known(stops)
        forbidden = float("-inf") if item.sequence.constraint is None else _LAST_CHOICE
        entries.add(row, token_ids, [forbidden] * len(token_ids))

    def _forbid_bad_words(self, entries: _Entries, row: int, sequence: Sequence) -> None:
        if not sequence.request.params.bad_words:
            return
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        last = {
            word[-1]
            for word in sequence.request.params.bad_words
            if len(word) == 1 or output[1 - len(word) :] == list(word[:-1])
        }
        token_ids = self._known(last)
        entries.add(row, token_ids, [float("-inf")] * len(token_ids))

    def _known(self, token_ids: Iterable[int]) -> list[int]:
        """Return the ids for which the model has a logit."""
        return [token_id for token_id in token_ids if token_id < self._vocab_size]
