"""The number of replicas follows the work, on a fake clock: bursts, waves, noise, deadlines, and nothing at all."""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from replicas.protocol import Band, ReplicaStats, TenantTokens
from router.flow.flow_queue import BandLimits, FlowQueue, QueuedRequest
from router.scaling.autoscaling import (
    Autoscaler,
    AutoscalingSettings,
    DownscaleDelay,
    ReplicaBounds,
    ScalingDecision,
    ScalingInputs,
)
from router.scaling.autoscaling_loop import ServedRate, work_in_queue, work_in_replicas
from router.scaling.ingress_reports import PendingWork
from router.scaling.replica_sums import ReplicaParts, ReplicaSums
from router.types import ReplicaView
from testkit.router.simulated_replicas import request, stats, view
from testkit.router.simulated_time import FakeClock

SPEED = 100.0
"""Tokens a second of a replica."""
SETTINGS = AutoscalingSettings(replica_tokens_per_s=SPEED)
BOUNDS = ReplicaBounds(min_replicas=1, max_replicas=10, num_replicas=1)
TICK_S = 0.2


@dataclass
class Scaler:
    """Autoscaler on a fake clock."""

    settings: AutoscalingSettings = SETTINGS
    bounds: ReplicaBounds = BOUNDS
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.autoscaler = Autoscaler(self.settings, self.bounds, self.clock)

    def decide(
        self, *work: PendingWork, after_s: float = 0.0, num_replicas: int = 1, num_requests: int = 1,
        served: float = 0.0, speeds: tuple[float, ...] = (SPEED,),
    ) -> ScalingDecision:  # fmt: skip
        """Decide once more, `after_s` after the last time."""
        self.clock.now += after_s
        outstanding = sum(waiting.tokens for waiting in work if waiting.due_s <= SETTINGS.target_drain_s)
        inputs = ScalingInputs(num_replicas, num_requests, work, speeds, served, outstanding_tokens=outstanding)
        return self.autoscaler.decide(inputs)

    def desired(self, *work: PendingWork, **inputs: Any) -> int:
        return self.decide(*work, **inputs).desired_replicas

    def decide_often(self, count: int, *work: PendingWork, **inputs: Any) -> ScalingDecision:
        """Decide so many times, a tick apart; return the last decision."""
        return [self.decide(*work, after_s=TICK_S, **inputs) for _ in range(count)][-1]


@pytest.fixture
def scaler() -> Scaler:
    return Scaler()


@pytest.mark.parametrize(
    ("num_tokens", "needed"), [(0, 1), (200, 1), (201, 2), (1000, 5), (1001, 6), (2000, 10), (10**6, 10)]
)
def test_replicas_drain_the_waiting_work_within_the_target(num_tokens, needed):
    decision = Scaler().decide(PendingWork(num_tokens, SETTINGS.target_drain_s))
    assert (decision.desired_replicas, decision.drain_s) == (needed, num_tokens / SPEED)


def test_measured_speed_counts_and_is_remembered():
    scaler, work = Scaler(), PendingWork(1000, 2.0)
    assert scaler.desired(work, speeds=()) == 5
    assert scaler.desired(work, speeds=(9999.0, 50.0)) == 10
    assert scaler.decide(work, speeds=()).replica_tokens_per_s == 50.0


def test_work_without_replicas_has_no_drain_time():
    assert Scaler().decide(PendingWork(10, 2.0), num_replicas=0, speeds=()).drain_s is None


@pytest.mark.parametrize(
    ("tokens", "due_s", "needed"),
    [
        (1_000_000, 86_400.0, 1),  # 11.6 tokens a second
        (100 * 3600, 3600.0, 1),  # exactly one replica's work
        (250 * 3600, 3600.0, 3),
        (1000, 2.0, 5),  # as urgent as chat
    ],
)
def test_batch_work_counts_as_far_as_its_deadline_needs(tokens, due_s, needed):
    assert Scaler().desired(PendingWork(tokens, due_s)) == needed


def test_batch_work_adds_to_the_work_that_is_due_before_it():
    work = [PendingWork(150, 2.0), PendingWork(100 * 900, 1000.0)]
    assert Scaler().desired(*work) == 1
    assert Scaler().desired(*work, PendingWork(100 * 200, 1000.0)) == 2


