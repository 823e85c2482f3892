"""Parts of an engine's load by the ingress that sent the sequences."""

from __future__ import annotations

from replicas.engine.sequence import Sequence
from replicas.protocol import Band, IngressShare


class IngressParts:
    """Number of sequences in each band, and their outstanding tokens, by the ingress that sent them.

    Invariant: an ingress without sequences has no part.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[int]] = {}
        """Number of sequences of each band, then their outstanding tokens."""

    def count(self, sequence: Sequence, band: Band, num: int = 1) -> None:
        """Count a sequence that comes (1) or goes (-1), in a band."""
        ingress_id = sequence.request.ingress_id
        part = self._parts.get(ingress_id)
        if part is None:
            part = self._parts[ingress_id] = [0] * (len(Band) + 1)
        part[band] += num
        part[-1] += num * sequence.num_outstanding_tokens
        if num < 0 and not any(part):
            del self._parts[ingress_id]

    def add(self, share: IngressShare) -> None:
        """Add sequences of one ingress."""
        part = self._parts.setdefault(share.ingress_id, [0] * (len(Band) + 1))
        for index, num in enumerate((*share.num_by_band, share.outstanding_tokens)):
            part[index] += num

    def copy(self) -> IngressParts:
        """Return parts that change on their own. Any thread may call it."""
        copied = IngressParts()
        # Listed in one call of C code, as the metrics are read while the engine's thread counts.
        copied._parts = {ingress_id: part.copy() for ingress_id, part in list(self._parts.items())}
        return copied

    @property
    def num_outstanding_tokens(self) -> int:
        """Number of known tokens of all sequences, plus the output still expected of them."""
        return sum([part[-1] for part in self._parts.values()])

    def shares(self) -> tuple[IngressShare, ...]:
        """Return the parts as a report has them."""
        return tuple([IngressShare(name, tuple(part[:-1]), part[-1]) for name, part in self._parts.items()])
