"""Sequences that wait for a slot, in order of urgency."""

from __future__ import annotations

from bisect import bisect_left, insort

from replicas.engine.sequence import Sequence
from replicas.protocol import Band

_Entry = tuple[tuple[int, float, int], Sequence]


class WaitingQueue:
    """One sorted line per band for prompts that fit in a step, and one for those that do not.

    Two lines, so that a short prompt is found at once behind any number of long ones.

    Invariant: every sequence in it is WAITING and stands in exactly one line, by its urgency.
    """

    def __init__(self, long_prompt_tokens: int) -> None:
        """Sequences with more tokens than `long_prompt_tokens` stand in the long line."""
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
        """Sequences of each band, most urgent band first (a promoted one counts in its own)."""
        return tuple(self._num_by_band.values())

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens that the waiting sequences may still come to need."""
        return self._num_tokens

    @property
    def num_outstanding_tokens(self) -> int:
        """Known tokens of the waiting sequences, and the output still expected of them."""
        return self._num_outstanding_tokens

    def add(self, sequence: Sequence) -> None:
        """Put `sequence` where its urgency says."""
        insort(self._line(sequence), (sequence.urgency, sequence))
        self._num_by_band[sequence.band] += 1
        self._num_tokens += sequence.request.max_total_tokens
        self._num_outstanding_tokens += sequence.num_outstanding_tokens

    def remove(self, sequence: Sequence) -> None:
        """Take out `sequence`, which must be here."""
        line = self._line(sequence)
        index = bisect_left(line, sequence.urgency, key=lambda entry: entry[0])
        assert line[index][1] is sequence
        del line[index]
        self._num_by_band[sequence.band] -= 1
        self._num_tokens -= sequence.request.max_total_tokens
        self._num_outstanding_tokens -= sequence.num_outstanding_tokens

    def head(self, band: Band, with_long: bool) -> Sequence | None:
        """The most urgent sequence scheduled in `band`; among the short ones only unless `with_long`."""
        lines = (self._short[band], self._long[band]) if with_long else (self._short[band],)
        heads = [line[0] for line in lines if line]
        return min(heads)[1] if heads else None

    def sequences(self) -> list[Sequence]:
        """Everything that waits, in no particular order."""
        return [entry[1] for lines in (self._short, self._long) for line in lines.values() for entry in line]

    def _line(self, sequence: Sequence) -> list[_Entry]:
        lines = self._long if sequence.num_tokens > self._long_prompt_tokens else self._short
        return lines[sequence.effective_band]