def test_batch_work_in_the_queue_is_due_before_its_deadline():
    queue = FlowQueue({band: BandLimits(1000, 10**9) for band in Band}, 30.0)
    entries = [
        (Band.INTERACTIVE, 5, None), (Band.STANDARD, 7, 1e6), (Band.BATCH, 10, None), (Band.BATCH, 20, 2000.0),
        (Band.BATCH, 30, 1950.0), (Band.BATCH, 40, 1001.0), (Band.BATCH, 50, 900.0),
    ]  # fmt: skip
    for number, (band, tokens, deadline_s) in enumerate(entries):
        queue.add(QueuedRequest(request(f"r{number}", band=band), tokens, deadline_s, number), now=1000.0)
    work = work_in_queue(queue, SETTINGS, now=1000.0)
    # 0.8 of 1000 s and of 950 s are both at least 512 s; what is late already is as urgent as chat.
    assert work == (
        PendingWork(5 + 7 + 40 + 50, 2.0),
        PendingWork(20 + 30, 512.0),
        PendingWork(10, SETTINGS.batch_drain_s),
    )


@pytest.mark.parametrize("deadline_s", [1e12, 1e300, 1.5e308])
def test_a_deadline_may_be_any_number(deadline_s: float):
    queue = FlowQueue({band: BandLimits(1000, 10**9) for band in Band}, 30.0)
    queue.add(QueuedRequest(request("r", band=Band.BATCH), 10, deadline_s, 0), now=1000.0)
    assert [work.tokens for work in work_in_queue(queue, SETTINGS, now=1000.0)] == [10]


def test_only_what_waits_in_a_replica_is_work():
    busy = stats(running=(0, 4, 0), outstanding=800)
    full = stats(running=(0, 4, 0), waiting=(0, 1, 3), outstanding=800)
    assert work_in_replicas(parts_of(view(of=busy)), SETTINGS) == ()
    assert work_in_replicas(parts_of(view(of=full)), SETTINGS) == (
        PendingWork(100, 2.0),
        PendingWork(300, SETTINGS.batch_drain_s),
    )


def parts_of(*loads: ReplicaView) -> ReplicaParts:
    sums = ReplicaSums()
    for load in loads:
        sums.update(load.stats.replica_id, load)
    return sums.parts


def served(replica_id: str, **tokens: int) -> ReplicaStats:
    account = tuple(TenantTokens(tenant, Band.STANDARD, number) for tenant, number in tokens.items())
    return replace(stats(replica_id), served_tokens=account)


def test_served_rate_is_over_all_replicas_and_forgets():
    rate = ServedRate()
    rate.observe([served("a", x=1000)], 0.0)
    assert rate.tokens_per_s(0.0) == 0.0  # served before the first observation
    rate.observe([served("a", x=1100), served("b", x=5000)], 1.0)
    rate.observe([served("a", x=1100, y=50), served("b", x=5050)], 2.0)
    rate.observe([served("a", y=50, x=30), served("b", x=5050)], 3.0)  # x was forgotten, and came back
    assert rate.tokens_per_s(3.0) == (100 + 50 + 50 + 30) / 3.0
    rate.observe(quiet := [served("a", x=30, y=50), served("b", x=5050)], 4.0)
    rate.observe(quiet, 9.0)  # the same answers, looked at again
    assert rate.tokens_per_s(4.0) == (100 + 50 + 50 + 30) / 4.0
    assert rate.tokens_per_s(12.5) == (100 + 50 + 50 + 30) / 4.0, "while polls fail, the last ones count"
    assert rate.tokens_per_s(20.0) == 0.0
    rate.observe([*quiet], 21.0)
    assert rate.tokens_per_s(21.0) == 0.0


def test_served_batch_work_keeps_no_replica():
    rate = ServedRate()
    for second in range(5):
        account = (TenantTokens("t", Band.BATCH, 1000 * second), TenantTokens("t", Band.STANDARD, 10 * second))
        rate.observe([replace(stats("a"), served_tokens=account)], float(second))
    assert rate.tokens_per_s(4.0) == 10.0


