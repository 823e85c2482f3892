"""Baselines of routing: blind policies, and early binding of requests to replicas."""

import asyncio
import random
from collections import Counter

import pytest

from bench.routing.baselines import BaselineFlow, EarlyBinding, LeastRequests, PowerOfTwo, Random, RoundRobin
from replicas.protocol import Band
from router.balancing.load_table import LoadTable
from router.flow.flow_control import SampleGroup
from router.timeline import Timeline
from router.types import Reason, RoutingPolicy
from serve_app.config import HeadwayConfig
from testkit.router.plain_decisions import ListedCandidates
from testkit.router.simulated_replicas import FakeObserver, request, routing, stats, view
from testkit.router.simulated_time import FakeClock
from tests.unit.router.balancing.test_policy import PROMPT, with_prefix


def test_least_requests_counts_requests_and_not_their_length():
    policy = LeastRequests(random.Random(0))
    views = [view("long", by_band=(0, 1, 0), outstanding=4000), view("short", by_band=(1, 1, 1), outstanding=30)]
    assert policy.rank(routing(), ListedCandidates(views)).replica_ids == ["long", "short"]


def test_power_of_two_puts_the_emptier_of_two_first():
    policy = PowerOfTwo(random.Random(0))
    views = [view("busy", by_band=(0, 9, 0)), view("a"), view("b")]
    rankings = [policy.rank(routing(), ListedCandidates(views)).replica_ids for _ in range(300)]
    assert {tuple(sorted(ranking)) for ranking in rankings} == {("a", "b", "busy")}
    firsts = Counter(ranking[0] for ranking in rankings)
    assert firsts["busy"] == 0, "whichever other is drawn with it has fewer"
    assert min(firsts["a"], firsts["b"]) > 100
    assert policy.rank(routing(), ListedCandidates([view("only")])).replica_ids == ["only"]


def test_round_robin_takes_turns():
    policy = RoundRobin()
    views = [view("b"), view("a", outstanding=4)]
    assert [policy.rank(routing(), ListedCandidates(views)).replica_ids for _ in range(3)] == [
        ["a", "b"],
        ["b", "a"],
        ["a", "b"],
    ]


def test_random_ranks_every_replica_once():
    policy = Random(random.Random(0))
    rankings = {tuple(policy.rank(routing(), ListedCandidates([view("a"), view("b")])).replica_ids) for _ in range(50)}
    assert rankings == {("a", "b"), ("b", "a")}


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (LeastRequests(random.Random(0)), Reason.LEAST_LOADED),
        (PowerOfTwo(random.Random(0)), Reason.LEAST_LOADED),
        (RoundRobin(), Reason.ROUND_ROBIN),
        (Random(random.Random(0)), Reason.RANDOM),
    ],
)
def test_a_baseline_ignores_prefixes_and_gives_its_only_reason(policy: RoutingPolicy, reason: Reason):
    assert [policy.placed(with_prefix(), "a") for _ in range(2)] == [len(PROMPT)] * 2
    policy.forget("a")
    assert policy.rank(routing(), ListedCandidates([view(name, outstanding=1000) for name in "abcd"])).reason is reason


def test_early_binding_gives_a_full_replica_more_of_each_band():
    slots, full = EarlyBinding(3), view(by_band=(0, 4, 0), of=stats(slots=4, free_blocks=0))
    assert [slots.num_assignable(full, band, set(), False) for band in Band] == [7, 3, 3]
    assert slots.num_assignable(view(of=stats(slots=4, is_draining=True)), Band.STANDARD, set(), False) == 0
    assert slots.max_tokens(full, Band.STANDARD, set()) == float("inf")
    assert slots.has_free_slot(full, Band.STANDARD)


async def test_early_binding_queues_only_when_all_lines_are_full():
    table = LoadTable(FakeClock())
    flow = BaselineFlow("least_requests", 3)(HeadwayConfig().routing_settings(), table, FakeObserver())
    table.record(stats("a", slots=1, free_blocks=1))
    table.record(stats("b", slots=1, free_blocks=1))
    asked = [request(f"r-{number}", prompt=tuple(range(40))) for number in range(9)]
    numbers = [flow.admit(each, None) for each in asked]
    waiting = [
        asyncio.create_task(flow.acquire(each, number, None, SampleGroup(), Timeline(table.now())))
        for each, number in zip(asked, numbers, strict=True)
    ]
    done, left = await asyncio.wait(waiting, timeout=0.05)
    assert (len(done), len(left)) == (8, 1), "one runs and three wait in each"
    assert {view.stats.replica_id: view.num_in_flight for view in table.views()} == {"a": 4, "b": 4}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
