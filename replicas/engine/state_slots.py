"""State slots: the bookkeeping of recurrent state, for models with layers that keep a state beside the KV cache.

A slot holds the state of all recurrent layers at one boundary between blocks, and the tail: what the layers keep of the
tokens since. It is to recurrent layers what a block is to attention. The state is immutable once written, as a full
block is. The tail only gains rows, as the last block does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as Items

import numpy as np

from replicas.engine.batch import SCRATCH_STATE, BatchColumns, StateColumns, StateMove
from replicas.engine.config import EngineConfig
from replicas.engine.sequence import STATE_BOUNDARY, STATE_SLOT, HeldSlot, Sequence


class StateSlots:
    """Pool of the slots 1..num_state_slots: gives them to sequences and takes them back.

    1. A step that ends in the block in which it begins adds rows to the tail of the sequence's slot. A step that
       reaches a boundary writes state and tail to another slot, and the old one returns when the step is collected. So
       a step may be computed twice, or be revoked.
    2. A slot whose state was computed is published under the hash of the block that ends at its boundary. Others that
       begin with the same tokens continue from it, and write to slots of their own.
    3. These slots stay cached when no sequence holds them: the last two boundaries before a prompt's end (a template
       may drop the end in the next turn), the end of the KV blocks that a prompt found cached, the last boundary of a
       sequence that ends or is preempted, and every slot that was a hit.

    Invariants:
        A slot is in the free list <=> no sequence holds it.
        Each hash names one slot, whose state is computed. A slot has at most one sequence that writes it.
        Apart from slots that are only to be cached, a sequence holds at most `state_slots_per_sequence`. Slots that
        are free or so held are as many as that for each sequence, so a running sequence always finds a free slot.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.num_slots = config.num_state_slots
        self._block_size = config.block_size
        self._per_sequence = config.state_slots_per_sequence
        self._is_caching = config.enable_prefix_caching
        self._num_holders = [0] * (self.num_slots + 1)
        self._hash_of: list[bytes | None] = [None] * (self.num_slots + 1)
        self._is_kept = [False] * (self.num_slots + 1)
        self._cached: dict[bytes, int] = {}
        # In order of reuse: slots without contents, then cached ones, least recently freed first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self.num_slots + 1))
        self._num_sequences = 0
        self._num_held = 0
        """Slots that sequences hold, apart from those that are only to be cached. A shared one counts once."""

    @property
    def num_free_slots(self) -> int:
        """Number of slots that no sequence holds, cached ones included."""
        return len(self._free)

    def has_room(self, without: Collection[Sequence]) -> bool:
        """Return True if one more sequence finds its slots beside the others, except those in `without`.

        If not, slots that are only to be cached are being written, and return with the step that does it.
        """
        num_released = sum(entry.is_snapshot for other in without for entry in other.state_slots)
        num_available = len(self._free) + self._num_held + num_released
        return (self._num_sequences - len(without) + 1) * self._per_sequence <= num_available or not self.num_slots

    def num_hit_blocks(self, hashes: Items[bytes]) -> int:
        """Return the length of the longest beginning of `hashes` whose last block ends at a cached state."""
        return next((length for length in range(len(hashes), 0, -1) if hashes[length - 1] in self._cached), 0)

    def allocate(self, sequence: Sequence, num_hit_blocks: int, num_cached_blocks: int) -> None:
        """Give a waiting sequence the state at the end of its first `num_hit_blocks` blocks.

        `num_cached_blocks` of its blocks were found cached.
        """
        self._num_sequences += 1
        size = self._block_size
        last = (sequence.num_prompt_tokens - 1) // size * size
        boundaries = {last, last - size, num_cached_blocks * size} if self._is_caching else set()
        sequence.kept_boundaries = sorted(boundary for boundary in boundaries if boundary > num_hit_blocks * size)
        if num_hit_blocks:
            slot = self._cached[sequence.block_hashes[num_hit_blocks - 1]]
            self._free.pop(slot, None)
            self._num_holders[slot] += 1
            self._is_kept[slot] = True
            boundary = num_hit_blocks * size
            self._hold(sequence, HeldSlot(slot, boundary, boundary, is_shared=True))

    def move(self, sequence: Sequence, start: int, end: int) -> StateMove:
        """Return the slots that a step over positions [start, end) reads and writes; take those that it needs."""
        if not self.num_slots:
            return SCRATCH_STATE
        held = sequence.state_slots
        boundary = end - end % self._block_size
        source = held[-1].slot if held else 0
        if held and not held[-1].is_shared and held[-1].boundary == boundary:
            return StateMove(source, source)
        snapshots = []
        for kept in sequence.kept_boundaries:
            if start < kept < boundary and self._can_keep(sequence, kept):
                slot = self._take(is_kept=True)
                self._hold(sequence, HeldSlot(slot, kept, end, is_snapshot=True))
                snapshots.append((kept, slot))
        target = self._take(is_kept=boundary in sequence.kept_boundaries)
        self._hold(sequence, HeldSlot(target, boundary, end))
        return StateMove(source, target, tuple(snapshots))

    def moves(self, columns: BatchColumns, numbers: np.ndarray) -> StateColumns:
        """Return the slots of all items of a step, as `move` does. `numbers` are those of the running sequences."""
        boundaries = columns.ends // self._block_size * self._block_size
        slots = numbers[STATE_SLOT].take(columns.rows)
        stays = (slots > 0) & (numbers[STATE_BOUNDARY].take(columns.rows) == boundaries)
        moved = StateColumns(slots, slots.copy(), {})
        for index in (~stays).nonzero()[0].tolist():
            start, num_tokens = columns.starts.item(index), columns.num_tokens.item(index)
            move = self.move(columns.sequences[index], start, start + num_tokens)
            moved.sources[index], moved.targets[index] = move.source, move.target
            if move.snapshots:
                moved.snapshots[index] = move.snapshots
        return moved

    def boundaries_of(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Return the boundaries at which a step over [start, end) leaves a state that others may use."""
        boundaries = [boundary for boundary in sequence.kept_boundaries if start < boundary <= end]
        last = end - end % self._block_size
        # A prompt that the step leaves unfinished may get more tokens in it.
        return [*boundaries, last] if end == sequence.num_tokens and last > start else boundaries

    def computed(self, sequence: Sequence) -> None:
        """Publish the states computed so far, and take back the slots before the last of them."""
        held = sequence.state_slots
        num_computed = sum(entry.end <= sequence.num_computed_tokens for entry in held)
        if self._is_caching:
            for entry in held[:num_computed]:
                if entry.boundary and not entry.is_shared:
                    self._publish(entry.slot, sequence.block_hashes[entry.boundary // self._block_size - 1])
        for entry in held[: max(0, num_computed - 1)]:
            self._release(entry)
        del held[: max(0, num_computed - 1)]
        self._note(sequence)

    def revoked(self, sequence: Sequence) -> None:
        """Take back the slots that revoked steps would have written."""
        held = sequence.state_slots
        while held and held[-1].end > sequence.num_scheduled_tokens:
            self._release(held.pop())
        self._note(sequence)

    def free(self, sequence: Sequence) -> None:
        """Take back all slots of `sequence`. Its last computed state stays cached."""
        if not self.num_slots:
            return
        self._num_sequences -= 1
        computed = [entry for entry in sequence.state_slots if entry.end <= sequence.num_computed_tokens]
        if computed:
            self._is_kept[computed[-1].slot] = True
        for entry in reversed(sequence.state_slots):
            self._release(entry)
        sequence.state_slots.clear()
        self._note(sequence)

    def check_invariants(self, sequences: list[Sequence]) -> None:
        """Assert the class's invariants; `sequences` are all sequences that hold slots."""
        holders, writers = [0] * len(self._num_holders), [0] * len(self._num_holders)
        slots: set[int] = set()
        for sequence in sequences:
            held = sequence.state_slots
            assert [entry.end for entry in held] == sorted(entry.end for entry in held)
            own = held[-1] if held and not held[-1].is_shared else HeldSlot(0, 0, 0)
            assert (sequence.state_slot, sequence.state_boundary) == (own.slot, own.boundary)
            assert sequence.num_awaited_states >= sum(entry.end > sequence.num_computed_tokens for entry in held)
            assert sequence.num_awaited_states or len(held) <= 1
            for entry in held:
                assert entry.boundary <= entry.end <= sequence.num_scheduled_tokens
                holders[entry.slot] += 1
                writers[entry.slot] += not entry.is_shared
            lasting = [entry.slot for entry in held if not entry.is_snapshot]
            assert len(lasting) <= self._per_sequence
            slots.update(lasting)
        assert holders == self._num_holders and max(writers) <= 1
        assert set(self._free) == {slot for slot in range(1, len(holders)) if holders[slot] == 0}
        assert {slot: slot_hash for slot_hash, slot in self._cached.items()} == {
            slot: slot_hash for slot, slot_hash in enumerate(self._hash_of) if slot_hash is not None
        }
        assert len(slots) == self._num_held
        if self.num_slots:
            assert len(sequences) == self._num_sequences
            assert self._num_sequences * self._per_sequence - len(slots) <= len(self._free)

    def _hold(self, sequence: Sequence, entry: HeldSlot) -> None:
        sequence.state_slots.append(entry)
        self._note(sequence)
        self._num_held += not entry.is_snapshot and self._num_holders[entry.slot] == 1

    def _note(self, sequence: Sequence) -> None:
        """Note in the sequence's numbers what slots it holds."""
        held = sequence.state_slots
        is_own = bool(held) and not held[-1].is_shared
        sequence.state_slot, sequence.state_boundary = (held[-1].slot, held[-1].boundary) if is_own else (0, 0)
        sequence.num_awaited_states = sum(entry.end > sequence.num_computed_tokens for entry in held)

    def _can_keep(self, sequence: Sequence, boundary: int) -> bool:
        """Return True if there is a slot for a state that is only to be cached, and its hash is not cached already."""
        num_reserved = self._num_sequences * self._per_sequence - self._num_held
        index = boundary // self._block_size - 1
        return len(self._free) > num_reserved and sequence.block_hashes[index] not in self._cached

    def _publish(self, slot: int, state_hash: bytes) -> None:
        if state_hash not in self._cached and self._hash_of[slot] is None:
            self._cached[state_hash] = slot
            self._hash_of[slot] = state_hash

    def _unpublish(self, slot: int) -> None:
        state_hash = self._hash_of[slot]
        if state_hash is not None:
            del self._cached[state_hash]
            self._hash_of[slot] = None

    def _take(self, *, is_kept: bool) -> int:
        slot, _ = self._free.popitem(last=False)
        self._unpublish(slot)
        self._num_holders[slot] = 1
        self._is_kept[slot] = is_kept
        return slot

    def _release(self, entry: HeldSlot) -> None:
        slot = entry.slot
        self._num_holders[slot] -= 1
        if self._num_holders[slot]:
            return
        self._num_held -= not entry.is_snapshot
        if not self._is_kept[slot]:
            self._unpublish(slot)
        self._free[slot] = None
        if self._hash_of[slot] is None:
            self._free.move_to_end(slot, last=False)
