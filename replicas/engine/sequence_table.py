"""Sequence table: the numbers of all running sequences in arrays, which a step advances at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from replicas.engine.batch import BatchColumns
from replicas.engine.sequence import (
    BLOCKS,
    COMPUTED,
    EFFECTIVE_BAND,
    EXPECTED_OUTPUT,
    FORCED,
    HELD_STEPS,
    IN_FLIGHT,
    KNOWN,
    MAX_COMPUTED,
    MAX_OUTPUT,
    MAX_PENDING_TOKENS,
    NEWEST_BLOCK,
    NEWEST_TOKEN,
    NUM_NUMBERS,
    NUM_TIMES,
    PENDING,
    PLACEHOLDERS,
    PREEMPTED,
    PREEMPTIONS,
    PROMPT,
    TABLE_BLOCKS,
    Sequence,
)
from replicas.protocol import BANDS, Band, IngressShare

LabelT = TypeVar("LabelT", bound=Hashable)


class Labels(Generic[LabelT]):
    """Labels of the table's rows, such as their tenants, with a small number for each label in use.

    Invariant: equal labels have one number, and a number has one label.
    """

    def __init__(self, num_rows: int) -> None:
        self.of_rows = np.zeros(num_rows, np.int64)
        """Number of each row's label."""
        self.labels: list[LabelT] = []
        """Label of each number. The label of a number that is not in use is any."""
        self._numbers: dict[LabelT, int] = {}
        self._num_rows: list[int] = []
        self._free: list[int] = []

    def set(self, row: int, label: LabelT) -> None:
        """Give `row`, which has no label, a label."""
        number = self._numbers.get(label)
        if number is None:
            number = self._free.pop() if self._free else len(self.labels)
            if number == len(self.labels):
                self.labels.append(label)
                self._num_rows.append(0)
            self.labels[number] = label
            self._numbers[label] = number
        self._num_rows[number] += 1
        self.of_rows[row] = number

    def clear(self, row: int) -> None:
        """Take the label of `row`."""
        number = self.of_rows.item(row)
        self._num_rows[number] -= 1
        if not self._num_rows[number]:
            del self._numbers[self.labels[number]]
            self._free.append(number)

    def sums(self, rows: np.ndarray, values: np.ndarray) -> list[tuple[LabelT, int]]:
        """Return the labels of `rows` with the sums of their `values`, in order of each label's last row."""
        if len(self._numbers) == 1:
            return [(label, int(values.sum())) for label in self._numbers if len(rows)]
        numbers = self.of_rows[rows]
        last = np.full(len(self.labels), -1)
        last[numbers] = np.arange(len(numbers))
        sums = np.bincount(numbers, weights=values, minlength=len(last))
        order = np.argsort(last)[np.count_nonzero(last < 0) :]
        return [(self.labels[number], int(sums[number])) for number in order.tolist()]


@dataclass(frozen=True, slots=True)
class RunningLoad:
    """Load of the running sequences."""

    num_by_band: tuple[int, ...]
    """Sequences by the band that they are scheduled in."""
    num_blocks_by_band: tuple[int, ...]
    by_ingress: tuple[IngressShare, ...]


@dataclass(frozen=True, slots=True)
class Lag:
    """Tokens that the running sequences miss, in arrays in order of urgency."""

    rows: np.ndarray
    """Columns of the sequences."""
    lacks_room: np.ndarray
    """True for sequences that need blocks for their known tokens and placeholders."""
    num_forced: np.ndarray
    is_decoding: np.ndarray
    """See `Sequence.is_decoding`."""
    is_prefilling: np.ndarray
    """See `Sequence.is_prefilling`."""

    def prefilling(self, running: list[Sequence]) -> list[Sequence]:
        """Return those of `running`, whose lag this is, that are prefilling."""
        return [running[index] for index in self.is_prefilling.nonzero()[0].tolist()]


