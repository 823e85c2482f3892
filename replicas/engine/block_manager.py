"""Block manager: the bookkeeping of the paged KV cache.

Blocks are reference-counted, so that sequences with a common beginning share them. A free block keeps its contents
until it is needed, so a later sequence that starts with the same tokens can reuse it (prefix caching; block size, chain
hashes and LRU eviction as in vLLM's automatic prefix caching).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain, zip_longest

import numpy as np

from replicas.engine.config import EngineConfig
from replicas.engine.sequence import Sequence
from replicas.engine.state_slots import StateSlots
from replicas.shared_rules.block_hash import extend_hashes

Tables = tuple[list[int], ...]
"""Block tables of one sequence."""
_MAX_CHECKED_BLOCKS = 16_384
"""Most blocks that one check of the invariants visits."""


class OutOfBlocks(Exception):
    """Failure of an allocation that needs more blocks than are free; no block was taken."""


class BlockManager:
    """Manager of the blocks 1..num_blocks: gives them to sequences and takes them back.

    If the model has recurrent state, the sequences that hold blocks hold slots of `states`, too. A prefix hit then ends
    where both a block and a state are cached.

    Layers are in groups of equal bytes, so that a block may hold the tokens of any group, and a sequence has a block
    table for each group. A group with a window

    1. gets blocks for the tokens that the next step may compute, while other groups get them for all known tokens;
    2. gives a block back once tokens are computed of which the next does not see it. Steps in flight begin there or
       later, so they do not read it, and the block may be written again. It stays cached like any other;
    3. needs for a prefix hit of p tokens only the blocks that token p sees.

    Invariants:
        A block is in the free list <=> no sequence holds it.
        The sum of reference counts is the sum of the block tables' lengths.
        A hash is published only for a full, computed block; each hash names one block of each group.
        A table has blocks from the one that the first uncomputed token sees on, and zeros before it.
        A block that a sequence may still write has no other holder and no hash.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._rule = config.sequence_blocks
        self._windows = config.windows
        self._has_windows = any(config.windows)
        # Ends of the keys under which the blocks of each table are cached.
        self._suffixes = [number.to_bytes(1) if number else b"" for number in range(len(config.windows))]
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

        That is the first beyond the present hit; with recurrent state, any of those.
        """
        hashes, num_hits = self._reusable_hashes(sequence), self._num_hits(sequence)
        return hashes[num_hits:] if self.states.num_slots else hashes[num_hits : num_hits + 1]

    def shortfall(self, sequence: Sequence, num_tokens: int, without: Collection[Sequence] = ()) -> int:
        """Return the number of blocks that are missing to hold `num_tokens` of a waiting sequence.

        It is negative if blocks are left over. Blocks that only sequences in `without` hold count as free.
        """
        held = Counter(block for other in without for block in chain(*_tables(other)) if block)
        num_reclaimable = sum(1 for block, count in held.items() if count == self._num_holders[block])
        num_shared = sum(1 for block in chain(*self._hits(sequence)) if self._num_holders[block] > held[block])
        return self._rule.num_blocks(num_tokens) - num_shared - len(self._free) - num_reclaimable

    def growth(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the most blocks that a running sequence still takes until it has `num_tokens` tokens."""
        return max(0, self._rule.num_blocks(num_tokens) - sequence.num_blocks)

    def next_growth(self, sequences: Collection[Sequence]) -> int:
        """Return the blocks that running sequences take for their known tokens, and for one more each."""
        num_blocks = len(sequences) * self._rule.num_tables
        if self._has_windows:
            num_blocks += sum(self.growth(other, other.num_tokens) for other in sequences if other.is_prefilling)
        return num_blocks

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
            self.states.allocate(sequence, len(hits[0]), self._num_cached_blocks(self._reusable_hashes(sequence)))
        sequence.block_table, *sequence.more_tables = hits
        for block in filter(None, chain(*hits)):
            self._free.pop(block, None)
            self._num_holders[block] += 1
        sequence.num_blocks = sum(len(table) - table.count(0) for table in hits)
        sequence.num_computed_tokens = len(sequence.block_table) * self._config.block_size
        self.grow(sequence, num_tokens)

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return True if `grow` would succeed."""
        missing = (max(0, end - len(table)) for table, end in self._ends(sequence, num_tokens))
        return sum(missing) <= len(self._free)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give `sequence` blocks for its first `num_tokens` tokens; with a window, for those of the next step alone.

        It takes free blocks, and evicts the cached ones least recently used first.

        Raises:
            OutOfBlocks: fewer free blocks than needed; no block was taken.
        """
        if not self.can_grow(sequence, num_tokens):
            raise OutOfBlocks
        for table, end in self._ends(sequence, num_tokens):
            num_missing = max(0, end - len(table))
            table.extend(self._take_free_block() for _ in range(num_missing))
            sequence.num_blocks += num_missing
        sequence.num_table_blocks, sequence.newest_block = len(sequence.block_table), sequence.block_table[-1]

    def computed(self, sequence: Sequence, num_computed_before: int) -> None:
        """Make reusable what was computed since `num_computed_before`: full blocks, and the state at their end.

        Blocks that later tokens do not see are given back.
        """
        if self._config.enable_prefix_caching:
            self._publish(sequence, num_computed_before)
        if self.states.num_slots:
            self.states.computed(sequence)
        if self._has_windows:
            self._give_back_unseen(sequence, num_computed_before)

    def changes_at(self, num_computed: np.ndarray) -> np.ndarray:
        """Return for decodes that have just reached `num_computed` tokens whether `computed` changes a block."""
        size = self._config.block_size
        changes = num_computed % size == 0 if self._config.enable_prefix_caching else np.zeros(len(num_computed), bool)
        for window in self._windows:
            if window is not None:
                changes = changes | ((num_computed + 1 - window) % size == 0)
        return changes

    def _publish(self, sequence: Sequence, num_computed_before: int) -> None:
        block_size = self._config.block_size
        first, last = num_computed_before // block_size, sequence.num_computed_tokens // block_size
        if first == last:
            return
        self._extend_hashes(sequence)
        tables = _tables(sequence)
        for index in range(first, last):
            for table, suffix in zip(tables, self._suffixes, strict=True):
                block, key = table[index], sequence.block_hashes[index] + suffix
                # Another block with the same tokens may be published already. Then this block stays private.
                if key not in self._cached and self._hash_of[block] is None:
                    self._cached[key] = block
                    self._hash_of[block] = key

    def _give_back_unseen(self, sequence: Sequence, num_computed_before: int) -> None:
        for table, window in zip(_tables(sequence), self._windows, strict=True):
            first = self._first_seen(window, sequence.num_computed_tokens)
            for index in range(self._first_seen(window, num_computed_before), first):
                self._release(table[index])
                table[index] = 0
                sequence.num_blocks -= 1

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
        rows = zip_longest(*map(reversed, _tables(sequence)), fillvalue=0)
        for block in filter(None, chain.from_iterable(rows)):
            self._release(block)
        sequence.block_table.clear()
        sequence.more_tables.clear()
        sequence.num_blocks = sequence.num_table_blocks = sequence.newest_block = 0
        sequence.num_computed_tokens = sequence.num_in_flight_tokens = 0

    def check_invariants(self, sequences: list[Sequence]) -> None:
        """Assert the class's invariants; `sequences` are all sequences that hold blocks.

        Of more than 16,384 blocks each call checks the next so many: an idle engine pauses for milliseconds.
        """
        num_blocks = self._config.num_blocks
        holders: Counter[int] = Counter()
        for sequence in sequences:
            num_full = sequence.num_computed_tokens // self._config.block_size
            num_blocks_held = 0
            for number, (table, window) in enumerate(zip(_tables(sequence), self._windows, strict=True)):
                assert len(sequence.block_table) <= len(table)
                first = self._first_seen(window, sequence.num_computed_tokens)
                assert window is None or len(table) - first <= self._rule.most_window_blocks[number]
                assert not any(table[:first]) and all(table[first:])
                num_blocks_held += len(table) - first
                holders.update(table[first:])
                for block in table[num_full:]:
                    assert self._num_holders[block] == 1 and self._hash_of[block] is None, "a writable block is shared"
            assert len(set(chain(*_tables(sequence))) - {0}) == num_blocks_held == sequence.num_blocks
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
        if not self._config.enable_prefix_caching or sequence.request.params.needs_whole_prompt:
            return []
        self._extend_hashes(sequence)
        return sequence.block_hashes[: (len(sequence.token_ids) - 1) // self._config.block_size]

    def _hits(self, sequence: Sequence) -> Tables:
        """Return tables of the cached blocks that a waiting sequence begins with."""
        num_hits = self._num_hits(sequence)
        hashes, num_tokens = sequence.block_hashes[:num_hits], num_hits * self._config.block_size
        tables = []
        for window, suffix in zip(self._windows, self._suffixes, strict=True):
            first = self._first_seen(window, num_tokens)
            tables.append([*[0] * first, *map(self._cached.__getitem__, _keys(hashes[first:], suffix))])
        return tuple(tables)

    def _num_hits(self, sequence: Sequence) -> int:
        """Return the most blocks from the beginning for which each group has what the next token sees, and a state."""
        hashes = self._reusable_hashes(sequence)
        num_hits = self._num_cached_blocks(hashes)
        while self.states.num_slots:
            num_states = self.states.num_hit_blocks(hashes[:num_hits])
            if num_states == num_hits:
                break
            num_hits = self._num_cached_blocks(hashes[:num_states])
        return num_hits

    def _num_cached_blocks(self, hashes: list[bytes]) -> int:
        """Return the most blocks from the beginning for which each group has what the next token sees."""
        num_cached = len(hashes)
        for window, suffix in zip(self._windows, self._suffixes, strict=True):
            if window is None:
                for index, key in enumerate(_keys(hashes[:num_cached], suffix)):
                    if key not in self._cached:
                        num_cached = index
                        break
        while self._has_windows and (missing := self._last_missing(hashes, num_cached)) is not None:
            num_cached = missing
        return num_cached

    def _last_missing(self, hashes: list[bytes], num_blocks: int) -> int | None:
        """Return the index of the last block that a windowed group lacks and the token after `num_blocks` blocks sees.

        No hit that ends behind this block can be complete. None: no block is missing.
        """
        for window, suffix in zip(self._windows, self._suffixes, strict=True):
            if window is not None:
                first = self._first_seen(window, num_blocks * self._config.block_size)
                for index in range(num_blocks - 1, first - 1, -1):
                    if hashes[index] + suffix not in self._cached:
                        return index
        return None

    def _first_seen(self, window: int | None, num_tokens: int) -> int:
        """Return the index of the first block that the token at position `num_tokens` sees."""
        return 0 if window is None else max(0, num_tokens + 1 - window) // self._config.block_size

    def _ends(self, sequence: Sequence, num_tokens: int) -> Iterator[tuple[list[int], int]]:
        """Yield each table with the number of entries that it needs."""
        size = self._config.block_size
        num_soon = sequence.num_scheduled_tokens + self._config.max_num_batched_tokens
        for table, window in zip(_tables(sequence), self._windows, strict=True):
            yield table, -(-(num_tokens if window is None else min(num_tokens, num_soon)) // size)

    def _release(self, block: int) -> None:
        self._num_holders[block] -= 1
        if self._num_holders[block] == 0:
            self._free[block] = None
            if self._hash_of[block] is None:
                self._free.move_to_end(block, last=False)

    def _take_free_block(self) -> int:
        block, _ = self._free.popitem(last=False)
        evicted = self._hash_of[block]
        if evicted is not None:
            del self._cached[evicted]
            self._hash_of[block] = None
        self._num_holders[block] = 1
        return block


def _keys(hashes: list[bytes], suffix: bytes) -> list[bytes]:
    return [block_hash + suffix for block_hash in hashes] if suffix else hashes


def _tables(sequence: Sequence) -> Tables:
    return (sequence.block_table, *sequence.more_tables)
