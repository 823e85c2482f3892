"""Requests that wait on a full replica while another one has a free slot."""

import asyncio

import pytest

from replicas.protocol import Band
from router.balancing.load_table import LoadTable
from testkit.router.dispatch_worlds import MakeWorld, Outcome, World, read
from testkit.router.simulated_replicas import FakeReplica, request, stats, undisturbed
from testkit.router.simulated_time import FakeClock

PROMPT = tuple(range(1, 10))
LONG = [
    wanted
    for seed in range(1000)
    if len(undisturbed(wanted := request(str(seed), PROMPT, max_tokens=200, seed=seed)).token_ids) == 200
]


async def fill_twice(make_world: MakeWorld, replica: FakeReplica) -> tuple[list[World], list[asyncio.Task[Outcome]]]:
    """Have two ingresses give the only slot of a replica to a request each, at the same time."""
    worlds = [make_world(replica, is_polled=True) for _ in range(2)]
    reading = [asyncio.create_task(read(world.stream(wanted))) for world, wanted in zip(worlds, LONG, strict=False)]
    await asyncio.sleep(1)
    assert (len(replica.running), len(replica.waiting)) == (1, 1)
    return worlds, reading


async def test_a_request_on_a_full_replica_goes_to_a_new_free_slot(make_world: MakeWorld):
    full, new = FakeReplica("full", num_slots=1), FakeReplica("new", num_slots=1)
    worlds, reading = await fill_twice(make_world, full)
    for world in worlds:
        world.client.add(new)
    await asyncio.sleep(2)
    assert (len(full.running), len(full.waiting), len(new.running)) == (1, 0, 1)
    for outcome, wanted in zip(await asyncio.gather(*reading), LONG, strict=False):
        outcome.check(wanted)
    assert not any(world.observer.migrations for world in worlds)


async def test_a_request_stays_on_a_full_replica_while_all_are_full(make_world: MakeWorld):
    full = FakeReplica("full", num_slots=1)
    _, reading = await fill_twice(make_world, full)
    await asyncio.gather(*reading)
    assert len(full.started) == 2


@pytest.mark.parametrize("num_waiting", [0, 1, 2])
def test_the_newest_requests_without_output_count_as_waiting(num_waiting: int):
    clock = FakeClock()
    table = LoadTable(clock)
    table.record(stats("a", taken=1, slots=2))
    sent = [table.begin("a", Band.STANDARD, 10, 10) for _ in range(4)]
    table.begin("a", Band.BATCH, 10, 10)
    table.progress(sent[0], 1)
    clock.now += 1
    newest = table.begin("a", Band.STANDARD, 10, 10)
    table.record(stats("a", taken=2, slots=2, running=(0, 2, 0), waiting=(0, num_waiting, 1)))
    assert table.waiting(Band.STANDARD, 0) == [newest, *sent[:0:-1]][:num_waiting]
    assert table.waiting(Band.STANDARD, 1) == [newest, *sent[:0:-1]][1:num_waiting]


def test_no_request_waits_on_a_replica_with_a_free_slot():
    table = LoadTable(FakeClock())
    table.begin("a", Band.STANDARD, 10, 10)
    table.record(stats("a", taken=1, slots=2, waiting=(0, 1, 0), own=(0, 1, 0)))
    assert not table.waiting(Band.STANDARD, 0)
