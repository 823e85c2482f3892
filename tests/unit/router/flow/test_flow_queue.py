"""The order in which waiting requests are dispatched."""

import heapq
import random
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain, islice
from typing import Any

import pytest

import router.flow.flow_queue as module
from replicas.errors import Overloaded
from replicas.protocol import Band
from router.flow.flow_queue import BandLimits, FlowQueue, QueuedRequest
from testkit.router.plain_queue import PlainQueue
from testkit.router.simulated_replicas import request
from tests.seeds import Seeds

NOW = 50.0


def in_order(queue: FlowQueue, starved: Collection[Band] = ()) -> Iterator[QueuedRequest]:
    """Yield the first request of each tenant of all bands, in the order of their dispatch."""
    return chain.from_iterable(queue.in_order(band) for band in queue.bands_in_order(starved))


class Line:
    """Queue, with shorthands for adding and dispatching requests."""

    def __init__(self, max_requests: int = 10**6, max_tokens: int = 10**9, promote_after_s: float = 30.0) -> None:
        self.queue = FlowQueue({band: BandLimits(max_requests, max_tokens) for band in Band}, promote_after_s)
        self.num_added = 0

    def add(
        self, band: Band = Band.STANDARD, tenant: str = "t", tokens: int = 100, deadline_s: float | None = None,
        now: float = NOW,
    ) -> QueuedRequest:  # fmt: skip
        self.num_added += 1
        name = f"{tenant}{self.num_added}"
        waiting = QueuedRequest(request(name, band=band, tenant=tenant), tokens, deadline_s, self.num_added)
        self.queue.add(waiting, now)
        return waiting

    def add_many(self, count: int, *tenants: str, **fields: Any) -> None:
        """Add so many requests of each tenant, in turn."""
        for tenant in tenants * count:
            self.add(tenant=tenant, **fields)

    def dispatch_next(self, now: float = NOW) -> QueuedRequest:
        waiting = next(in_order(self.queue, self.starved(now)))
        self.queue.dispatch(waiting)
        self.queue.served(waiting.request.band, now)
        return waiting

    def starved(self, now: float) -> set[Band]:
        return {band for band in Band if self.queue.is_starved(band, now)}

    def dispatch_all(self) -> list[QueuedRequest]:
        return [self.dispatch_next() for _ in range(len(self.queue))]

    def dispatched(self, count: int) -> str:
        """Dispatch so many requests; return their tenants' names, of one letter each."""
        return "".join(self.dispatch_next().request.tenant for _ in range(count))


@pytest.fixture
def line() -> Line:
    return Line()


def test_a_more_urgent_band_is_first_whenever_it_came(line: Line):
    added = [line.add(Band.BATCH), line.add(Band.STANDARD), line.add(Band.INTERACTIVE), line.add(Band.BATCH)]
    assert line.dispatch_all() == [added[2], added[1], added[0], added[3]]
    assert len(line.queue) == 0


def test_a_tenants_order_is_deadline_then_arrival(line: Line):
    added = [line.add(), line.add(deadline_s=90.0), line.add(), line.add(deadline_s=60.0), line.add(deadline_s=90.0)]
    assert line.dispatch_all() == [added[3], added[1], added[4], added[0], added[2]]


def test_a_deadline_does_not_outrank_another_tenants_turn(line: Line):
    line.add(tenant="a", tokens=10)
    line.add(tenant="b", deadline_s=NOW + 1)
    line.queue.charge(Band.STANDARD, "b", 1000)
    assert line.dispatched(2) == "ab"


def test_tenants_take_turns_by_tokens_and_not_by_requests(line: Line):
    line.add_many(8, "a", tokens=100)
    line.add_many(2, "b", tokens=400)
    assert Counter(line.dispatched(5)) == {"a": 4, "b": 1}


def test_a_correction_moves_the_turn(line: Line):
    line.add_many(3, "a", "b")
    assert line.dispatched(2) == "ab"
    line.queue.charge(Band.STANDARD, "a", 150)
    assert line.dispatched(4) == "bbaa"


