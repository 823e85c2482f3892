"""Timelines of requests: where the time went, through the real dispatcher, in simulated time."""

import asyncio
import random

import pytest

from replicas.errors import ReplicaLost
from replicas.protocol import Band, FinishReason, GenerateRequest, PhaseSeconds, TokenDelta, Usage
from router.timeline import QUEUED, Part, Timeline, Work
from router.types import Reason
from testkit.router.dispatch_worlds import MakeWorld, Outcome, World, read
from testkit.router.simulated_replicas import FakeReplica, request
from tests.seeds import Seeds

TOLERANCE_S = 0.002


async def run(world: World, wanted: GenerateRequest) -> Outcome:
    """Read one request to its end, with its timeline."""
    timeline = Timeline(world.clock.now)
    outcome = await read(world.stream(wanted, timeline), timeline)
    timeline.ended(world.clock.now)
    return outcome


def parts(outcome: Outcome) -> dict[Part, float]:
    """Return the parts that took time, rounded, after checking that they add up to the whole."""
    timeline = outcome.timeline
    assert timeline is not None and timeline.ended_s is not None
    timeline.check_invariants()
    seconds = timeline.seconds(timeline.ended_s)
    assert sum(seconds.values()) == pytest.approx(timeline.ended_s - timeline.started_s, abs=TOLERANCE_S)
    return {part: round(value, 3) for part, value in seconds.items() if value > 1e-9}


async def test_prefill_decode_and_delivery_are_told_apart(make_world: MakeWorld) -> None:
    world = make_world(FakeReplica("a", step_s=0.1, carry_s=0.03))
    wanted = request(max_tokens=4)
    outcome = await run(world, wanted)
    num_tokens = len(outcome.token_ids)
    # While a delta is carried the fake replica does not compute, so the way of later deltas counts as decoding.
    assert parts(outcome) == {
        Part.PREFILL: 0.1,
        Part.DELIVERED: 0.03,
        Part.DECODE: pytest.approx((num_tokens - 1) * 0.13, abs=0.001),
    }
    timeline = outcome.timeline
    assert timeline is not None
    assert [(placed.replica_id, placed.reason) for placed in timeline.placements] == [("a", Reason.SINGLE_CANDIDATE)]
    assert timeline.num_output_tokens == num_tokens


async def test_a_request_behind_its_own_tenant_waits_for_capacity(make_world: MakeWorld) -> None:
    world = make_world(FakeReplica("a", num_slots=1), is_polled=True)
    first, second = await asyncio.gather(*(run(world, request(name, max_tokens=5)) for name in "xy"))
    waits = [{part: s for part, s in parts(each).items() if part in QUEUED} for each in (first, second)]
    assert waits[0] == {}
    assert waits[1].keys() == {Part.QUEUED_CAPACITY} and waits[1][Part.QUEUED_CAPACITY] > 0.1


async def test_a_more_urgent_band_is_named(make_world: MakeWorld) -> None:
    world = make_world(FakeReplica("a", num_slots=1), is_polled=True)
    urgent = [asyncio.create_task(run(world, request(f"u{n}", max_tokens=6, band=Band.INTERACTIVE))) for n in range(3)]
    await asyncio.sleep(0.01)
    late = await run(world, request("late", max_tokens=2, band=Band.STANDARD))
    await asyncio.gather(*urgent)
    assert parts(late)[Part.QUEUED_HIGHER_BAND] > 0.3


async def test_another_tenants_turn_is_fairness(make_world: MakeWorld) -> None:
    world = make_world(FakeReplica("a", num_slots=1), is_polled=True)
    busy = [asyncio.create_task(run(world, request(f"x{n}", max_tokens=6, tenant="x"))) for n in range(4)]
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(run(world, request(f"y{n}", max_tokens=6, tenant="y"))) for n in range(4)]
    outcomes = await asyncio.gather(*busy, *others)
    waits = [parts(outcome).get(Part.QUEUED_FAIRNESS, 0.0) for outcome in outcomes]
    assert max(waits[:4]) > 0.1 and max(waits[4:]) > 0.1, "the two tenants take turns"


async def test_the_wait_for_a_first_replica_is_a_cold_start(make_world: MakeWorld) -> None:
    world = make_world(is_polled=True)
    running = asyncio.create_task(run(world, request(max_tokens=2)))
    await asyncio.sleep(3.0)
    world.replicas = (world.client.add(FakeReplica("late")),)
    found = parts(await running)
    assert 2.9 < found[Part.QUEUED_COLD_START] < 4.1
    assert found.keys() <= {Part.QUEUED_COLD_START, Part.PREFILL, Part.DECODE}


