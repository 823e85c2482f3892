"""The number of replicas follows the work, on a fake clock: bursts, waves, noise, deadlines, and nothing at all."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from replicas.protocol import Band, ReplicaStats, TenantTokens
from router.autoscaling import (
    Autoscaler,
    AutoscalingSettings,
    ScalingDecision,
    ScalingInputs,
)
from router.flow_queue import BandLimits, FlowQueue, Waiting
from router.held_work import DESIRED_REPLICAS, MAX_REPORT_AGE_S, HeldWork, HeldWorkBoard, Work
from router.scaling_inputs import ServedRate, urgent_outstanding, work_in_queue, work_in_replicas
from tests.unit.router.fakes import request, stats, view
from tests.unit.router.simulated_time import FakeClock

SPEED = 100.0
"""Tokens a second of a replica."""
SETTINGS = AutoscalingSettings(min_replicas=1, max_replicas=10, num_replicas=1, replica_tokens_per_s=SPEED)
TICK_S = 0.2


def decide(autoscaler: Autoscaler, *work: Work, num_replicas: int = 1, num_requests: int = 1, served: float = 0.0,
           speeds: tuple[float, ...] = (SPEED,)) -> ScalingDecision:  # fmt: skip
    outstanding = sum(waiting.tokens for waiting in work if waiting.due_s <= SETTINGS.target_drain_s)
    inputs = ScalingInputs(num_replicas, num_requests, work, speeds, served, outstanding_tokens=outstanding)
    return autoscaler.decide(inputs)


@pytest.mark.parametrize(
    ("num_tokens", "needed"), [(0, 1), (200, 1), (201, 2), (1000, 5), (1001, 6), (2000, 10), (10**6, 10)]
)
def test_as_many_as_drain_what_waits_within_the_target(num_tokens, needed):
    decision = decide(Autoscaler(SETTINGS, FakeClock()), Work(num_tokens, SETTINGS.target_drain_s))
    assert decision.desired_replicas == needed
    assert decision.drain_s == num_tokens / SPEED


def test_measured_speed_counts_and_is_remembered():
    autoscaler = Autoscaler(SETTINGS, FakeClock())
    assert decide(autoscaler, Work(1000, 2.0), speeds=()).desired_replicas == 5
    assert decide(autoscaler, Work(1000, 2.0), speeds=(9999.0, 50.0)).desired_replicas == 10
    assert decide(autoscaler, Work(1000, 2.0), speeds=()).replica_tokens_per_s == 50.0


def test_work_without_replicas_has_no_drain_time():
    assert decide(Autoscaler(SETTINGS, FakeClock()), Work(10, 2.0), num_replicas=0, speeds=()).drain_s is None


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
    assert decide(Autoscaler(SETTINGS, FakeClock()), Work(tokens, due_s)).desired_replicas == needed


def test_batch_work_adds_to_what_is_due_before_it():
    work = [Work(150, 2.0), Work(100 * 900, 1000.0)]
    assert decide(Autoscaler(SETTINGS, FakeClock()), *work).desired_replicas == 1
    assert decide(Autoscaler(SETTINGS, FakeClock()), *work, Work(100 * 200, 1000.0)).desired_replicas == 2


def test_batch_work_in_the_queue_is_due_before_its_deadline():
    queue = FlowQueue({band: BandLimits(1000, 10**9) for band in Band}, 30.0)
    entries = [
        (Band.INTERACTIVE, 5, None), (Band.STANDARD, 7, 1e6), (Band.BATCH, 10, None), (Band.BATCH, 20, 2000.0),
        (Band.BATCH, 30, 1950.0), (Band.BATCH, 40, 1001.0), (Band.BATCH, 50, 900.0),
    ]  # fmt: skip
    for number, (band, tokens, deadline_s) in enumerate(entries):
        queue.add(Waiting(request(f"r{number}", band=band), tokens, deadline_s, number), now=1000.0)
    work = work_in_queue(queue, SETTINGS, now=1000.0)
    # 0.8 of 1000 s and of 950 s are both at least 512 s; what is late already is as urgent as chat.
    assert work == (Work(5 + 7 + 40 + 50, 2.0), Work(20 + 30, 512.0), Work(10, SETTINGS.batch_drain_s))


def test_only_what_waits_in_a_replica_is_work():
    busy = stats(running=(0, 4, 0), outstanding=800)
    full = stats(running=(0, 4, 0), waiting=(0, 1, 3), outstanding=800)
    assert work_in_replicas([view(of=busy)], SETTINGS) == ()
    assert work_in_replicas([view(of=full)], SETTINGS) == (Work(100, 2.0), Work(300, SETTINGS.batch_drain_s))


def served(replica_id: str, **tokens: int) -> ReplicaStats:
    account = tuple(TenantTokens(tenant, Band.STANDARD, number) for tenant, number in tokens.items())
    return replace(stats(replica_id), served_tokens=account)


def test_served_rate_is_over_all_replicas_and_forgets():
    rate = ServedRate()
    rate.observe([served("a", x=1000)], 0.0)
    assert rate.tokens_per_s(0.0) == 0.0  # served before we looked
    rate.observe([served("a", x=1100), served("b", x=5000)], 1.0)
    rate.observe([served("a", x=1100, y=50), served("b", x=5050)], 2.0)
    rate.observe([served("a", x=30, y=50), served("b", x=5050)], 3.0)  # x was forgotten, and came back
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


def test_more_at_once_and_fewer_only_after_the_delay_to_the_most_that_was_needed_meanwhile():
    clock = FakeClock()
    autoscaler = Autoscaler(SETTINGS, clock)
    assert decide(autoscaler, Work(1600, 2.0)).desired_replicas == 8
    clock.now += 27
    assert decide(autoscaler, Work(600, 2.0), num_replicas=8).desired_replicas == 8
    clock.now += 3
    assert decide(autoscaler, Work(600, 2.0), num_replicas=8, served=180.0).desired_replicas == 8
    clock.now += 30
    assert decide(autoscaler, num_replicas=8).desired_replicas == 8
    clock.now += 1
    assert decide(autoscaler, num_replicas=8).desired_replicas == 3
    clock.now += 30
    assert decide(autoscaler, num_replicas=3).desired_replicas == 1


def test_what_gathers_while_replicas_start_asks_for_no_more():
    simulation = Simulation(replace(SETTINGS, max_replicas=100), start_s=60.0)
    simulation.run(300.0, lambda now: 50.0 if now < 20 else 500.0)
    assert max(number for _, number in simulation.desired) <= 1.5 * 5 / 0.85 + 2
    assert simulation.waiting_tokens / (simulation.num_replicas * SPEED) <= SETTINGS.target_drain_s


def test_a_backlog_that_stands_keeps_the_replicas_it_asked_for():
    clock = FakeClock()
    autoscaler = Autoscaler(SETTINGS, clock)
    for _ in range(500):
        decision = decide(autoscaler, Work(1000, 2.0), served=100.0)
        clock.now += TICK_S
    assert decision.needed_replicas == decision.desired_replicas == 5


def test_what_runs_asks_for_no_replica_that_was_given_back():
    clock = FakeClock()
    autoscaler = Autoscaler(SETTINGS, clock)
    decide(autoscaler, num_replicas=2)
    clock.now += SETTINGS.downscale_delay_s + 1
    assert decide(autoscaler, num_replicas=2, served=100.0).desired_replicas == 2
    assert decide(autoscaler, num_replicas=3, served=900.0).desired_replicas == 2, "the third is about to go"


def test_replicas_that_work_are_kept_though_nothing_waits():
    clock = FakeClock()
    autoscaler = Autoscaler(SETTINGS, clock)
    for _ in range(1000):
        decision = decide(autoscaler, num_replicas=4, served=250.0)
        clock.now += TICK_S
    assert decision.desired_replicas == math.ceil(250 / 85) == 3
    assert decide(autoscaler, num_replicas=2, served=10_000.0).needed_replicas == 2, "work that runs adds none"


def filling(num_running: int, outstanding: int, served: float = 0.0) -> ScalingInputs:
    """One replica of 16 slots, at whose queue nothing waits."""
    return ScalingInputs(1, num_running, (), (SPEED,), served, num_running, 16, outstanding)


def test_slots_that_fill_faster_than_a_replica_computes_ask_for_more_before_anything_waits():
    clock = FakeClock()
    autoscaler = Autoscaler(SETTINGS, clock)
    assert autoscaler.decide(filling(1, 40, served=20.0)).desired_replicas == 1
    clock.now += 1
    assert autoscaler.decide(filling(7, 500, served=20.0)).desired_replicas == 1, "most slots are left"
    clock.now += 0.2
    # 20 tokens a second computed and 520 - 0 gathered in 3 s.
    assert autoscaler.decide(filling(8, 520, served=20.0)).desired_replicas == math.ceil((20 + 520 / 3) / 100)


def test_full_slots_that_are_kept_up_with_ask_for_nothing():
    clock = FakeClock()
    autoscaler = Autoscaler(SETTINGS, clock)
    for _ in range(50):
        decision = autoscaler.decide(filling(16, 600, served=80.0))
        clock.now += 1
    assert decision.needed_replicas == 1


def test_what_runs_counts_as_outstanding_save_batch_work():
    busy = view(by_band=(1, 3, 4), outstanding=800)
    waiting = (Work(7, SETTINGS.target_drain_s), Work(1000, SETTINGS.batch_drain_s))
    assert urgent_outstanding(waiting, [busy, view()], SETTINGS) == 7 + 400


def test_what_runs_keeps_the_slots_it_needs():
    inputs = ScalingInputs(3, 6, (), (SPEED,), served_tokens_per_s=1.0, num_running=6, num_slots=4)
    assert Autoscaler(SETTINGS, FakeClock()).decide(inputs).needed_replicas == 2
    assert Autoscaler(SETTINGS, FakeClock()).decide(replace(inputs, num_running=3)).needed_replicas == 1
    assert Autoscaler(SETTINGS, FakeClock()).decide(replace(inputs, num_running=90)).needed_replicas == 3


def test_a_new_ingress_gives_no_replica_back_early():
    clock = FakeClock()
    autoscaler = Autoscaler(SETTINGS, clock)
    assert decide(autoscaler, num_replicas=0).desired_replicas == 1
    assert decide(autoscaler, num_replicas=6).desired_replicas == 6
    clock.now += SETTINGS.downscale_delay_s
    assert decide(autoscaler, num_replicas=6).desired_replicas == 6
    clock.now += 1
    assert decide(autoscaler, num_replicas=6).desired_replicas == 1


def test_to_zero_when_idle_and_back_with_the_first_request():
    clock = FakeClock()
    autoscaler = Autoscaler(replace(SETTINGS, min_replicas=0), clock)
    clock.now += 10_000
    assert decide(autoscaler, num_replicas=0, num_requests=0).desired_replicas == 1, "none was seen yet"
    assert decide(autoscaler, num_replicas=1, num_requests=1).desired_replicas == 1
    idle_s = 0.0
    while decide(autoscaler, num_replicas=1, num_requests=0).desired_replicas:
        clock.now += TICK_S
        idle_s += TICK_S
    assert idle_s == pytest.approx(SETTINGS.scale_to_zero_delay_s, abs=1.0)
    clock.now += 10_000
    assert decide(autoscaler, num_replicas=0, num_requests=0).desired_replicas == 0
    assert decide(autoscaler, Work(1, 2.0), num_replicas=0, num_requests=1).desired_replicas == 1
    assert decide(autoscaler, Work(900, 2.0), num_replicas=0, num_requests=9).desired_replicas == 5


def test_batch_work_alone_keeps_one_replica():
    clock = FakeClock()
    autoscaler = Autoscaler(replace(SETTINGS, min_replicas=0), clock)
    for _ in range(10_000):
        decision = decide(autoscaler, Work(100, 86_400.0))
        clock.now += TICK_S
    assert decision.desired_replicas == 1


@dataclass
class Simulation:
    """A service of replicas that start slowly, under load given in tokens a second; every tick decides anew."""

    settings: AutoscalingSettings = SETTINGS
    start_s: float = 5.0
    clock: FakeClock = field(default_factory=FakeClock)
    waiting_tokens: float = 0.0
    num_replicas: int = 1
    starting_s: list[float] = field(default_factory=list)
    desired: list[tuple[float, int]] = field(default_factory=list)
    longest_drain_s: float = 0.0

    def run(self, seconds: float, load: Callable[[float], float]) -> None:
        autoscaler = Autoscaler(self.settings, self.clock)
        began_s = self.clock.now
        recent: list[float] = []
        for _ in range(round(seconds / TICK_S)):
            now = self.clock.now - began_s
            self.waiting_tokens += load(now) * TICK_S
            done = min(self.waiting_tokens, self.num_replicas * SPEED * TICK_S)
            self.waiting_tokens -= done
            recent = [*recent, done][-15:]
            decision = decide(
                autoscaler, Work(int(self.waiting_tokens), 2.0), num_replicas=self.num_replicas,
                num_requests=int(self.waiting_tokens + done), served=sum(recent) / 3.0,
            )  # fmt: skip
            self.longest_drain_s = max(self.longest_drain_s, self.waiting_tokens / SPEED / max(1, self.num_replicas))
            self.desired.append((now, decision.desired_replicas))
            self._obey(decision.desired_replicas, now)
            self.clock.now += TICK_S

    def _obey(self, desired: int, now: float) -> None:
        while self.starting_s and self.starting_s[0] <= now:
            self.starting_s.pop(0)
            self.num_replicas += 1
        self.starting_s += [now + self.start_s] * (desired - self.num_replicas - len(self.starting_s))
        del self.starting_s[max(0, desired - self.num_replicas) :]
        self.num_replicas = min(self.num_replicas, desired)

    def num_reversals(self, since_s: float, until_s: float) -> int:
        """How often replicas were given back and asked for again."""
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
def test_a_square_wave_of_twenty_minutes_gives_at_most_one_reversal_a_period(period_s, downscale_delay_s):
    simulation = Simulation(replace(SETTINGS, downscale_delay_s=downscale_delay_s))
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


def test_ingresses_hear_of_each_other_and_the_most_that_one_asks_for_is_reported():
    clock = FakeClock()
    board = HeldWorkBoard(clock)
    a, b = HeldWork("a", (Work(5, 2.0),), 1, 2), HeldWork("b", (), 0, 3)
    assert board.autoscaling_stats() == {}
    assert board.exchange(a) == ()
    assert board.exchange(b) == (a,)
    assert board.exchange(a) == (b,)
    assert board.autoscaling_stats() == {DESIRED_REPLICAS: 3.0}
    clock.now += MAX_REPORT_AGE_S
    board.exchange(a)
    clock.now += 1
    assert board.autoscaling_stats() == {DESIRED_REPLICAS: 2.0}
    assert board.exchange(None) == (a,)