def test_served_rate_rises_at_once():
    rate = ServedRate()
    for second in range(20):
        rate.observe([served("a", x=10 * second if second < 17 else 160 + 100 * (second - 16))], float(second))
    assert rate.tokens_per_s(19.0) == 100.0


def test_upscaling_is_immediate_and_downscaling_is_delayed():
    scaler, some = Scaler(), PendingWork(600, 2.0)
    assert scaler.desired(PendingWork(1600, 2.0)) == 8
    assert scaler.desired(some, after_s=27, num_replicas=8) == 8
    assert scaler.desired(some, after_s=3, num_replicas=8, served=180.0) == 8
    assert scaler.desired(after_s=30, num_replicas=8) == 8
    assert scaler.desired(after_s=1, num_replicas=8) == 3
    assert scaler.desired(after_s=30, num_replicas=3) == 1


def test_work_that_gathers_while_replicas_start_asks_for_no_more():
    simulation = Simulation(bounds=replace(BOUNDS, max_replicas=100), start_s=60.0)
    simulation.run(300.0, lambda now: 50.0 if now < 20 else 500.0)
    assert max(number for _, number in simulation.desired) <= 1.5 * 5 / 0.85 + 2
    assert simulation.waiting_tokens / (simulation.num_replicas * SPEED) <= SETTINGS.target_drain_s


def test_a_backlog_that_stands_keeps_the_replicas_it_asked_for():
    decision = Scaler().decide_often(500, PendingWork(1000, 2.0), served=100.0)
    assert decision.needed_replicas == decision.desired_replicas == 5


def test_running_work_asks_for_no_replica_that_was_given_back(scaler: Scaler):
    scaler.decide(num_replicas=2)
    assert scaler.desired(after_s=SETTINGS.downscale_delay_s.to_fewer_s + 1, num_replicas=2, served=100.0) == 2
    assert scaler.desired(num_replicas=3, served=900.0) == 2, "the third is about to go"


def test_replicas_that_work_are_kept_though_nothing_waits(scaler: Scaler):
    assert scaler.decide_often(1000, num_replicas=4, served=250.0).desired_replicas == math.ceil(250 / 85) == 3
    assert scaler.decide(num_replicas=2, served=10_000.0).needed_replicas == 2, "work that runs adds none"


def filling(num_running: int, outstanding: int, served: float = 0.0) -> ScalingInputs:
    """One replica of 16 slots, at whose queue nothing waits."""
    return ScalingInputs(1, num_running, (), (SPEED,), served, num_running, 16, outstanding)


def test_fast_filling_slots_scale_up_before_a_queue_forms(scaler: Scaler):
    assert scaler.autoscaler.decide(filling(1, 40, served=20.0)).desired_replicas == 1
    scaler.clock.now += 1
    assert scaler.autoscaler.decide(filling(7, 500, served=20.0)).desired_replicas == 1, "most slots are left"
    scaler.clock.now += 0.2
    # 20 tokens a second computed and 520 - 0 gathered in 3 s.
    desired = scaler.autoscaler.decide(filling(8, 520, served=20.0)).desired_replicas
    assert desired == math.ceil((20 + 520 / 3) / 100)


def test_full_slots_without_growing_work_do_not_scale_up(scaler: Scaler):
    for _ in range(50):
        decision = scaler.autoscaler.decide(filling(16, 600, served=80.0))
        scaler.clock.now += 1
    assert decision.needed_replicas == 1


def test_running_work_but_batch_work_counts_as_outstanding():
    assert parts_of(view("busy", by_band=(1, 3, 4), outstanding=800), view("idle")).urgent_tokens == 400


