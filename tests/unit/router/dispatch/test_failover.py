"""Requests whose replica dies, stops, drains or refuses."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import pytest

import router.dispatch as module
from replicas.errors import EngineDead, Overloaded, ReplicaLost, RequestQuarantined, ServingError
from replicas.protocol import Band, GenerateRequest, TokenDelta
from router.types import Outcome as Wait
from testkit.router.dispatch_worlds import MakeWorld, Outcome, World, read
from testkit.router.simulated_replicas import FakeReplica, request, stats, undisturbed
from testkit.router.simulated_time import settle_down


def long(name: str, prompt_logprobs: int | None = None) -> GenerateRequest:
    """Return a request that uses all its forty tokens."""
    for seed in range(1000):
        wanted = request(name, prompt=tuple(range(1, 10)), max_tokens=40, seed=seed, prompt_logprobs=prompt_logprobs)
        if len(undisturbed(wanted).token_ids) == 40:
            return wanted
    raise AssertionError


LONG = long("long")
SCORED = long("scored", prompt_logprobs=0)


SEEMS_IDLE = (stats("bad"), stats("good", outstanding=1000))
"""Reports by which a replica `bad` has less to do than `good`."""


def serving(world: World) -> FakeReplica:
    """Return the replica that has the only request."""
    [replica] = [replica for replica in world.replicas if replica.running or replica.waiting]
    return replica


def received(world: World) -> list[GenerateRequest]:
    """Return all requests that the replicas were sent, those with least output first."""
    started = [request for replica in world.replicas for request in replica.started]
    return sorted(started, key=lambda request: len(request.output_token_ids))


async def read_through(
    world: World, wanted: GenerateRequest, deaths_at_s: list[float], how: Literal["die", "stop"] = "die"
) -> Outcome:
    """Read a stream while the replica that serves it is lost at each of these moments after its start there."""
    reading = asyncio.create_task(read(world.stream(wanted)))
    for after_s in deaths_at_s:
        await asyncio.sleep(after_s)
        getattr(serving(world), how)()
        await asyncio.sleep(0.2)
    return await reading


@pytest.mark.parametrize("in_delta", [False, True])
@pytest.mark.parametrize("error", [ReplicaLost("gone"), EngineDead("dead")])
async def test_a_replica_lost_before_any_output_is_replaced(make_world: MakeWorld, error: ServingError, in_delta: bool):
    world = make_world(FakeReplica("bad", fails_in_delta=in_delta), FakeReplica("good"), known=SEEMS_IDLE)
    reading = asyncio.create_task(read(world.stream(LONG)))
    await asyncio.sleep(0.05)
    world.replicas[0].die(error)
    (await reading).check(LONG)
    assert [len(replica.started) for replica in world.replicas] == [1, 1]
    assert world.observer.migrations == {"restarted": 1}
    assert "bad" not in world.in_flight()


@pytest.mark.parametrize("tokens_per_delta", [1, 2, 5])
@pytest.mark.parametrize("after_s", [0.15, 0.45, 0.95, 2.05])
async def test_a_stream_continues_after_a_replicas_death(make_world: MakeWorld, after_s: float, tokens_per_delta: int):
    world = make_world(*(FakeReplica(name, tokens_per_delta=tokens_per_delta) for name in "ab"), is_polled=True)
    (await read_through(world, SCORED, [min(after_s, 3.5 / tokens_per_delta)])).check(SCORED)
    assert sum(world.observer.migrations.values()) == 1


async def test_a_retry_behind_output_omits_prompt_logprobs(make_world: MakeWorld):
    world = make_world(FakeReplica("a"), FakeReplica("b"), is_polled=True)
    (await read_through(world, SCORED, [1.5])).check(SCORED)
    [_, second] = received(world)
    assert second.output_token_ids and second.params.prompt_logprobs is None
    assert world.observer.migrations == {"resumed": 1}


async def test_scores_given_before_a_death_are_not_repeated(make_world: MakeWorld):
    """The first replica gives four scores, the second all of them again."""
    replicas = (FakeReplica("a", scores_per_delta=4), FakeReplica("b", scores_per_delta=3))
    world = make_world(*replicas, known=[stats("a")], is_polled=True)
    (await read_through(world, SCORED, [0.15])).check(SCORED)
    assert world.observer.migrations == {"restarted": 1}


async def test_a_request_runs_alone_after_two_replica_deaths(make_world: MakeWorld):
    world = make_world(*map(FakeReplica, "abcd"), is_polled=True)
    (await read_through(world, LONG, [0.3, 0.5])).check(LONG)
    assert [request.is_isolated for request in received(world)] == [False, False, True]


async def test_a_third_death_quarantines(make_world: MakeWorld):
    world = make_world(*map(FakeReplica, "abcd"), is_polled=True)
    outcome = await read_through(world, LONG, [0.3, 0.5, 0.5])
    assert isinstance(outcome.error, RequestQuarantined)
    assert "3 replicas died" in str(outcome.error) and not outcome.error.retryable
    assert world.observer.migrations == {"resumed": 2, "failed": 1}
    assert not world.observer.finishes


async def test_deaths_before_the_first_token_count_as_well(make_world: MakeWorld):
    world = make_world(*map(FakeReplica, "abcd"), is_polled=True)
    assert isinstance((await read_through(world, LONG, [0.05, 0.05, 0.05])).error, RequestQuarantined)
    assert sorted(len(replica.started) for replica in world.replicas) == [0, 1, 1, 1]


async def test_refusals_of_dead_replicas_are_not_deaths(make_world: MakeWorld):
    """Only a request that was on a replica when it died can be the cause."""
    dead = [FakeReplica(name, death=EngineDead("dead")) for name in "abcd"]
    world = make_world(*dead, FakeReplica("good"), known=[*map(stats, "abcd"), stats("good", outstanding=1000)])
    (await read(world.stream(LONG))).check(LONG)
    assert [len(replica.started) for replica in world.replicas] == [1, 1, 1, 1, 1]
    assert not any(request.is_isolated for request in received(world))


async def test_a_graceful_stop_is_never_a_death(make_world: MakeWorld):
    world = make_world(*map(FakeReplica, "abcdefg"), is_polled=True)
    (await read_through(world, LONG, [0.3] * 6, how="stop")).check(LONG)
    assert not any(request.is_isolated for request in received(world))
    assert world.observer.migrations == {"resumed": 6}


class HalfReplica(FakeReplica):
    """Replica that ends every stream after three deltas, without a reason."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        async with aclosing(super().generate(request)) as deltas:
            for _ in range(3):
                yield await anext(deltas)