async def test_preemption_and_what_follows_it(make_world: MakeWorld) -> None:
    world = make_world(FakeReplica("a", preempts_after=2, preempted_s=5.0))
    outcome = await run(world, request(prompt=(5, 6, 7), max_tokens=8, seed=3))
    assert len(outcome.token_ids) > 2
    found = parts(outcome)
    assert found[Part.PREEMPTED] == 5.0
    assert found[Part.PREFILL] == pytest.approx(0.2), "the first token, and the first one after the preemption"
    assert outcome.timeline is not None and outcome.timeline.num_preemptions == 1


async def test_a_lost_replica_is_migration(make_world: MakeWorld) -> None:
    lost, other = FakeReplica("a", step_s=0.1), FakeReplica("b", step_s=0.1)
    world = make_world(lost, other, is_polled=True)
    wanted = request(max_tokens=12, seed=5)
    running = asyncio.create_task(run(world, wanted))
    await asyncio.sleep(0.35)
    [first] = [replica for replica in (lost, other) if replica.running]
    first.die(ReplicaLost("killed"))
    del world.client.replicas[first.replica_id]
    outcome = await running
    outcome.check(wanted)
    timeline = outcome.timeline
    assert timeline is not None
    assert len({placed.replica_id for placed in timeline.placements}) == 2
    assert timeline.num_migrations == 1
    assert parts(outcome)[Part.MIGRATED] == pytest.approx(0.2), "until the death was seen, and the tokens again"


async def test_a_request_that_never_ran_has_only_waited(make_world: MakeWorld) -> None:
    world = make_world(FakeReplica("a", num_slots=1), is_polled=True)
    running = asyncio.create_task(run(world, request("long", max_tokens=40, ignore_eos=True)))
    await asyncio.sleep(0.01)
    late = await run(world, request("late", deadline_unix_s=world.clock.unix() + 0.5))
    assert late.error is not None
    assert parts(late) == {Part.QUEUED_CAPACITY: 0.5}
    running.cancel()
    await asyncio.wait([running])


