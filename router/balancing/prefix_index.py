"""Which replica has probably computed which prefix."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence

PREFIX_INDEX_BLOCKS = 200_000


class PrefixIndex:
    """Block hashes, as the engine computes them, and the replicas they were sent to.

    A guess, kept without asking: a replica may have evicted a block since, which costs time, not
    correctness. At most `max_blocks` hashes, or as many as the replicas have blocks, about 200 bytes each; those used
    longest ago are forgotten. To forget a replica takes a look at every hash.

    Invariant: every block has a holder that has not been forgotten.
    """

    def __init__(self, max_blocks: int = PREFIX_INDEX_BLOCKS) -> None:
        self._most_blocks = self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, frozenset[str]] = OrderedDict()
        self._alone: dict[str, frozenset[str]] = {}
        """The set of each replica by itself, which most blocks share."""

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, replica_id: str, hashes: Sequence[bytes]) -> None:
        """Note that a replica was given a prompt with these block hashes, in order."""
        alone = self._alone.setdefault(replica_id, frozenset((replica_id,)))
        # The last blocks first: what is forgotten first must be the ends, since a chain without its start is useless.
        for block_hash in reversed(hashes):
            holders = self._holders.setdefault(block_hash, alone)
            if replica_id not in holders:
                self._holders[block_hash] = holders | alone
            self._holders.move_to_end(block_hash)
        self._trim()

    def resize(self, num_blocks: int) -> None:
        """Keep no more hashes than this, which is how many blocks all replicas have."""
        self._max_blocks = min(num_blocks, self._most_blocks)
        self._trim()

    def num_blocks_held(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """For each replica that holds some, how many of the leading blocks it holds without a gap."""
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
        """A replica is gone, and its blocks with it."""
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
