"""Waiting queue: the sequences without a slot, in order of urgency."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, KeysView
from dataclasses import dataclass, field

from replicas.engine.ingress_parts import IngressParts
from replicas.engine.sequence import Sequence
from replicas.protocol import Band

_Entry = tuple[tuple[int, float, int], Sequence]


@dataclass(slots=True)
class _Lines:
    """Waiting sequences of one tenant in one band, in order of urgency."""

    short: list[_Entry] = field(default_factory=list)
    long: list[_Entry] = field(default_factory=list)


class WaitingQueue:
    """Waiting queue: per band and tenant, one sorted line for sequences that fit in a step and one for longer ones.

    With two lines, a short sequence behind any number of long ones is found at once.

    Invariants:
        Every sequence in it is WAITING and is in exactly one line, at the place of its urgency.
        A tenant has lines in a band if and only if it has a sequence in one of them.
    """

    def __init__(self, long_prompt_tokens: int) -> None:
        """Sequences with more than `long_prompt_tokens` tokens go to the long line."""
        self._long_prompt_tokens = long_prompt_tokens
        self._lines: dict[Band, dict[str, _Lines]] = {band: {} for band in Band}
        self._num_by_band = dict.fromkeys(Band, 0)
        self.num_tokens = 0
        """Number of tokens, prompt plus `max_tokens`, of the waiting sequences; callers only read it."""
        self.parts = IngressParts()
        """The waiting sequences by ingress, each in the band of its request; callers only read it."""

    def __len__(self) -> int:
        return sum(self._num_by_band.values())

    @property
    def num_by_band(self) -> tuple[int, ...]:
        """Number of sequences of each band, most urgent band first. A promoted sequence counts in its own band."""
        return tuple(self._num_by_band.values())

    def add(self, sequence: Sequence) -> None:
        """Insert `sequence` at the place of its urgency."""
        insort(self._line(sequence), (sequence.urgency, sequence))
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Remove `sequence`, which must be in the queue."""
        line = self._line(sequence)
        index = bisect_left(line, sequence.urgency, key=lambda entry: entry[0])
        assert line[index][1] is sequence
        del line[index]
        if not line:
            self._forget_if_empty(sequence)
        self._count(sequence, -1)

    def tenants(self, band: Band) -> KeysView[str]:
        """Return the tenants that have sequences scheduled in `band`."""
        return self._lines[band].keys()

    def head(self, band: Band, with_long: bool, first: Collection[str] = ()) -> Sequence | None:
        """Return the first sequence scheduled in `band`, or None; without `with_long` of the short lines only.

        Promoted ones are first, then those of the tenants in `first`, then the most urgent.
        """
        heads = [lines.short[0] for lines in self._lines[band].values() if lines.short]
        if with_long:
            heads += [lines.long[0] for lines in self._lines[band].values() if lines.long]
        if len(heads) < 2:
            return heads[0][1] if heads else None
        return min(heads, key=lambda head: (not (head[1].is_promoted or head[1].request.tenant in first), head[0]))[1]

    def sequences(self) -> list[Sequence]:
        """Return all waiting sequences, in no particular order."""
        every = (lines for by_tenant in self._lines.values() for lines in by_tenant.values())
        return [entry[1] for lines in every for line in (lines.short, lines.long) for entry in line]

    def check_invariants(self) -> None:
        """Assert that the counts are those of the sequences in the queue."""
        parts = IngressParts()
        for sequence in self.sequences():
            parts.count(sequence, sequence.band)
        assert set(parts.shares()) == set(self.parts.shares())
        by_band = [sum(share.num_by_band[band] for share in parts.shares()) for band in Band]
        assert list(self.num_by_band) == by_band

    def _count(self, sequence: Sequence, num: int) -> None:
        """Count a sequence that comes (1) or goes (-1)."""
        self._num_by_band[sequence.band] += num
        self.num_tokens += num * sequence.request.max_total_tokens
        self.parts.count(sequence, sequence.band, num)

    def _forget_if_empty(self, sequence: Sequence) -> None:
        by_tenant, tenant = self._lines[sequence.effective_band], sequence.request.tenant
        if not (by_tenant[tenant].short or by_tenant[tenant].long):
            del by_tenant[tenant]

    def _line(self, sequence: Sequence) -> list[_Entry]:
        by_tenant, tenant = self._lines[sequence.effective_band], sequence.request.tenant
        lines = by_tenant.get(tenant)
        if lines is None:
            lines = by_tenant[tenant] = _Lines()
        return lines.long if sequence.num_tokens > self._long_prompt_tokens else lines.short
