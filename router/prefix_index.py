"""Which replica has probably computed which prefix."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence

PREFIX_INDEX_BLOCKS = 200_000


class PrefixIndex:
    """Block hashes, as the engine computes them, and the replicas they were sent to.

    A guess, kept without asking: a replica may have evicted a block since, which costs time, not
    correctness. At most `max_blocks` hashes; those used longest ago are forgotten.

    Invariant: a replica's blocks are those that it is a holder of, and every block has a holder.
    """

    def __init__(self, max_blocks: int = PREFIX_INDEX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, set[str]] = OrderedDict()
        self._blocks: dict[str, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, replica_id: str, hashes: Sequence[bytes]) -> None:
        """Note that a replica was given a prompt with these block hashes, in order."""
        # The last blocks first: what is forgotten first must be the ends, since a chain without its start is useless.
        for block_hash in reversed(hashes):
            self._holders.setdefault(block_hash, set()).add(replica_id)
            self._holders.move_to_end(block_hash)
        self._blocks.setdefault(replica_id, set()).update(hashes)
        while len(self._holders) > self._max_blocks:
            block_hash, holders = self._holders.popitem(last=False)
            for holder in holders:
                self._blocks[holder].discard(block_hash)

    def num_blocks_held(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """For each replica that holds some, how many of the leading blocks it holds without a gap."""
        held: dict[str, int] = defaultdict(int)
        remaining: set[str] | None = None
        for count, block_hash in enumerate(hashes, start=1):
            holders = self._holders.get(block_hash, set())
            remaining = set(holders) if remaining is None else remaining & holders
            if not remaining:
                break
            for replica_id in remaining:
                held[replica_id] = count
        return dict(held)

    def forget(self, replica_id: str) -> None:
        """A replica is gone, and its blocks with it."""
        for block_hash in self._blocks.pop(replica_id, ()):
            holders = self._holders[block_hash]
            holders.discard(replica_id)
            if not holders:
                del self._holders[block_hash]

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        assert len(self._holders) <= self._max_blocks and all(self._holders.values())
        pairs = {(block_hash, holder) for block_hash, holders in self._holders.items() for holder in holders}
        assert pairs == {(block_hash, holder) for holder, blocks in self._blocks.items() for block_hash in blocks}
