"""The check of a large cache's blocks is bounded, and goes round all of them."""

import math

import pytest

from replicas.engine.block_manager import BlockManager
from replicas.engine.config import EngineConfig
from replicas.engine.sequence import Sequence
from replicas.protocol import GenerateRequest, SamplingParams

NUM_BLOCKS, MOST = 235_000, 16_384


def manager_of(num_blocks: int) -> BlockManager:
    return BlockManager(EngineConfig(num_blocks=num_blocks, max_model_len=160, block_size=16, vocab_size=100))


def running_sequence(blocks: BlockManager) -> Sequence:
    sequence = Sequence(GenerateRequest("one", tuple(range(40)), SamplingParams(max_tokens=2)), 0.0, None, 0)
    blocks.allocate(sequence)
    sequence.num_computed_tokens = 33
    blocks.computed(sequence, 0)
    return sequence


class Counting(list[int]):
    """List that counts the items that are read."""

    num_reads = 0

    def __getitem__(self, index):
        self.num_reads += 1
        return super().__getitem__(index)


def check_often(blocks: BlockManager, sequence: Sequence, num_calls: int) -> None:
    for _ in range(num_calls):
        blocks.check_invariants([sequence])


def test_a_check_of_a_large_cache_visits_some_blocks_and_in_turn_all() -> None:
    blocks = manager_of(NUM_BLOCKS)
    sequence = running_sequence(blocks)
    counting = blocks._num_holders = Counting(blocks._num_holders)
    num_calls = math.ceil(NUM_BLOCKS / MOST)
    for _ in range(num_calls):
        counting.num_reads = 0
        blocks.check_invariants([sequence])
        assert 0 < counting.num_reads <= MOST + len(sequence.block_table)
    for broken in (1, 2, 20_000, NUM_BLOCKS):
        counting[broken] += 1
        with pytest.raises(AssertionError):
            check_often(blocks, sequence, num_calls + 1)
        counting[broken] -= 1
        blocks._next_checked = 1
    blocks.free(sequence)
    for _ in range(num_calls):
        blocks.check_invariants([])


@pytest.mark.parametrize("num_blocks", [64, NUM_BLOCKS])
def test_a_lost_block_is_found_at_once(num_blocks: int) -> None:
    blocks = manager_of(num_blocks)
    sequence = running_sequence(blocks)
    blocks.check_invariants([sequence])
    block, _ = blocks._free.popitem()
    with pytest.raises(AssertionError):
        blocks.check_invariants([sequence])
    blocks._free[block] = None
    blocks.check_invariants([sequence])


def test_a_small_cache_is_checked_as_a_whole() -> None:
    blocks = manager_of(64)
    sequence = running_sequence(blocks)
    blocks._cached[b"of no block"] = 60
    with pytest.raises(AssertionError):
        blocks.check_invariants([sequence])
    del blocks._cached[b"of no block"]
    blocks.check_invariants([sequence])
    blocks._hash_of[60] = b"of no block"
    with pytest.raises((AssertionError, KeyError)):
        blocks.check_invariants([sequence])
