"""Routing policy: ranks replicas for a request by their load and by an index of the prefixes that they hold."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from hashlib import blake2b

from router.types import Ranking, Reason, ReplicaView, RoutingRequest

PREFIX_INDEX_BLOCKS = 200_000
_LOAD_BOUND = 1.25
_AFFINITY_TOLERANCE = 0.1


class PrefixIndex:
    """Index from block hashes, as the engine computes them, to the replicas that were sent the blocks.

    The index is an estimate, as replicas are not asked: a replica may have evicted a block. A wrong entry costs time,
    not correctness. The index holds at most `max_blocks` hashes and at most as many as the replicas have blocks, about
    200 bytes each; the hashes used longest ago are forgotten. Forgetting a replica visits every hash.

    Invariant: every block has a holder that has not been forgotten.
    """

    def __init__(self, max_blocks: int = PREFIX_INDEX_BLOCKS) -> None:
        self._max_blocks = self._bound = max_blocks
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
        self._bound = min(num_blocks, self._max_blocks)
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

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        assert len(self._holders) <= self._bound
        assert all(holders and holders <= self._alone.keys() for holders in self._holders.values())
        assert all(alone == {replica_id} for replica_id, alone in self._alone.items())

    def _trim(self) -> None:
        while len(self._holders) > self._bound:
            self._holders.popitem(last=False)


class LeastTokens:
    """Policy of least work in tokens, less what a replica's prefix cache would save.

    1. A replica's work is its outstanding tokens plus this request's: the prompt tokens that it does not hold yet, and
       the expected output. The prompt tokens that it holds are subtracted only while its outstanding tokens are at most
       1.25 times the mean, this request's tokens included (bounded loads: Mirrokni et al., SODA 2018), so that a
       popular prefix makes no hot spot.
    2. Replicas are ordered by that work.
    3. Replicas whose work exceeds the least by at most a tenth of this request's own tokens count as equal. Rendezvous
       hashing (Thaler and Ravishankar, 1998) of the request's affinity key, or else of its first block, chooses among
       them. So ingresses that do not know of each other's requests send one prefix to one replica.
    4. A request with neither a key nor a full block goes to a random one of them.
    """

    def __init__(self, rng: random.Random, index: PrefixIndex | None = None) -> None:
        self._rng = rng
        self._index = index or PrefixIndex()

    def rank(self, routing: RoutingRequest, views: list[ReplicaView]) -> Ranking:
        """Rank the replicas by work."""
        self._index.resize(sum(view.stats.num_blocks for view in views))
        held = self._index.num_blocks_held(routing.block_hashes)
        num_tokens = routing.num_tokens + sum(view.outstanding_tokens for view in views)
        bound = _LOAD_BOUND * num_tokens / len(views)
        work, saved = {}, {}
        for view in views:
            replica_id = view.stats.replica_id
            is_within_bound = view.outstanding_tokens <= bound
            saved[replica_id] = held.get(replica_id, 0) * view.stats.block_size if is_within_bound else 0
            work[replica_id] = view.outstanding_tokens + routing.num_tokens - saved[replica_id]
        equal_up_to = min(work.values()) + _AFFINITY_TOLERANCE * routing.num_tokens
        key = self._key(routing)
        ranked = sorted(work, key=lambda replica_id: (max(work[replica_id], equal_up_to), self._tie(key, replica_id)))
        if saved[ranked[0]]:
            return Ranking(ranked, Reason.PREFIX_HIT)
        if max(held.values(), default=0) > held.get(ranked[0], 0):
            return Ranking(ranked, Reason.PREFIX_OVERRIDDEN)
        return Ranking(ranked, _reason_without_prefix([tokens <= equal_up_to for tokens in work.values()], key))

    def placed(self, routing: RoutingRequest, replica_id: str) -> int:
        """Note that a replica will hold the request's blocks; return the prompt tokens that it has to compute."""
        held = self._index.num_blocks_held(routing.block_hashes).get(replica_id, 0)
        self._index.add(replica_id, routing.block_hashes)
        num_prompt_tokens = len(routing.request.prompt_token_ids)
        if not held:
            return num_prompt_tokens
        return num_prompt_tokens * (len(routing.block_hashes) - held + 1) // (len(routing.block_hashes) + 1)

    def forget(self, replica_id: str) -> None:
        """Note that a replica's blocks are gone."""
        self._index.forget(replica_id)

    def _key(self, routing: RoutingRequest) -> bytes | None:
        if routing.request.affinity_key is not None:
            return routing.request.affinity_key.encode()
        return routing.block_hashes[0] if routing.block_hashes else None

    def _tie(self, key: bytes | None, replica_id: str) -> float:
        if key is None:
            return self._rng.random()
        digest = blake2b(key + replica_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64


def _reason_without_prefix(is_equal: list[bool], key: bytes | None) -> Reason:
    """Return the reason for the first place; `is_equal`: for each replica, True if it counts as least loaded."""
    if len(is_equal) == 1:
        return Reason.SINGLE_CANDIDATE
    if sum(is_equal) == 1:
        return Reason.LEAST_LOADED
    return Reason.RANDOM if key is None else Reason.AFFINITY