@pytest.mark.parametrize("seed", range(10))
def test_sums_of_replicas_that_come_change_and_go_are_those_of_all(seed: int):
    rng = random.Random(seed)
    sums, loads = ReplicaSums(), {}
    for _ in range(200):
        replica_id = rng.choice("abcde")
        counts = [rng.randrange(4) for _ in range(6)]
        report = stats(
            running=counts[:3], waiting=counts[3:], slots=rng.choice([4, 8]), outstanding=rng.randrange(900),
            rate=rng.choice([0.0, 50.0, 70.0]), is_draining=rng.random() < 0.2,
        )  # fmt: skip
        loads[replica_id] = view(replica_id, by_band=counts[:3], outstanding=rng.randrange(900), of=report)
        if rng.random() < 0.2:
            del loads[replica_id]
        sums.update(replica_id, loads.get(replica_id))
        serving = [load for load in loads.values() if not load.stats.is_draining]
        assert sums.parts == parts_of(*loads.values())
        assert sums.parts.num_serving == len(serving)
        assert sums.parts.num_requests == sum(sum(load.num_by_band) for load in serving)
        assert sums.num_slots() == min((load.stats.num_slots for load in serving), default=1)
        speeds = [load.stats.saturated_tokens_per_s for load in serving]
        assert sorted(sums.saturated_tokens_per_s()) == sorted(speed for speed in speeds if speed)


@pytest.mark.parametrize("seed", range(10))
def test_batch_work_by_deadline_is_that_of_each_request(seed: int):
    rng, now = random.Random(seed), 1000.0
    queue = FlowQueue({band: BandLimits(1000, 10**9) for band in Band}, 30.0)
    expected: Counter[float] = Counter()
    for number in range(rng.randrange(60)):
        deadline_s = rng.choice([None, now + rng.uniform(-10, 10), now + rng.uniform(0, 1e6)])
        waiting = QueuedRequest(request(f"r{number}", band=Band.BATCH), rng.randrange(1, 99), deadline_s, number)
        queue.add(waiting, now)
        if rng.random() < 0.3:
            queue.remove(waiting)
            continue
        due_s = SETTINGS.batch_drain_s
        if deadline_s is not None:
            due_s = max(SETTINGS.target_drain_s, 0.8 * (deadline_s - now))
            due_s = max(SETTINGS.target_drain_s, 2.0 ** math.floor(math.log2(due_s)))
        expected[due_s] += waiting.expected_tokens
    work = work_in_queue(queue, SETTINGS, now)
    assert work == tuple(PendingWork(tokens, due_s) for due_s, tokens in sorted(expected.items()))


@pytest.mark.parametrize(("num_running", "needed"), [(3, 1), (6, 2), (90, 3)])
def test_running_work_keeps_the_slots_it_needs(num_running, needed):
    inputs = ScalingInputs(3, 6, (), (SPEED,), served_tokens_per_s=1.0, num_running=num_running, num_slots=4)
    assert Scaler().autoscaler.decide(inputs).needed_replicas == needed


def test_a_new_ingress_gives_no_replica_back_early(scaler: Scaler):
    assert scaler.desired(num_replicas=0) == 1
    assert scaler.desired(num_replicas=6) == 6
    assert scaler.desired(after_s=SETTINGS.downscale_delay_s.to_fewer_s, num_replicas=6) == 6
    assert scaler.desired(after_s=1, num_replicas=6) == 1


def test_zero_replicas_when_idle_and_one_on_the_first_request():
    scaler = Scaler(bounds=replace(BOUNDS, min_replicas=0))
    assert scaler.desired(after_s=10_000, num_replicas=0, num_requests=0) == 1, "none was seen yet"
    assert scaler.desired() == 1
    idle_since_s = scaler.clock.now
    while scaler.desired(num_requests=0):
        scaler.clock.now += TICK_S
    assert scaler.clock.now - idle_since_s == pytest.approx(SETTINGS.downscale_delay_s.to_zero_s, abs=1.0)
    assert scaler.desired(after_s=10_000, num_replicas=0, num_requests=0) == 0
    assert scaler.desired(PendingWork(1, 2.0), num_replicas=0) == 1
    assert scaler.desired(PendingWork(900, 2.0), num_replicas=0, num_requests=9) == 5


def test_batch_work_alone_keeps_one_replica():
    scaler = Scaler(bounds=replace(BOUNDS, min_replicas=0))
    assert scaler.decide_often(10_000, PendingWork(100, 86_400.0)).desired_replicas == 1


