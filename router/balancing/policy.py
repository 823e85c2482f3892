"""Routing policy: ranks replicas for a request by their load and by an index of the prefixes that they hold."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile

from router.balancing.hash_ring import CIRCLE, position_of
from router.types import Candidates, Ranking, Reason, ReplicaView, RoutingRequest

PREFIX_INDEX_BLOCKS = 200_000
_LOAD_BOUND = 1.25
_AFFINITY_TOLERANCE = 0.1
_NUM_RANKED = 8
_NUM_LISTED = 32
"""Most replicas that a choice lists. Of more it takes them in order until it finds the right one."""


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
        before = after = alone
        # Add the last blocks first, so that the ends of chains are forgotten first: a chain without its start is
        # useless.
        for block_hash in reversed(hashes):
            holders = self._holders.setdefault(block_hash, alone)
            if replica_id not in holders:
                if holders is not before:
                    before, after = holders, holders | alone
                self._holders[block_hash] = after
            self._holders.move_to_end(block_hash)
        self._trim()

    def resize(self, num_blocks: int) -> None:
        """Bound the number of hashes by `num_blocks`, the number of blocks of all replicas."""
        self._bound = min(num_blocks, self._max_blocks)
        self._trim()

    def holders(self, hashes: Sequence[bytes]) -> list[tuple[int, frozenset[str]]]:
        """Return pairs of a number of leading blocks and the replicas that hold them without a gap, most blocks first.

        A number is left out if the same replicas hold more blocks. So each pair has replicas that no earlier one has.
        """
        pairs: list[tuple[int, frozenset[str]]] = []
        for count, block_hash in enumerate(hashes, start=1):
            holders = self._holders.get(block_hash)
            if holders is None:
                break
            if pairs and holders is not pairs[-1][1]:
                # Successive blocks mostly share their set of holders, or the next one's is a part of it.
                holders = holders if holders < pairs[-1][1] else pairs[-1][1] & holders
                if not holders:
                    break
            if pairs and len(holders) == len(pairs[-1][1]):
                pairs.pop()
            pairs.append((count, holders))
        return pairs[::-1]

    def num_blocks_held(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return the number of leading blocks that each replica holds without a gap; zeros are left out."""
        held: dict[str, int] = {}
        for count, holders in reversed(self.holders(hashes)):
            held |= dict.fromkeys(holders, count)
        return held

    def forget(self, replica_id: str) -> None:
        """Remove a replica that is gone from every block."""
        gone = self._alone.pop(replica_id, None)
        if gone is None:
            return
        left_of: dict[frozenset[str], frozenset[str]] = {}
        for block_hash, holders in [item for item in self._holders.items() if replica_id in item[1]]:
            if holders not in left_of:
                left = holders - gone
                left_of[holders] = self._alone[next(iter(left))] if len(left) == 1 else left
            if left_of[holders]:
                self._holders[block_hash] = left_of[holders]
            else:
                del self._holders[block_hash]

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
       1.25 times the mean of all replicas, this request's tokens included (bounded loads: Mirrokni et al., SODA 2018),
       so that a popular prefix makes no hot spot.
    2. Replicas whose work exceeds the least by at most a tenth of this request's own tokens count as equal. Consistent
       hashing (Karger et al., 1997) of the request's affinity key, or else of its first block, chooses among them: the
       first one clockwise on the ring. So ingresses that do not know of each other's requests send one prefix to one
       replica.
    3. A request with neither a key nor a full block goes to a random one of them.
    4. The ranking goes on with the replicas of the fewest outstanding tokens, up to 8 in all.
    """

    def __init__(self, rng: random.Random, index: PrefixIndex | None = None) -> None:
        self._rng = rng
        self._index = PrefixIndex() if index is None else index

    def rank(self, routing: RoutingRequest, candidates: Candidates) -> Ranking:
        """Rank the candidates by work. The cost depends on the number of equal ones, up to 32, and of holders."""
        self._index.resize(candidates.cluster.num_blocks)
        work = _Work(routing, candidates, self._index.holders(routing.block_hashes))
        equal_up_to = work.least() + _AFFINITY_TOLERANCE * routing.num_tokens
        # More need not be counted: the ring finds the first of many soon.
        equal = work.at_most(equal_up_to, _NUM_LISTED + 1)
        key = self._key(routing)
        first = self._choose(equal, key, work, equal_up_to)
        others = (view.stats.replica_id for view in candidates.by_tokens() if view is not first)
        first_id = first.stats.replica_id
        replica_ids = [first_id, *islice(others, _NUM_RANKED - 1)]
        if work.saved(first):
            return Ranking(replica_ids, Reason.PREFIX_HIT)
        if work.most_held > work.held(first_id):
            return Ranking(replica_ids, Reason.PREFIX_OVERRIDDEN)
        return Ranking(replica_ids, _reason_without_prefix(len(replica_ids), len(equal), key))

    def placed(self, routing: RoutingRequest, replica_id: str) -> int:
        """Note that a replica will hold the request's blocks; return the prompt tokens that it has to compute."""
        held = _num_held(self._index.holders(routing.block_hashes), replica_id)
        self._index.add(replica_id, routing.block_hashes)
        num_prompt_tokens = len(routing.request.prompt_token_ids)
        if not held:
            return num_prompt_tokens
        return num_prompt_tokens * (len(routing.block_hashes) - held + 1) // (len(routing.block_hashes) + 1)

    def forget(self, replica_id: str) -> None:
        """Note that a replica's blocks are gone."""
        self._index.forget(replica_id)

    def _choose(self, equal: list[ReplicaView], key: bytes | None, work: _Work, equal_up_to: float) -> ReplicaView:
        if len(equal) > _NUM_LISTED:
            position = self._rng.randrange(CIRCLE) if key is None else position_of(key)
            return next(view for view in work.candidates.clockwise(position) if work.of(view) <= equal_up_to)
        if key is None:
            return equal[self._rng.randrange(len(equal))]
        position = position_of(key)
        return min(equal, key=lambda view: work.candidates.distance(view.stats.replica_id, position))

    def _key(self, routing: RoutingRequest) -> bytes | None:
        if routing.request.affinity_key is not None:
            return routing.request.affinity_key.encode()
        return routing.block_hashes[0] if routing.block_hashes else None