class SequenceTable:
    """Table with a column for each slot: the numbers of the sequence that runs there.

    A step in flight knows its sequences by their columns and admissions. A sequence that was preempted or has ended
    since has left its column, which may belong to another one.

    Invariants:
        Each running sequence has a column, and each column at most one sequence.
        Columns without a sequence hold zeros.
        The numbers of admissions are distinct, and positive.
    """

    def __init__(self, num_slots: int) -> None:
        self.numbers = np.zeros((NUM_NUMBERS, num_slots), np.int64)
        self.times = np.zeros((NUM_TIMES, num_slots))
        self.pending = np.zeros((num_slots, MAX_PENDING_TOKENS), np.int64)
        self.admissions = np.zeros(num_slots, np.int64)
        """Number of the admission of each column's sequence; 0: the column is free."""
        self.may_be_continued = np.zeros(num_slots, bool)
        """See `Sequence.may_be_continued`."""
        self.has_stop_or_constraint = np.zeros(num_slots, bool)
        """See `Sequence.has_stop_or_constraint`."""
        self.is_special = np.zeros(num_slots, bool)
        """See `Sequence.is_special`."""
        self.stop_tokens: Counter[int] = Counter()
        """Stop tokens of the requests, each as often as a request has it."""
        self.accounts: Labels[tuple[str, Band]] = Labels(num_slots)
        """Tenant and band of each request."""
        self.ingresses: Labels[str] = Labels(num_slots)
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_admissions = 0
        self._rows: np.ndarray | None = None

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence a column."""
        row = self._free.pop()
        self._num_admissions += 1
        self.admissions[row] = self._num_admissions
        sequence.enter_table(row, self._num_admissions, self.numbers[:, row], self.times[:, row], self.pending[row])
        self.may_be_continued[row], self.is_special[row] = sequence.may_be_continued, sequence.is_special
        self.has_stop_or_constraint[row] = sequence.has_stop_or_constraint
        self.stop_tokens.update(sequence.request.params.stop_token_ids)
        self.accounts.set(row, (sequence.request.tenant, sequence.request.band))
        self.ingresses.set(row, sequence.request.ingress_id)
        self._rows = None

    def leave(self, sequence: Sequence) -> None:
        """Take the column of a sequence, which keeps its numbers."""
        row = sequence.row
        assert row is not None
        sequence.leave_table()
        self.numbers[:, row] = self.times[:, row] = self.admissions[row] = 0
        self.may_be_continued[row] = self.has_stop_or_constraint[row] = self.is_special[row] = False
        for token_id in sequence.request.params.stop_token_ids:
            self.stop_tokens[token_id] -= 1
            if not self.stop_tokens[token_id]:
                del self.stop_tokens[token_id]
        self.accounts.clear(row)
        self.ingresses.clear(row)
        self._free.append(row)
        self._rows = None

    def promoted(self, sequence: Sequence) -> None:
        """Note that a running sequence was promoted, and so the order of the running ones has changed."""
        assert sequence.row is not None
        self.numbers[EFFECTIVE_BAND, sequence.row] = sequence.effective_band
        self._rows = None

    def rows(self, running: Iterable[Sequence]) -> np.ndarray:
        """Return the columns of `running`, all running sequences in order of urgency.

        It is one array, which nobody changes, until a sequence comes, leaves or is promoted.
        """
        if self._rows is None:
            self._rows = np.array([sequence.row for sequence in running], np.int64)
            self._rows.flags.writeable = False
        return self._rows

    def lag(self, running: Iterable[Sequence], block_size: int) -> Lag:
        """Return what `running`, all running sequences in order of urgency, miss."""
        rows = self.rows(running)
        numbers = self.numbers.take(rows, axis=1)
        num_tokens = np.minimum(numbers[KNOWN] + numbers[PLACEHOLDERS], numbers[MAX_COMPUTED])
        num_missing = num_tokens - numbers[COMPUTED] - numbers[IN_FLIGHT]
        is_prefilling = num_missing > 1 + numbers[FORCED]
        return Lag(
            rows,
            num_tokens > numbers[TABLE_BLOCKS] * block_size,
            numbers[FORCED],
            (num_missing > 0) & ~is_prefilling,
            is_prefilling,
        )

    def columns(
        self, sequences: list[Sequence], rows: np.ndarray, num_tokens: np.ndarray, num_all_tokens: int, num_decodes: int
    ) -> BatchColumns:
        """Return the items of a step in which `sequences`, in columns `rows`, compute their next `num_tokens`.

        These are `num_all_tokens` together. The first `num_decodes` decode.
        """
        numbers = self.numbers.take(rows, axis=1)
        known, num_placeholders = numbers[KNOWN], numbers[PLACEHOLDERS]
        starts = numbers[COMPUTED] + numbers[IN_FLIGHT]
        ends, num_all = starts + num_tokens, known + num_placeholders
        return BatchColumns(
            sequences,
            rows,
            self.admissions[rows],
            starts,
            num_tokens,
            (ends == num_all) & (num_all - numbers[PROMPT] < numbers[MAX_OUTPUT]),
            np.where(ends <= known, numbers[NEWEST_TOKEN], -1),
            np.maximum(np.minimum(ends, numbers[PREEMPTED]) - starts, 0),
            numbers[PREEMPTIONS],
            numbers[TABLE_BLOCKS],
            numbers[NEWEST_BLOCK],
            num_all_tokens,
            num_decodes,
            self.is_special[rows].nonzero()[0].tolist(),
        )

    def launched(self, columns: BatchColumns) -> None:
        """Note that a step with these items was launched, all of whose sequences run."""
        rows, numbers = columns.rows, self.numbers
        # To add to a row of numbers by one index is much faster than to add to the array by two.
        in_flight, placeholders = numbers[IN_FLIGHT], numbers[PLACEHOLDERS]
        in_flight[rows] += columns.num_tokens
        placeholders[rows] += columns.samples
        if np.count_nonzero(numbers[HELD_STEPS]):
            numbers[HELD_STEPS, rows] = 0
        if np.count_nonzero(numbers[FORCED]):
            numbers[FORCED, rows] = np.maximum(numbers[FORCED, rows] - columns.num_tokens, 0)

    def load(self) -> RunningLoad:
        """Return the present load. Any thread may call it; values of two successive steps may be mixed."""
        rows = self.admissions.nonzero()[0]
        numbers = self.numbers.take(rows, axis=1)
        num_known = numbers[KNOWN] + numbers[PLACEHOLDERS]
        num_output = num_known - numbers[PROMPT]
        num_outstanding = np.minimum(num_known, numbers[MAX_COMPUTED]) - numbers[COMPUTED] - numbers[IN_FLIGHT]
        num_outstanding += np.maximum(numbers[EXPECTED_OUTPUT] - num_output, 0)
        bands, ingresses = numbers[EFFECTIVE_BAND], self.ingresses.of_rows[rows]
        num_by_band = tuple(np.bincount(bands, minlength=len(BANDS)).tolist())
        num_blocks_by_band = np.bincount(bands, numbers[BLOCKS], minlength=len(BANDS)).astype(np.int64).tolist()
        labels = self.ingresses.labels.copy()
        if len(labels) == 1 and len(rows):
            only = IngressShare(labels[0], num_by_band, int(num_outstanding.sum()))
            return RunningLoad(num_by_band, tuple(num_blocks_by_band), (only,))
        num_of_part = np.bincount(ingresses * len(BANDS) + bands, minlength=len(labels) * len(BANDS))
        tokens = np.bincount(ingresses, weights=num_outstanding, minlength=len(labels))
        return RunningLoad(
            num_by_band,
            tuple(num_blocks_by_band),
            tuple(
                IngressShare(labels[number], tuple(num_by_band), int(tokens[number]))
                for number, num_by_band in enumerate(num_of_part.reshape(-1, len(BANDS)).tolist())
                if any(num_by_band)
            ),
        )

    def has(self, columns: BatchColumns) -> np.ndarray:
        """Return for each item of a step [num_items] bool whether its sequence is still in its column."""
        is_there: np.ndarray = self.admissions[columns.rows] == columns.admissions
        return is_there

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Append the values of the oldest placeholders of sequences, whose tokens before were computed with them."""
        numbers = self.numbers
        self.pending[rows, numbers[PENDING, rows]] = token_ids
        numbers[NEWEST_TOKEN, rows] = token_ids
        for change, changed in ((1, (KNOWN, PENDING, COMPUTED)), (-1, (IN_FLIGHT, PLACEHOLDERS))):
            for index in changed:
                number = numbers[index]
                number[rows] += change

    def check_invariants(self, running: list[Sequence]) -> None:
        """Assert the class's invariants; `running` are all running sequences, in order of urgency."""
        rows = self.rows(running)
        assert rows.tolist() == [sequence.row for sequence in running] and len(set(rows.tolist())) == len(running)
        assert len(self._free) + len(running) == len(self.admissions)
        assert not self.numbers[:, self._free].any() and not self.admissions[self._free].any()
        admissions = self.admissions[rows].tolist()
        assert len(set(admissions)) == len(admissions) and all(admissions)
        for sequence in running:
            row, known = sequence.row, sequence.num_known_tokens
            assert self.numbers[:, row].tolist() == sequence.numbers.tolist()
            assert sequence.numbers[KNOWN] == known and sequence.numbers[PENDING] <= MAX_PENDING_TOKENS
            assert sequence.numbers[PREEMPTED] == sequence.num_preempted_tokens
            assert sequence.numbers[PREEMPTIONS] == sequence.num_preemptions
            assert self.accounts.labels[self.accounts.of_rows[row]] == (sequence.request.tenant, sequence.band)
            assert self.ingresses.labels[self.ingresses.of_rows[row]] == sequence.request.ingress_id