def delta(start: int, phases: PhaseSeconds | None = None, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta("r", start, (1,), "a", Usage(3, start + 1, 0), finish_reason=finish, phases=phases)


def test_phases_longer_than_the_time_here_are_scaled_down() -> None:
    timeline = Timeline(0.0)
    timeline.arrived(1.0)
    timeline.placed(2.0, "a", Reason.LEAST_LOADED)
    timeline.progressed(3.0, delta(0, PhaseSeconds(waiting_s=1.0, prefill_s=3.0)), "a")
    timeline.ended(3.0)
    timeline.check_invariants()
    assert timeline.seconds(3.0)[Part.QUEUED_REPLICA] == pytest.approx(0.25)
    assert timeline.seconds(3.0)[Part.PREFILL] == pytest.approx(0.75)


def worked(start: int, computed: int, again: int = 0, device_s: float = 0.0) -> TokenDelta:
    return TokenDelta("r", start, (1,), "a", Usage(10, start + 1, 0, computed, again, device_s))


def test_work_is_summed_over_replicas_and_what_another_one_repeats_is_told() -> None:
    timeline = Timeline(0.0)
    assert timeline.work() == Work()
    timeline.arrived(0.0)
    timeline.placed(0.0, "a", Reason.LEAST_LOADED)
    for start in range(3):
        timeline.progressed(1.0, worked(start, 10 + start, device_s=1.0 + start), "a")
    assert timeline.work() == Work(12, 0, 3.0)
    timeline.migrated(2.0)
    timeline.placed(3.0, "b", Reason.LEAST_LOADED)
    assert timeline.work() == Work(12, 0, 3.0)
    # The other replica finds 4 of the 13 known tokens in its cache.
    timeline.progressed(4.0, worked(3, 9, device_s=0.5), "b")
    timeline.progressed(5.0, worked(4, 10, device_s=0.75), "b")
    assert timeline.work() == Work(22, 9, 3.75)


def test_work_that_a_preemption_repeats_is_told() -> None:
    timeline = Timeline(0.0)
    timeline.arrived(0.0)
    timeline.placed(0.0, "a", Reason.LEAST_LOADED)
    timeline.progressed(1.0, worked(0, 10), "a")
    timeline.progressed(2.0, worked(1, 21, again=10), "a")
    assert timeline.work() == Work(21, 10, 0.0)


def test_a_fork_shares_the_past_alone() -> None:
    timeline = Timeline(0.0)
    timeline.received(1.0)
    forks = [timeline.fork(), timeline.fork()]
    forks[0].arrived(3.0)
    assert forks[0].seconds(3.0)[Part.TOKENIZING] == 2.0
    assert forks[1].seconds(2.0)[Part.TOKENIZING] == 1.0
    assert forks[0].seconds(3.0)[Part.RECEIVED] == forks[1].seconds(3.0)[Part.RECEIVED] == 1.0
    assert timeline.part() is Part.TOKENIZING


class _Histories:
    """Requests and replicas at random, of which some die, refuse, preempt or carry slowly."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num_replicas = 0
        self.world = World()
        self.replicas: list[FakeReplica] = []
        for _ in range(self.rng.randrange(4)):
            self.add_replica()

    def add_replica(self) -> None:
        rng = self.rng
        self.num_replicas += 1
        replica = FakeReplica(
            f"replica-{self.num_replicas}", num_slots=rng.randrange(1, 4), max_waiting=rng.choice([1, 64]),
            tokens_per_delta=rng.randrange(1, 4), step_s=rng.choice([0.02, 0.1]), carry_s=rng.choice([0.0, 0.01]),
            preempts_after=rng.choice([None, 0, 1, 3]), preempted_s=rng.random(),
        )  # fmt: skip
        self.replicas.append(self.world.client.add(replica))

    async def run(self) -> list[Timeline]:
        background = [asyncio.create_task(self.world.dispatcher.run()), asyncio.create_task(self._disturb())]
        timelines = await asyncio.gather(*(self._client(number) for number in range(self.rng.randrange(5, 20))))
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        self.world.replicas = tuple(self.replicas)
        self.world.check_idle()
        return timelines

    async def _client(self, number: int) -> Timeline:
        rng, clock = self.rng, self.world.clock
        await asyncio.sleep(rng.random() * 2)
        timeline = Timeline(clock.now)
        await asyncio.sleep(rng.random() * 0.1)
        timeline.received(clock.now)
        await asyncio.sleep(rng.random() * 0.1)
        wanted = request(
            str(number), tuple(rng.randrange(50) for _ in range(rng.randrange(1, 20))), rng.randrange(1, 20),
            rng.choice(list(Band)), rng.choice("xyz"), seed=number, prompt_logprobs=rng.choice([None, None, 0]),
            deadline_unix_s=rng.choice([None, None, clock.unix() + 2 * rng.random()]),
        )  # fmt: skip
        reading = asyncio.create_task(read(self.world.stream(wanted, timeline)))
        watching = asyncio.create_task(self._watch(timeline))
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random())
            reading.cancel()
        await asyncio.wait([reading])
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        await asyncio.sleep(rng.random() * 0.1)
        timeline.ended(clock.now)
        return timeline

    async def _watch(self, timeline: Timeline) -> None:
        """Check a running request now and then: its parts add up, and none gets shorter but the open one."""
        while True:
            now = self.world.clock.now
            timeline.check_invariants()
            assert sum(timeline.seconds(now).values()) == pytest.approx(timeline.total_s(now), abs=TOLERANCE_S)
            await asyncio.sleep(self.rng.random() * 0.3)

    async def _disturb(self) -> None:
        while True:
            await asyncio.sleep(self.rng.random())
            replica = self.rng.choice(list(self.world.client.replicas.values()) or [None])
            if replica is not None and self.rng.random() < 0.4:
                self.rng.choice([replica.die, replica.stop, replica.drain])()
            self.add_replica()
            for gone in [each for each in self.world.client.replicas.values() if each.death]:
                del self.world.client.replicas[gone.replica_id]


@pytest.mark.random_worlds(120, per_call=40)
async def test_the_parts_of_every_request_add_up(seeds: Seeds) -> None:
    seen: set[Part] = set()
    for seed in seeds:
        for timeline in await _Histories(seed).run():
            timeline.check_invariants()
            assert timeline.ended_s is not None
            seconds = timeline.seconds(timeline.ended_s)
            total_s = timeline.ended_s - timeline.started_s
            assert sum(seconds.values()) == pytest.approx(total_s, abs=TOLERANCE_S), seed
            assert min(seconds.values()) >= 0.0
            seen |= {part for part, value in seconds.items() if value > 0.0}
    assert seen == set(Part) or not seeds.are_many