class _Work:
    """Work of the candidates for one request: their outstanding tokens, less the prompt tokens that they hold."""

    def __init__(self, routing: RoutingRequest, candidates: Candidates, holders: list[tuple[int, frozenset[str]]]):
        """`holders` are those of the prompt's blocks, as `PrefixIndex.holders` returns them."""
        self.candidates = candidates
        self._holders = holders
        self._first = next(candidates.by_tokens())
        num_tokens = candidates.cluster.outstanding_tokens + routing.num_tokens
        self._bound = _LOAD_BOUND * num_tokens / candidates.cluster.num_replicas

    @property
    def most_held(self) -> int:
        """Most leading blocks that any replica holds."""
        return self._holders[0][0] if self._holders else 0

    def held(self, replica_id: str) -> int:
        """Return the number of leading blocks that a replica holds."""
        return _num_held(self._holders, replica_id)

    def saved(self, view: ReplicaView) -> int:
        """Return the prompt tokens that a replica need not compute."""
        if not self._holders or view.outstanding_tokens > self._bound:
            return 0
        return self.held(view.stats.replica_id) * view.stats.block_size

    def of(self, view: ReplicaView) -> int:
        """Return the work of a candidate."""
        return view.outstanding_tokens - self.saved(view)

    def least(self) -> int:
        """Return the least work of any candidate."""
        least = self._first.outstanding_tokens
        for count, holders in self._holders:
            # Of the replicas that hold as many blocks, the one with the fewest outstanding tokens has the least work.
            for view in islice(self._holding(holders, least + self._tokens(count)), 1):
                least = min(least, self.of(view))
        return least

    def at_most(self, tokens: float, most: int) -> list[ReplicaView]:
        """Return the candidates with at most so much work, the fewest outstanding tokens first; or `most` of them."""
        within = takewhile(lambda view: view.outstanding_tokens <= tokens, self.candidates.by_tokens())
        views = {view.stats.replica_id: view for view in islice(within, most)}
        for count, holders in self._holders:
            for view in self._holding(holders, tokens + self._tokens(count)):
                if len(views) >= most:
                    break
                if self.of(view) <= tokens:
                    views[view.stats.replica_id] = view
        return sorted(views.values(), key=_by_tokens)

    def _holding(self, holders: frozenset[str], most_tokens: float) -> Iterator[ReplicaView]:
        """Yield the candidates among `holders` with at most so many outstanding tokens, the fewest first."""
        if len(holders) <= _NUM_LISTED:
            listed = [view for replica_id in holders if (view := self.candidates.get(replica_id)) is not None]
            ordered: Iterable[ReplicaView] = sorted(listed, key=_by_tokens)
        else:
            ordered = self.candidates.by_tokens()
        for view in takewhile(lambda view: view.outstanding_tokens <= most_tokens, ordered):
            if view.stats.replica_id in holders:
                yield view

    def _tokens(self, num_blocks: int) -> int:
        return num_blocks * self._first.stats.block_size


def _num_held(holders: list[tuple[int, frozenset[str]]], replica_id: str) -> int:
    return next((count for count, replica_ids in holders if replica_id in replica_ids), 0)


def _by_tokens(view: ReplicaView) -> tuple[int, str]:
    return (view.outstanding_tokens, view.stats.replica_id)


def _reason_without_prefix(num_candidates: int, num_equal: int, key: bytes | None) -> Reason:
    """Return the reason for the first place; `num_equal` candidates count as least loaded."""
    if num_candidates == 1:
        return Reason.SINGLE_CANDIDATE
    if num_equal == 1:
        return Reason.LEAST_LOADED
    return Reason.RANDOM if key is None else Reason.AFFINITY
