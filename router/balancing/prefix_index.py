"""Index of the prefixes that each replica has probably computed."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence

PREFIX_INDEX_BLOCKS = 200_000


class PrefixIndex:
    """Index from block hashes, as the engine computes them, to the replicas that were sent the blocks.

    The index is an estimate, as replicas are not asked: a replica may have evicted a block. A wrong entry costs time,
    not correctness. The index holds at most `max_blocks` hashes and at most as many as the replicas have blocks, about
    200 bytes each; the hashes used longest ago are forgotten. Forgetting a replica visits every hash.

    Invariant: every block has a holder that has not been forgotten.
    """

    def __init__(self, max_blocks: int = PREFIX_INDEX_BLOCKS) -> None:
        self._most_blocks = self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, frozenset[str]] = OrderedDict()
        self._alone: dict[str, frozenset[str]] = {}
        """Set of each replica alone. Most blocks have one holder and share this object."""

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, replica_id: str, hashes: Sequence[bytes]) -> None:
        """Note that a replica was given a prompt with these block hashes, in order."""
        alone = self._alone.setdefault(replica_id, frozenset((replica_id,)))
        # Add the last blocks first, so that the ends of chains are forgotten first: a chain without its start is
        # useless.
        for block_hash in reversed(hashes):
            holders = self._holders.setdefault(block_hash, alone)
            if replica_id not in holders:
                self._holders[block_hash] = holders | alone
            self._holders.move_to_end(block_hash)
        self._trim()

    def resize(self, num_blocks: int) -> None:
        """Bound the number of hashes by `num_blocks`, the number of blocks of all replicas."""
        self._max_blocks = min(num_blocks, self._most_blocks)
        self._trim()

    def num_blocks_held(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return the number of leading blocks that each replica holds without a gap; zeros are left out."""
        held: dict[str, int] = defaultdict(int)
        remaining: frozenset[str] | None = None
        for count, block_hash in enumerate(hashes, start=1):
            holders = self._holders.get(block_hash, frozenset())
            remaining = holders if remaining is None else remaining & holders
            if not remaining:
                break
            for replica_id in remaining:
                held[replica_id] = count
        return dict(held)

    def forget(self, replica_id: str) -> None:
        """Remove a replica that is gone from every block."""
        gone = self._alone.pop(replica_id, None)
        if gone is None:
            return
        for block_hash in [block_hash for block_hash, holders in self._holders.items() if replica_id in holders]:
            left = self._holders[block_hash] - gone
            if not left:
                del self._holders[block_hash]
            elif len(left) == 1:
                self._holders[block_hash] = self._alone[next(iter(left))]
            else:
                self._holders[block_hash] = left

    def _trim(self) -> None:
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        assert len(self._holders) <= self._max_blocks
        assert all(holders and holders <= self._alone.keys() for holders in self._holders.values())
        assert all(alone == {replica_id} for replica_id, alone in self._alone.items())
