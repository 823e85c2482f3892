"""Streams of replicas that hang or are to leave."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from replicas.errors import DeadlineExceeded
from replicas.protocol import GenerateRequest
from router.balancing.load_table import LoadTable
from router.watch import ReplicaWatch, WatchSettings
from testkit.router.dispatch_worlds import MakeWorld, Outcome, World, read
from testkit.router.simulated_replicas import FakeReplica, request, stats, undisturbed
from testkit.router.simulated_time import FakeClock


def long(name: str, num_tokens: int = 60) -> GenerateRequest:
    """Return a request that uses all its tokens."""
    for seed in range(1000):
        wanted = request(name, prompt=tuple(range(1, 10)), max_tokens=num_tokens, seed=seed)
        if len(undisturbed(wanted).token_ids) == num_tokens:
            return wanted
    raise AssertionError


LONG = long("long")


def serving(world: World) -> FakeReplica:
    [replica] = [replica for replica in world.replicas if replica.running or replica.waiting]
    return replica


async def begin(world: World, *wanted: GenerateRequest) -> list[asyncio.Task[Outcome]]:
    """Start to read streams, and return when each has some output."""
    reading = [asyncio.create_task(read(world.stream(each))) for each in wanted]
    await asyncio.sleep(0.5)
    return reading


async def test_a_hung_replicas_streams_go_on_elsewhere_within_ten_seconds(make_world: MakeWorld):
    world = make_world(FakeReplica("a"), FakeReplica("b"), is_polled=True)
    [reading] = await begin(world, LONG)
    hung = serving(world)
    hung.is_hung = True
    async with asyncio.timeout(10 + 6):
        (await reading).check(LONG)
    assert world.observer.migrations == {"resumed": 1}
    hung.is_hung = False  # It wakes up; nobody reads its deltas.
    await asyncio.sleep(1)
    assert not hung.running


async def test_a_slow_reader_of_a_hung_replica_goes_on_elsewhere(make_world: MakeWorld):
    world = make_world(FakeReplica("a"), FakeReplica("b"), is_polled=True)
    outcome = Outcome()
    async with aclosing(world.stream(LONG)) as stream:
        async for delta in stream:
            outcome.read(delta)
            if len(outcome.token_ids) == 3:
                serving(world).is_hung = True
                await asyncio.sleep(8)
    outcome.check(LONG)
    assert world.observer.migrations == {"resumed": 1}


async def test_streams_of_the_only_replica_wait_for_it_or_its_replacement(make_world: MakeWorld):
    replica = FakeReplica("a")
    world = make_world(replica, is_polled=True)
    woken, replaced = long("woken"), long("replaced")
    [first] = await begin(world, woken)
    replica.is_hung = True
    await asyncio.sleep(60)
    replica.is_hung = False
    (await first).check(woken)
    assert not world.observer.migrations
    [second] = await begin(world, replaced)
    replica.is_hung = True
    await asyncio.sleep(60)
    world.client.add(FakeReplica("new"))
    async with asyncio.timeout(10):
        (await second).check(replaced)
    replica.is_hung = False
    await asyncio.sleep(1)


async def test_the_deadline_holds_on_a_hung_replica(make_world: MakeWorld):
    replica = FakeReplica("a")
    world = make_world(replica, is_polled=True)
    [reading] = await begin(world, replace(LONG, deadline_unix_s=world.clock.unix() + 20))
    replica.is_hung = True
    async with asyncio.timeout(22):
        assert isinstance((await reading).error, DeadlineExceeded)
    replica.is_hung = False
    await asyncio.sleep(1)


async def test_a_slow_step_is_no_silence(make_world: MakeWorld):
    world = make_world(*(FakeReplica(name, step_s=20) for name in "ab"), is_polled=True)
    few = long("few", 3)
    (await read(world.stream(few))).check(few)
    assert not world.observer.migrations


async def test_a_pause_of_the_ingress_is_no_silence(make_world: MakeWorld):
    world = make_world(FakeReplica("a"), FakeReplica("b"), is_polled=True)
    [reading] = await begin(world, LONG)
    for _ in range(5):
        world.clock.now += 60
        await asyncio.sleep(0.5)
    (await reading).check(LONG)
    assert not world.observer.migrations


async def test_three_hangs_quarantine_as_three_deaths_do(make_world: MakeWorld):
    world = make_world(*map(FakeReplica, "abcd"), is_polled=True)
    [reading] = await begin(world, LONG)
    for _ in range(3):
        [hanging] = [each for each in world.replicas if each.running and not each.is_hung]
        hanging.is_hung = True
        await asyncio.sleep(8)
    assert "3 replicas died" in str((await reading).error)
    for replica in world.replicas:
        replica.is_hung = False
    await asyncio.sleep(1)


@pytest.mark.parametrize(("num_tokens", "moves"), [(40, False), (100, True)])
async def test_a_draining_replica_hands_over_what_does_not_end_soon(
    make_world: MakeWorld, num_tokens: int, moves: bool
):
    world = make_world(FakeReplica("a"), FakeReplica("b"), is_polled=True)
    wanted = long("wanted", num_tokens)
    [reading] = await begin(world, wanted)
    leaving = serving(world)
    leaving.drain()
    await asyncio.sleep(6.5)
    assert not leaving.running
    (await reading).check(wanted)
    assert world.observer.migrations == ({"resumed": 1} if moves else {})
    assert not any(each.is_isolated for replica in world.replicas for each in replica.started)


@pytest.mark.parametrize("others", [(), ("other weights",)], ids=["alone", "beside other weights"])
async def test_a_draining_replica_keeps_what_no_other_can_continue(make_world: MakeWorld, others: tuple[str, ...]):
    world = make_world(FakeReplica("a", weights="same"), is_polled=True)
    wanted = long("wanted", 100)
    [reading] = await begin(world, wanted)
    for weights in others:
        world.client.add(FakeReplica("b", weights=weights))
    world.replicas[0].drain()
    (await reading).check(wanted)
    assert not world.observer.migrations


async def test_a_draining_replica_hands_over_what_others_can_take(make_world: MakeWorld):
    old = FakeReplica("old", num_slots=3)
    world = make_world(old, settings=WatchSettings(max_drain_wait_s=1), is_polled=True)
    wanted = [long(str(number), 200) for number in range(3)]
    reading = await begin(world, *wanted)
    world.client.add(FakeReplica("new", num_slots=1))
    await asyncio.sleep(1.5)
    old.drain()
    await asyncio.sleep(4)
    assert len(old.running) == 2 and world.observer.migrations == {"resumed": 1}
    for outcome, of in zip(await asyncio.gather(*reading), wanted, strict=True):
        outcome.check(of)


async def test_a_replica_is_drained_by_its_id(make_world: MakeWorld):
    world = make_world(FakeReplica("a"), FakeReplica("b"), is_polled=True)
    wanted = long("wanted", 100)
    [reading] = await begin(world, wanted)
    leaving = serving(world)
    assert await world.dispatcher.drain(leaving.replica_id)
    assert not await world.dispatcher.drain("nobody")
    await world.read_all([request(str(number)) for number in range(3)])
    (await reading).check(wanted)
    assert len(leaving.started) == 1 and world.observer.migrations == {"resumed": 1}


def test_replicas_are_still_watched_after_a_minute_of_failed_polls():
    clock = FakeClock()
    table, watch = LoadTable(clock), ReplicaWatch(WatchSettings(), clock)

    def poll(*answering: str) -> None:
        asked_s = table.now()
        watch.asked()
        polled = [replace(stats(replica_id), version=1) for replica_id in answering]  # Their load never changes.
        watch.polled(polled, table.replace(polled, asked_s))

    def wait(seconds: int) -> None:
        for _ in range(4 * seconds):
            clock.now += 0.25
            watch.tick(0)

    poll("a", "b")
    for _ in range(70):
        watch.asked()
        wait(1)
    poll("a", "b")
    for _ in range(6):
        poll("a")
        wait(1)
    assert watch.is_hung("b") and not watch.is_hung("a")
    for _ in range(70):
        poll("a")
        wait(1)
    assert not watch.is_hung("b"), "a replica that has left is forgotten"