@dataclass
class Simulation:
    """A service of replicas that start slowly, under load given in tokens a second; every tick decides anew."""

    settings: AutoscalingSettings = SETTINGS
    bounds: ReplicaBounds = BOUNDS
    start_s: float = 5.0
    clock: FakeClock = field(default_factory=FakeClock)
    waiting_tokens: float = 0.0
    num_replicas: int = 1
    starting_s: list[float] = field(default_factory=list)
    desired: list[tuple[float, int]] = field(default_factory=list)
    longest_drain_s: float = 0.0

    def run(self, seconds: float, load: Callable[[float], float]) -> None:
        scaler = Scaler(self.settings, self.bounds, self.clock)
        began_s = self.clock.now
        recent: list[float] = []
        for _ in range(round(seconds / TICK_S)):
            now = self.clock.now - began_s
            self.waiting_tokens += load(now) * TICK_S
            done = min(self.waiting_tokens, self.num_replicas * SPEED * TICK_S)
            self.waiting_tokens -= done
            recent = [*recent, done][-15:]
            desired = scaler.desired(
                PendingWork(int(self.waiting_tokens), 2.0), num_replicas=self.num_replicas,
                num_requests=int(self.waiting_tokens + done), served=sum(recent) / 3.0,
            )  # fmt: skip
            self.longest_drain_s = max(self.longest_drain_s, self.waiting_tokens / SPEED / max(1, self.num_replicas))
            self.desired.append((now, desired))
            self._scale_to(desired, now)
            self.clock.now += TICK_S

    def _scale_to(self, desired: int, now: float) -> None:
        while self.starting_s and self.starting_s[0] <= now:
            self.starting_s.pop(0)
            self.num_replicas += 1
        self.starting_s += [now + self.start_s] * (desired - self.num_replicas - len(self.starting_s))
        del self.starting_s[max(0, desired - self.num_replicas) :]
        self.num_replicas = min(self.num_replicas, desired)

    def num_reversals(self, since_s: float, until_s: float) -> int:
        """Number of times that replicas were given back and asked for again."""
        steps = [
            after[1] - before[1]
            for before, after in pairwise(self.desired)
            if since_s <= after[0] < until_s and after[1] != before[1]
        ]
        return sum(before < 0 < after for before, after in pairwise(steps))

    def desired_at(self, now: float) -> int:
        return next(desired for at, desired in reversed(self.desired) if at <= now)


def test_a_burst_is_answered_within_two_seconds():
    simulation = Simulation()
    simulation.run(60.0, lambda now: 50.0 if now < 20 else 500.0)
    assert simulation.desired_at(19.9) == 1
    assert simulation.desired_at(22.0) >= 2
    assert simulation.desired_at(30.0) >= 5
    assert simulation.waiting_tokens / (simulation.num_replicas * SPEED) <= SETTINGS.target_drain_s


@pytest.mark.parametrize("period_s", [10.0, 60.0, 120.0, 240.0])
@pytest.mark.parametrize("downscale_delay_s", [10.0, 60.0])
def test_a_square_wave_reverses_scaling_once_a_period(period_s, downscale_delay_s):
    simulation = Simulation(replace(SETTINGS, downscale_delay_s=DownscaleDelay(downscale_delay_s)))
    simulation.run(1200.0, lambda now: 600.0 if now % period_s < period_s / 2 else 50.0)
    for start_s in range(0, 1200, int(period_s)):
        assert simulation.num_reversals(start_s, start_s + period_s) <= 1
    assert simulation.num_reversals(0, 1200) <= 1200 / period_s
    if period_s < downscale_delay_s:
        assert simulation.num_reversals(0, 1200) == 0
    if period_s / 2 > downscale_delay_s:
        assert simulation.desired_at(period_s * 0.99) < simulation.desired_at(period_s * 0.49)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("load", [50.0, 230.0, 420.0])
def test_noise_does_not_make_the_number_swing(seed, load):
    rng = random.Random(seed)
    simulation = Simulation()
    # Requests of 5 to 25 tokens that come at random.
    simulation.run(
        1200.0, lambda now: sum(rng.randint(5, 25) for _ in range(poisson(rng, load / 15 * TICK_S))) / TICK_S
    )
    assert simulation.num_reversals(300.0, 1200.0) <= 3
    steady = [number for at, number in simulation.desired if at > 300]
    assert max(steady) - min(steady) <= 2
    assert min(steady) >= load / SPEED


def poisson(rng: random.Random, mean: float) -> int:
    number, product = 0, rng.random()
    while product > math.exp(-mean):
        number += 1
        product *= rng.random()
    return number
