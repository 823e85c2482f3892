"""Which sequences have run out of time."""

from __future__ import annotations

import heapq

from replicas.engine.sequence import Sequence, SequenceStatus

_MIN_ENTRIES = 64


class Deadlines:
    """The sequences that have a deadline, earliest first.

    Invariant: at most half of the entries, beyond a few, are of sequences that had ended at the last look through.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Sequence]] = []
        self._max_entries = _MIN_ENTRIES

    def add(self, sequence: Sequence) -> None:
        """Watch `sequence`, if it has a deadline."""
        if sequence.deadline_s is None:
            return
        if len(self._entries) >= self._max_entries:
            self._entries = [entry for entry in self._entries if entry[2].status is not SequenceStatus.FINISHED]
            heapq.heapify(self._entries)
            self._max_entries = 2 * len(self._entries) + _MIN_ENTRIES
        heapq.heappush(self._entries, (sequence.deadline_s, sequence.arrival_index, sequence))

    def pop_expired(self, now: float) -> list[Sequence]:
        """The live sequences whose deadline is `now` or earlier, which are watched no longer."""
        passed = []
        while self._entries and self._entries[0][0] <= now:
            sequence = heapq.heappop(self._entries)[2]
            if sequence.status is not SequenceStatus.FINISHED:
                passed.append(sequence)
        return passed
