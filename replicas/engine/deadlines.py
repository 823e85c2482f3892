"""Deadlines of sequences, and the search for those that have passed."""

from __future__ import annotations

import heapq

from replicas.engine.sequence import Sequence, SequenceStatus

_MIN_ENTRIES = 64


class Deadlines:
    """Heap of the sequences that have a deadline, earliest first.

    Finished sequences stay in the heap until they are popped or the heap is full. A full heap is cleaned, and may then
    grow to twice its size plus 64 entries.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Sequence]] = []
        self._max_entries = _MIN_ENTRIES

    def add(self, sequence: Sequence) -> None:
        """Add `sequence` if it has a deadline."""
        if sequence.deadline_s is None:
            return
        if len(self._entries) >= self._max_entries:
            self._entries = [entry for entry in self._entries if entry[2].status is not SequenceStatus.FINISHED]
            heapq.heapify(self._entries)
            self._max_entries = 2 * len(self._entries) + _MIN_ENTRIES
        heapq.heappush(self._entries, (sequence.deadline_s, sequence.arrival_index, sequence))

    def pop_expired(self, now: float) -> list[Sequence]:
        """Remove and return the unfinished sequences with a deadline of `now` or earlier."""
        passed = []
        while self._entries and self._entries[0][0] <= now:
            sequence = heapq.heappop(self._entries)[2]
            if sequence.status is not SequenceStatus.FINISHED:
                passed.append(sequence)
        return passed