@pytest.mark.parametrize("seed", range(5))
def test_ten_to_one_offered_load_gives_equal_served_tokens(seed: int):
    """Both offer more than half of what eight slots can do; lengths are far from what is expected of them."""
    rng = random.Random(seed)
    line, now = Line(), 0.0
    next_arrival = {"heavy": 0.0, "light": 0.0}
    gap_s = {"heavy": 0.05, "light": 0.5}
    served: Counter[str] = Counter()
    running: list[tuple[float, int, QueuedRequest, int]] = []
    while now <= 500:
        now = min(*next_arrival.values(), running[0][0] if running else float("inf"))
        for tenant in [tenant for tenant, when in next_arrival.items() if when <= now]:
            line.add(tenant=tenant, tokens=300, now=now)
            next_arrival[tenant] = now + rng.expovariate(1 / gap_s[tenant])
        while running and running[0][0] <= now:
            _, _, waiting, cost = heapq.heappop(running)
            line.queue.charge(Band.STANDARD, waiting.request.tenant, cost - waiting.expected_tokens)
            served[waiting.request.tenant] += cost
        while len(running) < 8 and len(line.queue):
            waiting = line.dispatch_next(now)
            cost = max(1, int(rng.lognormvariate(5, 1.2)))
            heapq.heappush(running, (now + cost / 100, waiting.arrival_index, waiting, cost))
    assert line.queue.largest(Band.STANDARD, 100).keys() == {"heavy", "light"}, "both are held back"
    assert 0.9 <= served["heavy"] / served["light"] <= 1.1


def test_idle_time_earns_no_credit(line: Line):
    line.add_many(100, "a")
    line.dispatched(50)
    line.add_many(50, "b")
    assert line.dispatched(40).count("a") == pytest.approx(20, abs=1)


def test_service_without_competition_costs_a_tenant_nothing(line: Line):
    for _ in range(100):
        line.add(tenant="a")
        line.dispatch_next()
    line.add_many(20, "b")
    line.add_many(20, "a")
    assert line.dispatched(20).count("a") == pytest.approx(10, abs=1)


def test_a_tenant_that_pauses_comes_back_at_its_turn(line: Line):
    line.add_many(30, "a", "b")
    line.dispatch_all()
    line.add_many(30, "b")
    line.dispatched(10)
    line.add_many(20, "a")
    assert line.dispatched(20).count("a") == pytest.approx(10, abs=1)


def test_more_tenants_than_are_remembered_all_get_their_turn(line: Line):
    num_tenants = module._MAX_IDLE_TENANTS + 50
    added = {line.add(tenant=f"tenant-{number}") for number in range(num_tenants)}
    assert set(in_order(line.queue)) == added
    for waiting in added:
        line.queue.dispatch(waiting)
    for number in range(num_tenants):
        line.queue.charge(Band.STANDARD, f"other-{number}", 1)
    assert len(line.queue._bands[Band.STANDARD]._idle) <= module._MAX_IDLE_TENANTS


