"""Routing policy: ranks replicas for a request by their load and the prefixes that they hold."""

from __future__ import annotations

import random
from hashlib import blake2b

from router.balancing.prefix_index import PrefixIndex
from router.types import Ranking, Reason, ReplicaView, RoutingRequest

_LOAD_BOUND = 1.25
_AFFINITY_TOLERANCE = 0.1


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
            has_bonus = view.outstanding_tokens <= bound
            saved[replica_id] = held.get(replica_id, 0) * view.stats.block_size if has_bonus else 0
            work[replica_id] = view.outstanding_tokens + routing.num_tokens - saved[replica_id]
        least = min(work.values()) + _AFFINITY_TOLERANCE * routing.num_tokens
        key = self._key(routing)
        ranked = sorted(work, key=lambda replica_id: (max(work[replica_id], least), self._tie(key, replica_id)))
        if saved[ranked[0]]:
            return Ranking(ranked, Reason.PREFIX_HIT)
        if max(held.values(), default=0) > held.get(ranked[0], 0):
            return Ranking(ranked, Reason.PREFIX_OVERRIDDEN)
        return Ranking(ranked, _reason_without_prefix([tokens <= least for tokens in work.values()], key))

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
    """Return the reason for the first place; `is_equal` says of each replica if it counts as equal to the least."""
    if len(is_equal) == 1:
        return Reason.SINGLE_CANDIDATE
    if sum(is_equal) == 1:
        return Reason.LEAST_LOADED
    return Reason.RANDOM if key is None else Reason.AFFINITY