async def test_a_replica_that_just_ends_the_stream_is_lost(make_world: MakeWorld):
    world = make_world(HalfReplica("bad"), FakeReplica("good"), known=SEEMS_IDLE)
    (await read(world.stream(LONG))).check(LONG)
    assert [len(request.output_token_ids) for request in world.replicas[1].started] == [3]


async def test_moves_are_bounded(make_world: MakeWorld):
    names = [f"{number:02}" for number in range(40)]
    replicas = [FakeReplica(name, death=ReplicaLost("stopped", has_died=False)) for name in names]
    world = make_world(*replicas, known=map(stats, names))
    assert isinstance((await read(world.stream(LONG))).error, ReplicaLost)
    assert len(received(world)) == module._MAX_MIGRATIONS + 1
    assert world.observer.migrations["failed"] == 1


async def test_a_death_moves_every_stream_of_the_replica(make_world: MakeWorld):
    world = make_world(*(FakeReplica(name, num_slots=30) for name in "ab"), is_polled=True)
    wanted = [request(str(number), prompt=(number, 2), max_tokens=30) for number in range(30)]
    reading = asyncio.create_task(world.read_all(wanted))
    await asyncio.sleep(0.75)
    world.replicas[0].die()
    for outcome, of in zip(await reading, wanted, strict=True):
        outcome.check(of)
    assert world.observer.migrations["resumed"] > 5


async def test_a_draining_replica_finishes_and_gets_no_request(make_world: MakeWorld):
    old = FakeReplica("old", num_slots=1)
    world = make_world(old, FakeReplica("new"), known=[old.stats()])
    first = asyncio.create_task(read(world.stream(LONG)))
    await asyncio.sleep(0.25)
    old.drain()
    await world.dispatcher.refresh()
    await world.read_all([request(str(number)) for number in range(5)])
    (await first).check(LONG)
    assert [len(replica.started) for replica in world.replicas] == [1, 5]


