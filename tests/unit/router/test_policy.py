import random
from collections import Counter

from router.policy import LeastOutstanding, Random, RoundRobin
from tests.unit.router.fakes import request, view


def test_least_outstanding_orders_by_work_per_slot():
    policy = LeastOutstanding(random.Random(0))
    views = [
        view("busy", running=2),
        view("big", running=3, slots=16),
        view("idle"),
        view("queued", running=4, waiting=9),
    ]
    assert policy.rank(request(), views) == ["idle", "big", "busy", "queued"]


def test_least_outstanding_counts_what_was_sent_since_the_last_report():
    policy = LeastOutstanding(random.Random(0))
    assert policy.rank(request(), [view("a", in_flight=3), view("b", running=1)]) == ["b", "a"]


def test_least_outstanding_puts_draining_replicas_last():
    policy = LeastOutstanding(random.Random(0))
    assert policy.rank(request(), [view("draining", is_draining=True), view("full", running=4)]) == ["full", "draining"]


def test_least_outstanding_breaks_ties_evenly_and_reproducibly():
    views = [view("a"), view("b"), view("c")]
    first = [LeastOutstanding(random.Random(7)).rank(request(), views) for _ in range(2)]
    assert first[0] == first[1]
    policy = LeastOutstanding(random.Random(7))
    chosen = Counter(policy.rank(request(), views)[0] for _ in range(3000))
    assert all(900 < count < 1100 for count in chosen.values())


def test_round_robin_takes_turns():
    policy = RoundRobin()
    views = [view("b"), view("a", running=4)]
    assert [policy.rank(request(), views) for _ in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert policy.rank(request(), []) == []


def test_random_ranks_every_replica_once():
    policy = Random(random.Random(0))
    rankings = {tuple(policy.rank(request(), [view("a"), view("b")])) for _ in range(50)}
    assert rankings == {("a", "b"), ("b", "a")}