def test_the_counter_of_the_tenant_used_longest_ago_is_forgotten(line: Line, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MAX_IDLE_TENANTS", 2)
    for tenant in ("a", "b", "a", "c"):
        line.queue.charge(Band.STANDARD, tenant, 5)
    assert list(line.queue._bands[Band.STANDARD]._idle) == ["a", "c"]


def test_one_dispatch_restarts_the_clock_of_a_starved_band():
    line = Line(promote_after_s=30.0)
    line.add_many(1000, "t", band=Band.BATCH, now=0.0)
    promoted_at = []
    for tick in range(2000):
        now = tick / 10
        line.add(Band.INTERACTIVE, now=now)
        starved = line.starved(now)
        waiting = line.dispatch_next(now)
        assert starved == ({Band.BATCH} if waiting.request.band is Band.BATCH else set())
        if starved:
            promoted_at.append(now)
    assert promoted_at == [30.0, 60.0, 90.0, 120.0, 150.0, 180.0]


def test_a_bands_clock_starts_when_it_begins_to_wait():
    line = Line(promote_after_s=30.0)
    line.add(Band.BATCH, now=100.0)
    line.add(Band.STANDARD, now=100.0)
    assert line.queue.starved_s(Band.BATCH, 112.0) == 12.0
    assert line.queue.starved_s(Band.INTERACTIVE, 112.0) == 0.0
    assert line.dispatch_next(129.0).request.band is Band.STANDARD
    line.add(Band.STANDARD, now=129.0)
    assert line.dispatch_next(130.0).request.band is Band.BATCH


def test_of_two_starved_bands_the_more_urgent_is_first(line: Line):
    for band, now in ((Band.BATCH, 0.0), (Band.STANDARD, 0.0), (Band.INTERACTIVE, 40.0)):
        line.add(band, now=now)
    bands = [waiting.request.band for waiting in in_order(line.queue, line.starved(40.0))]
    assert bands == [Band.STANDARD, Band.BATCH, Band.INTERACTIVE]


def test_a_full_band_refuses_naming_limit_and_value():
    line = Line(max_requests=3, max_tokens=1000)
    for _ in range(3):
        line.queue.check_room(Band.STANDARD, "t", 100)
        line.add(tokens=100)
    with pytest.raises(Overloaded, match="3 standard requests wait; the limit is 3") as refusal:
        line.queue.check_room(Band.STANDARD, "t", 1)
    assert refusal.value.reason == "max_num_queued_reqs" and refusal.value.retryable
    line.queue.check_room(Band.INTERACTIVE, "t", 100)


def test_tokens_that_wait_are_limited_but_one_request_always_may():
    line = Line(max_tokens=1000)
    line.queue.check_room(Band.BATCH, "t", 5000)
    line.add(Band.BATCH, tokens=700)
    line.queue.check_room(Band.BATCH, "t", 300)
    with pytest.raises(Overloaded, match=r"700 tokens of batch requests wait.* 301; the limit is 1000") as refusal:
        line.queue.check_room(Band.BATCH, "t", 301)
    assert refusal.value.reason == "max_num_queued_tokens"


def tokens_before(line: Line, tenant: str) -> int:
    """Return the tokens dispatched before a new request of `tenant`, by dispatching until it goes out."""
    added, num_tokens = line.add(tenant=tenant), 0
    while (first := line.dispatch_next()) is not added:
        num_tokens += first.expected_tokens
    return num_tokens


@pytest.mark.sampled(40)
@pytest.mark.parametrize("seed", range(200))
def test_predicted_tokens_before_a_request_are_those_dispatched(seed: int):
    """The prediction takes the last request of each other tenant for as long as its first."""
    rng = random.Random(seed)
    line = Line()
    longest: Counter[str] = Counter()
    for _ in range(rng.randrange(60)):
        tenant, tokens = rng.choice("aaaaabbc"), rng.randrange(1, 500)
        line.add(tenant=tenant, tokens=tokens)
        longest[tenant] = max(longest[tenant], tokens)
        if rng.random() < 0.3:
            line.queue.dispatch(next(in_order(line.queue)))
        line.queue.charge(Band.STANDARD, rng.choice("abcd"), rng.randrange(-100, 400))
    tenant = rng.choice("abcd")
    predicted = line.queue.num_tokens_before(Band.STANDARD, tenant)
    assert predicted <= line.queue.num_tokens(Band.STANDARD)
    others = sum(tokens for other, tokens in longest.items() if other != tenant)
    assert predicted == pytest.approx(tokens_before(line, tenant), abs=others)


def test_equal_requests_are_predicted_exactly(line: Line):
    line.add_many(20, "a", "b")
    line.dispatched(6)
    line.add_many(3, "c")
    assert line.queue.num_tokens_before(Band.STANDARD, "c") == tokens_before(line, "c") == 3 * 300 + 200


def test_a_returned_request_keeps_its_position():
    line = Line(max_requests=3)
    first, second, third = line.add(), line.add(), line.add()
    assert line.dispatch_next() is first
    line.queue.charge(Band.STANDARD, "t", -first.expected_tokens)
    line.add()
    line.queue.add(first, NOW)
    assert line.dispatch_all()[:3] == [first, second, third]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(20))
