import random
from collections import Counter
from dataclasses import replace

from router.policy import LeastRequests, LeastTokens, PowerOfTwo, Random, RoundRobin
from router.types import RoutingRequest
from tests.unit.router.fakes import request, view

HASHES = [bytes([index]) for index in range(4)]


def routing(num_prompt_tokens: int = 64, hashes: list[bytes] | None = None, **changes) -> RoutingRequest:
    asked = replace(request(prompt=tuple(range(num_prompt_tokens))), **changes)
    return RoutingRequest(asked, expected_output_tokens=16, block_hashes=hashes or [])


def test_least_tokens_orders_by_outstanding_tokens():
    policy = LeastTokens(random.Random(0))
    views = [view("busy", tokens=500), view("idle"), view("queued", tokens=900)]
    assert policy.rank(routing(), views) == ["idle", "busy", "queued"]
    assert policy.rank(routing(), []) == []


def test_least_tokens_prefers_the_replica_that_holds_the_prefix():
    policy = LeastTokens(random.Random(0))
    views = [view("a", tokens=100), view("b", tokens=100)]
    for holder in ("a", "b"):
        policy = LeastTokens(random.Random(0))
        policy.placed(routing(hashes=HASHES), holder)
        assert policy.rank(routing(hashes=HASHES), views)[0] == holder


def test_least_tokens_leaves_a_holder_that_has_far_more_than_the_mean():
    policy = LeastTokens(random.Random(0))
    policy.placed(routing(hashes=HASHES), "hot")
    assert policy.rank(routing(hashes=HASHES), [view("hot", tokens=130), view("cold", tokens=70)])[0] == "cold"


def test_least_tokens_forgets_what_a_lost_replica_held():
    policy = LeastTokens(random.Random(0))
    computed = policy.placed(routing(hashes=HASHES), "a")
    assert computed == 64
    assert policy.placed(routing(hashes=HASHES), "a") < computed
    policy.forget("a")
    assert policy.placed(routing(hashes=HASHES), "a") == computed


def test_ingresses_that_know_nothing_of_each_other_send_one_affinity_key_to_one_replica():
    views = [view(name) for name in "abcd"]
    chosen = {
        key: {LeastTokens(random.Random(seed)).rank(routing(affinity_key=key), views)[0] for seed in range(5)}
        for key in (f"key-{index}" for index in range(40))
    }
    assert all(len(replicas) == 1 for replicas in chosen.values())
    assert len(set().union(*chosen.values())) == 4


def test_requests_without_a_key_spread_evenly_and_reproducibly():
    views = [view("a"), view("b"), view("c")]
    first = [LeastTokens(random.Random(7)).rank(routing(), views) for _ in range(2)]
    assert first[0] == first[1]
    policy = LeastTokens(random.Random(7))
    chosen = Counter(policy.rank(routing(), views)[0] for _ in range(3000))
    assert all(900 < count < 1100 for count in chosen.values())


def test_least_requests_counts_requests():
    policy = LeastRequests(random.Random(0))
    assert policy.rank(routing(), [view("a", requests=2), view("b", tokens=9999), view("c", requests=1)]) == [
        "b",
        "c",
        "a",
    ]


def test_power_of_two_puts_the_less_loaded_of_two_first():
    policy = PowerOfTwo(random.Random(0))
    views = [view("a", requests=5), view("b")]
    assert all(policy.rank(routing(), views) == ["b", "a"] for _ in range(20))


def test_round_robin_takes_turns():
    policy = RoundRobin()
    views = [view("b"), view("a", requests=4)]
    assert [policy.rank(routing(), views) for _ in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert policy.rank(routing(), []) == []


def test_random_ranks_every_replica_once():
    policy = Random(random.Random(0))
    rankings = {tuple(policy.rank(routing(), [view("a"), view("b")])) for _ in range(50)}
    assert rankings == {("a", "b"), ("b", "a")}