async def test_a_request_refused_by_a_draining_replica_goes_elsewhere(make_world: MakeWorld):
    replicas = (FakeReplica("old", is_draining=True), FakeReplica("new"))
    world = make_world(*replicas, known=[stats("old")], is_polled=True)
    (await read(world.stream(LONG))).check(LONG)
    assert not any(request.is_isolated for request in world.replicas[1].started)


async def test_a_refused_request_waits_until_the_replica_has_room(make_world: MakeWorld):
    """Others fill the replica, which the ingress cannot know; the request waits for the next report."""
    replica = FakeReplica("a", num_slots=1, max_waiting=0)
    world = make_world(replica, known=[stats("a", slots=1)], is_polled=True)
    replica.running["of another ingress"] = request(band=Band.INTERACTIVE)
    reading = asyncio.create_task(read(world.stream(LONG)))
    await asyncio.sleep(5)
    assert len(replica.started) == 1 and len(world.flow.queue) == 1
    del replica.running["of another ingress"]
    (await reading).check(LONG)
    assert len(replica.started) == 2


@pytest.mark.parametrize("in_delta", [False, True])
async def test_a_refusal_without_stats_does_not_count_as_a_move(make_world: MakeWorld, in_delta: bool):
    """As when Serve's own limit refuses: the table still shows room."""
    replica = FakeReplica("a", death=Overloaded("too many calls"), fails_in_delta=in_delta)
    world = make_world(replica, known=[stats("a")])
    reading = asyncio.create_task(read(world.stream(LONG)))
    await settle_down()
    assert len(replica.started) == 1 and len(world.flow.queue) == 1
    replica.death = None
    await world.dispatcher.refresh()
    (await reading).check(LONG)


async def test_requests_are_held_while_no_replica_runs(make_world: MakeWorld):
    world = make_world(known=[stats("vanished")], is_polled=True)
    world.client.poll_error = ReplicaLost("no answer")
    reading = asyncio.create_task(read(world.stream(LONG)))
    await asyncio.sleep(30)
    assert len(world.client.rankings) == 1 and len(world.flow.queue) == 1
    world.client.poll_error = None
    world.client.add(FakeReplica("new"))
    (await reading).check(LONG)


async def test_a_refused_request_keeps_its_place_at_no_cost(make_world: MakeWorld):
    """`first` was refused before `second` of another tenant is served."""
    replica = FakeReplica("a", num_slots=1, death=Overloaded("full"))
    world = make_world(replica, known=[stats("a", slots=1)])
    prompt = tuple(range(1, 200))
    wanted = [request("first", prompt, 4, tenant="x"), request("second", prompt, 4, tenant="y")]
    reading = asyncio.create_task(world.read_all(wanted))
    await settle_down()
    assert [request.request_id for request in replica.started] == ["first"]
    replica.death = None
    await world.dispatcher.refresh()
    for outcome, of in zip(await reading, wanted, strict=True):
        outcome.check(of)
    assert [request.request_id for request in replica.started] == ["first", "first", "second"]
    assert [wait for _, wait, _ in world.observer.waits] == [Wait.DISPATCHED] * 3


async def test_closing_a_stream_after_a_move_leaves_nothing_behind(make_world: MakeWorld):
    world = make_world(FakeReplica("a"), FakeReplica("b"))
    async with aclosing(world.stream(request(max_tokens=90, band=Band.BATCH))) as stream:
        await anext(stream)
        serving(world).die()
        await anext(stream)
    assert [replica.num_closed for replica in world.replicas] == [1, 1]


async def test_a_vanished_replica_gets_nothing_until_it_reports(make_world: MakeWorld):
    """It vanished; Serve gives the request to another, which refuses: that must not go on in a circle."""
    world = make_world(FakeReplica("draining", is_draining=True), known=[stats("vanished")])
    reading = asyncio.create_task(read(world.stream(LONG)))
    await settle_down(200)
    assert len(world.replicas[0].started) == 1
    world.client.add(FakeReplica("new"))
    await world.dispatcher.refresh()
    (await reading).check(LONG)


class DyingAfterwards(FakeReplica):
    """Replica that yields the last delta of a request and dies before the end of the stream."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta
        raise ReplicaLost("died")


async def test_a_death_after_the_last_delta_is_no_move(make_world: MakeWorld):
    world = make_world(DyingAfterwards("a"))
    (await read(world.stream(LONG))).check(LONG)
    assert not world.observer.migrations and len(world.observer.finishes) == 1
    assert world.in_flight() == {}, "but the replica is gone"
