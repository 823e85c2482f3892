"""Block manager: the bookkeeping of the paged KV cache.

Blocks are reference-counted, so that sequences with a common beginning share them. A free block keeps its contents
until it is needed, so a later sequence that starts with the same tokens can reuse it (prefix caching; block size, chain
hashes and LRU eviction as in vLLM's automatic prefix caching).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection

from replicas.engine.config import EngineConfig
from replicas.engine.sequence import Sequence
from replicas.engine.state_slots import StateSlots
from replicas.shared_rules.block_hash import extend_hashes

_MAX_CHECKED_BLOCKS = 16_384
"""Most blocks that one check of the invariants visits."""


class OutOfBlocks(Exception):
    """Failure of an allocation that needs more blocks than are free; no block was taken."""


class BlockManager:
    """Manager of the blocks 1..num_blocks: gives them to sequences and takes them back.

    If the model has recurrent state, the sequences that hold blocks hold slots of `states`, too. A prefix hit then ends
    where both a block and a state are cached.

    Invariants:
        A block is in the free list <=> no sequence holds it.
        The sum of reference counts is the sum of the block tables' lengths.
        A hash is published only for a full, computed block; each hash names one block.
        A block that a sequence may still write has no other holder and no hash.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.states = StateSlots(config)
        self._num_holders = [0] * (config.num_blocks + 1)
        self._hash_of: list[bytes | None] = [None] * (config.num_blocks + 1)
        self._cached: dict[bytes, int] = {}
        self._next_checked = 1
        # In order of reuse: blocks without contents, then cached ones, least recently freed first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, config.num_blocks + 1))

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no sequence holds, cached ones included."""
        return len(self._free)

    def missing_hashes(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of the reusable full blocks of which one would make the sequence's hit longer.

        That is the first that is not cached; with recurrent state, any beyond the present hit.
        """
        hashes = self._reusable_hashes(sequence)
        if self.states.num_slots:
            return hashes[len(self._hits(sequence)) :]
        return next(([block_hash] for block_hash in hashes if block_hash not in self._cached), [])

    def shortfall(self, sequence: Sequence, num_tokens: int, without: Collection[Sequence] = ()) -> int:
        """Return the number of blocks that are missing to hold `num_tokens` of a waiting sequence.

        It is negative if blocks are left over. Blocks that only sequences in `without` hold count as free.
        """
        held = Counter(block for other in without for block in other.block_table)
        num_reclaimable = sum(1 for block, count in held.items() if count == self._num_holders[block])
        num_shared = sum(1 for block in self._hits(sequence) if self._num_holders[block] > held[block])
        return self._config.blocks_for(num_tokens) - num_shared - len(self._free) - num_reclaimable

    def allocate(self, sequence: Sequence) -> None:
        """Give a waiting sequence blocks for all its tokens, reusing cached blocks for its beginning.

        At least one token is left to compute, as the next step samples from its logits.

        Raises:
            OutOfBlocks: fewer free blocks than needed; no block was taken.
        """
        assert not sequence.block_table and sequence.num_computed_tokens == 0
        num_tokens = sequence.num_tokens
        if self.shortfall(sequence, num_tokens) > 0:
            raise OutOfBlocks
        hits = self._hits(sequence)
        if self.states.num_slots:
            self._extend_hashes(sequence)
            self.states.allocate(sequence, len(hits), len(self._cached_blocks(sequence)))
        for block in hits:
            self._free.pop(block, None)
            self._num_holders[block] += 1
            sequence.block_table.append(block)
        sequence.num_computed_tokens = len(sequence.block_table) * self._config.block_size
        self.grow(sequence, num_tokens)

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return True if `grow` would succeed."""
        return self._config.blocks_for(num_tokens) - len(sequence.block_table) <= len(self._free)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give `sequence` blocks for its first `num_tokens` tokens.

        It takes free blocks, and evicts the cached ones least recently used first.

        Raises:
            OutOfBlocks: fewer free blocks than needed; no block was taken.
        """
        if not self.can_grow(sequence, num_tokens):
            raise OutOfBlocks
        for _ in range(self._config.blocks_for(num_tokens) - len(sequence.block_table)):
            sequence.block_table.append(self._take_free_block())

    def computed(self, sequence: Sequence, num_computed_before: int) -> None:
        """Make reusable what was computed since `num_computed_before`: full blocks, and the state at their end."""
        if self._config.enable_prefix_caching:
            self._publish(sequence, num_computed_before)
        if self.states.num_slots:
            self.states.computed(sequence)

    def _publish(self, sequence: Sequence, num_computed_before: int) -> None:
        block_size = self._config.block_size
        first, last = num_computed_before // block_size, sequence.num_computed_tokens // block_size
        if first == last:
            return
        self._extend_hashes(sequence)
        for index in range(first, last):
            block, block_hash = sequence.block_table[index], sequence.block_hashes[index]
            # Another block with the same tokens may be published already. Then this block stays private.
            if block_hash not in self._cached and self._hash_of[block] is None:
                self._cached[block_hash] = block
                self._hash_of[block] = block_hash

    def hashes_completed(self, sequence: Sequence, start: int, end: int) -> list[bytes]:
        """Return the hashes of the full blocks that computing positions [start, end) makes reusable."""
        self._extend_hashes(sequence)
        if self.states.num_slots:
            boundaries = self.states.boundaries_of(sequence, start, end)
            indices = [boundary // self._config.block_size - 1 for boundary in boundaries]
            return [sequence.block_hashes[index] for index in indices if index < len(sequence.block_hashes)]
        return sequence.block_hashes[start // self._config.block_size : end // self._config.block_size]

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks and slots of `sequence`. Its last blocks are reused before its first."""
        self.states.free(sequence)
        for block in reversed(sequence.block_table):
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)
        sequence.block_table.clear()
        sequence.num_computed_tokens = sequence.num_in_flight_tokens = 0

    def check_invariants(self, sequences: list[Sequence]) -> None:
        """Assert the class's invariants; `sequences` are all sequences that hold blocks.

        Of more than 16,384 blocks each call checks the next so many: an idle engine pauses for milliseconds.
        """
        num_blocks = self._config.num_blocks
        holders: Counter[int] = Counter()
        for sequence in sequences:
            assert len(set(sequence.block_table)) == len(sequence.block_table)
            holders.update(sequence.block_table)
            num_full = sequence.num_computed_tokens // self._config.block_size
            for block in sequence.block_table[num_full:]:
                assert self._num_holders[block] == 1 and self._hash_of[block] is None, "a writable block is shared"
        assert len(self._free) == num_blocks - len(holders)
        first = self._next_checked if num_blocks > _MAX_CHECKED_BLOCKS else 1
        checked = range(first, min(num_blocks + 1, first + _MAX_CHECKED_BLOCKS))
        self._next_checked = checked.stop if checked.stop <= num_blocks else 1
        for block in checked:
            assert self._num_holders[block] == holders[block]
            assert (block in self._free) == (holders[block] == 0)
            block_hash = self._hash_of[block]
            assert block_hash is None or self._cached[block_hash] == block
        if len(checked) == num_blocks:
            assert len(self._cached) == num_blocks + 1 - self._hash_of.count(None)
        self.states.check_invariants(sequences)

    def _extend_hashes(self, sequence: Sequence) -> None:
        salt = sequence.request.cache_salt
        extend_hashes(sequence.block_hashes, sequence.token_ids, self._config.block_size, salt)

    def _reusable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of the full blocks before the sequence's last known token, if it may reuse blocks."""
        if not self._config.enable_prefix_caching or sequence.request.params.prompt_logprobs is not None:
            return []
        self._extend_hashes(sequence)
        return sequence.block_hashes[: (len(sequence.token_ids) - 1) // self._config.block_size]

    def _hits(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks that a waiting sequence begins with."""
        blocks = self._cached_blocks(sequence)
        if self.states.num_slots:
            return blocks[: self.states.num_hit_blocks(sequence.block_hashes[: len(blocks)])]
        return blocks

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        hits: list[int] = []
        for block_hash in self._reusable_hashes(sequence):
            block = self._cached.get(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def _take_free_block(self) -> int:
        block, _ = self._free.popitem(last=False)
        evicted = self._hash_of[block]
        if evicted is not None:
            del self._cached[evicted]
            self._hash_of[block] = None
        self._num_holders[block] = 1
        return block
