"""Waiting queue: the sequences without a slot, in order of urgency."""

from __future__ import annotations

from bisect import bisect_left, insort

from replicas.engine.sequence import Sequence
from replicas.protocol import Band

_Entry = tuple[tuple[int, float, int], Sequence]


class WaitingQueue:
    """Waiting queue: per band, one sorted line for sequences that fit in a step and one for longer ones.

    With two lines, a short sequence behind any number of long ones is found at once.

    Invariant: every sequence in it is WAITING and is in exactly one line, at the place of its urgency.
    """

    def __init__(self, long_prompt_tokens: int) -> None:
        """Sequences with more than `long_prompt_tokens` tokens go to the long line."""
        self._long_prompt_tokens = long_prompt_tokens
        self._short: dict[Band, list[_Entry]] = {band: [] for band in Band}
        self._long: dict[Band, list[_Entry]] = {band: [] for band in Band}
        self._num_by_band = dict.fromkeys(Band, 0)
        self._num_tokens = 0
        self._num_outstanding_tokens = 0

    def __len__(self) -> int:
        return sum(self._num_by_band.values())

    @property
    def num_by_band(self) -> tuple[int, ...]:
        """Number of sequences of each band, most urgent band first. A promoted sequence counts in its own band."""
        return tuple(self._num_by_band.values())

    @property
    def num_tokens(self) -> int:
        """Number of tokens, prompt plus `max_tokens`, of the waiting sequences."""
        return self._num_tokens

    @property
    def num_outstanding_tokens(self) -> int:
        """Number of known tokens of the waiting sequences, plus the output still expected of them."""
        return self._num_outstanding_tokens

    def add(self, sequence: Sequence) -> None:
        """Insert `sequence` at the place of its urgency."""
        insort(self._line(sequence), (sequence.urgency, sequence))
        self._num_by_band[sequence.band] += 1
        self._num_tokens += sequence.request.max_total_tokens
        self._num_outstanding_tokens += sequence.num_outstanding_tokens

    def remove(self, sequence: Sequence) -> None:
        """Remove `sequence`, which must be in the queue."""
        line = self._line(sequence)
        index = bisect_left(line, sequence.urgency, key=lambda entry: entry[0])
        assert line[index][1] is sequence
        del line[index]
        self._num_by_band[sequence.band] -= 1
        self._num_tokens -= sequence.request.max_total_tokens
        self._num_outstanding_tokens -= sequence.num_outstanding_tokens

    def head(self, band: Band, with_long: bool) -> Sequence | None:
        """Return the most urgent sequence scheduled in `band`, or None; without `with_long` of the short line only."""
        lines = (self._short[band], self._long[band]) if with_long else (self._short[band],)
        heads = [line[0] for line in lines if line]
        return min(heads)[1] if heads else None

    def sequences(self) -> list[Sequence]:
        """Return all waiting sequences, in no particular order."""
        return [entry[1] for lines in (self._short, self._long) for line in lines.values() for entry in line]

    def _line(self, sequence: Sequence) -> list[_Entry]:
        lines = self._long if sequence.num_tokens > self._long_prompt_tokens else self._short
        return lines[sequence.effective_band]