def test_counts_are_the_sums_over_what_waits_in_random_histories(seed: int):
    rng = random.Random(seed)
    line = Line(promote_after_s=5.0)
    waiting: list[QueuedRequest] = []
    now = 0.0
    for _ in range(400):
        now += rng.random()
        match rng.randrange(4):
            case 0 | 1:
                deadline_s = rng.choice([None, now + rng.random() * 9])
                tenant = rng.choice("abc")
                waiting.append(line.add(rng.choice(list(Band)), tenant, rng.randrange(1, 500), deadline_s, now))
            case 2 if waiting:
                line.queue.remove(waiting.pop(rng.randrange(len(waiting))))
            case 3 if waiting:
                waiting.remove(line.dispatch_next(now))
        line.queue.charge(rng.choice(list(Band)), rng.choice("abcd"), rng.randrange(-50, 50))
        assert len(line.queue) == len(waiting)
        heads = list(in_order(line.queue, line.starved(now)))
        for band in Band:
            mine = [entry for entry in waiting if entry.request.band is band]
            assert line.queue.num_requests(band) == len(mine)
            assert line.queue.num_tokens(band) == sum(entry.expected_tokens for entry in mine)
            by_tenant = Counter(entry.request.tenant for entry in mine)
            assert line.queue.largest(band, 100) == dict(by_tenant)
            firsts = [min((e for e in mine if e.request.tenant == t), key=lambda e: e.order) for t in by_tenant]
            assert {entry.arrival_index for entry in heads if entry.request.band is band} == {
                e.arrival_index for e in firsts
            }


class ComparedQueues:
    """The queue of one band beside the reference, in a random history."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.line, self.plain = Line(), PlainQueue(module._MAX_IDLE_TENANTS)
        self.names = [f"tenant-{number}" for number in range(self.rng.choice([2, 5, 40]))]
        self.waiting: list[QueuedRequest] = []

    def change(self) -> None:
        rng, queue = self.rng, self.line.queue
        match rng.randrange(6):
            case 0 | 1:
                deadline_s = rng.choice([None, None, NOW + rng.randrange(9)])
                tenant, tokens = rng.choice(self.names), rng.randrange(1, 99)
                self.waiting.append(self.line.add(tenant=tenant, tokens=tokens, deadline_s=deadline_s))
                self.plain.add(self.waiting[-1])
            case 2 if self.waiting:
                removed = self.waiting.pop(rng.randrange(len(self.waiting)))
                queue.remove(removed)
                self.plain.remove(removed)
            case 3 if self.waiting:
                first = next(in_order(queue))
                self.waiting.remove(first)
                queue.dispatch(first)
                self.plain.remove(first)
                self.plain.charge(first.request.tenant, first.expected_tokens)
            case _:  # a poll
                names = rng.sample(self.names, rng.randrange(len(self.names)))
                charges = {name: rng.choice([-7, 1, 40, 300]) for name in names}
                queue.charge_all({(name, Band.STANDARD): tokens for name, tokens in charges.items()})
                for name, tokens in charges.items():
                    self.plain.charge(name, tokens)

    def compare(self) -> None:
        self.line.queue.check_invariants()
        heads = self.plain.heads()
        num_read = self.rng.choice([0, 1, len(heads)])
        assert list(islice(in_order(self.line.queue), num_read)) == heads[:num_read]
        name = self.rng.choice(self.names)
        assert self.line.queue.num_tokens_before(Band.STANDARD, name) == self.plain.num_tokens_before(name)


@pytest.mark.random_worlds(300, per_call=100)
def test_the_order_is_that_of_the_reference(seeds: Seeds, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MAX_IDLE_TENANTS", 3)
    for seed in seeds:
        queues = ComparedQueues(seed)
        for _ in range(60):
            queues.change()
            queues.compare()
