"""The index of the blocks that each replica was given."""

import random
import time

import pytest

from router.balancing.policy import PrefixIndex


def chain(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex()


def test_only_leading_blocks_without_a_gap_count(index: PrefixIndex):
    index.add("a", chain("1", "2", "3"))
    index.add("b", chain("1"))
    index.add("c", chain("2", "3"))
    assert index.num_blocks_held(chain("1", "2", "3", "4")) == {"a": 3, "b": 1}
    assert index.num_blocks_held(chain("2", "3")) == {"a": 2, "c": 2}


def test_a_block_that_fell_out_ends_the_prefix(index: PrefixIndex):
    index.add("a", chain("1", "3"))
    assert index.num_blocks_held(chain("1", "2", "3")) == {"a": 1}


@pytest.mark.parametrize("max_blocks", [1, 10, 100])
def test_the_index_evicts_its_least_recently_used_blocks(max_blocks: int):
    index = PrefixIndex(max_blocks)
    for number in range(500):
        index.add(f"replica-{number % 3}", chain(f"{number}-1", f"{number}-2"))
        assert len(index) <= max_blocks
    assert index.num_blocks_held(chain("0-1")) == {}
    assert index.num_blocks_held(chain("499-1"))


def test_of_a_long_prefix_the_ends_are_forgotten_first():
    index = PrefixIndex(max_blocks=3)
    index.add("a", chain("1", "2", "3", "4", "5"))
    assert index.num_blocks_held(chain("1", "2", "3", "4", "5")) == {"a": 3}


def test_the_index_holds_no_more_than_the_replicas():
    index = PrefixIndex(max_blocks=10)
    for number in range(10):
        index.add("a", chain(str(number)))
    index.resize(4)
    assert len(index) == 4 and index.num_blocks_held(chain("6")) == {"a": 1}
    index.resize(1000)
    for number in range(20):
        index.add("a", chain(str(number)))
    assert len(index) == 10


def test_a_prefix_in_use_is_kept():
    index = PrefixIndex(max_blocks=4)
    for number in range(50):
        index.add("a", chain("system", "prompt"))
        index.add("b", chain(f"other-{number}"))
    assert index.num_blocks_held(chain("system", "prompt")) == {"a": 2}


def test_forgetting_a_replica_leaves_the_others_unchanged(index: PrefixIndex):
    index.add("a", chain("1", "2"))
    index.add("b", chain("1"))
    index.forget("a")
    assert index.num_blocks_held(chain("1", "2")) == {"b": 1}
    assert len(index) == 1
    index.forget("b")
    assert len(index) == 0
    index.forget("never seen")


def test_forgetting_a_replica_again_costs_nothing():
    index = PrefixIndex(max_blocks=50_000)
    index.add("others", [number.to_bytes(4) for number in range(50_000)])
    started_s = time.perf_counter()
    for _ in range(1000):
        index.forget("dead")
    assert time.perf_counter() - started_s < 0.5


@pytest.mark.parametrize("seed", range(10))
def test_the_index_stays_consistent_in_random_histories(seed: int):
    rng = random.Random(seed)
    index = PrefixIndex(max_blocks=20)
    for _ in range(300):
        replica_id = rng.choice("abc")
        if rng.random() < 0.1:
            index.forget(replica_id)
        elif rng.random() < 0.1:
            index.resize(rng.randrange(40))
        else:
            index.add(replica_id, chain(*(str(rng.randrange(30)) for _ in range(rng.randrange(6)))))
        index.check_invariants()
