"""Requests whose replica dies, stops, drains or refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

import router.dispatch as module
from replicas.errors import EngineDead, Overloaded, ReplicaLost, RequestQuarantined, ServingError
from replicas.protocol import Band, GenerateRequest, TokenDelta
from router.types import Outcome as Wait
from testkit.router.dispatch_worlds import Outcome, World, read
from testkit.router.simulated_replicas import FakeReplica, request, stats, undisturbed
from testkit.router.simulated_time import settle_down


def long(name: str, prompt_logprobs: int | None = None) -> GenerateRequest:
    """A request that uses all its forty tokens."""
    for seed in range(1000):
        wanted = request(name, prompt=tuple(range(1, 10)), max_tokens=40, seed=seed, prompt_logprobs=prompt_logprobs)
        if len(undisturbed(wanted).token_ids) == 40:
            return wanted
    raise AssertionError


LONG = long("long")
SCORED = long("scored", prompt_logprobs=0)


def serving(world: World) -> FakeReplica:
    """The replica at which the one request is."""
    [replica] = [replica for replica in world.replicas if replica.running or replica.waiting]
    return replica


async def read_through(world: World, wanted: GenerateRequest, deaths_at_s: list[float], how: str = "die") -> Outcome:
    """Read a stream while the replica that serves it is lost at each of these moments after its start there."""
    polling = asyncio.create_task(world.dispatcher.run())
    reading = asyncio.create_task(read(world.stream(wanted)))
    for after_s in deaths_at_s:
        await asyncio.sleep(after_s)
        getattr(serving(world), how)()
        await asyncio.sleep(0.2)
    outcome = await reading
    polling.cancel()
    world.check_idle()
    return outcome


@pytest.mark.parametrize("in_delta", [False, True])
@pytest.mark.parametrize("error", [ReplicaLost("gone"), EngineDead("dead")])
async def test_a_replica_lost_before_any_output_is_replaced_unseen(error: ServingError, in_delta: bool):
    world = World(FakeReplica("bad", fails_in_delta=in_delta, death=error), FakeReplica("good"))
    for replica, outstanding in zip(world.replicas, (0, 1000), strict=True):
        world.table.record(stats(replica.replica_id, outstanding=outstanding))
    (await read(world.stream(LONG))).check(LONG)
    assert [len(replica.started) for replica in world.replicas] == [1, 1]
    assert world.observer.migrations == {"restarted": 1}
    assert "bad" not in world.in_flight()
    world.check_idle()


@pytest.mark.parametrize("tokens_per_delta", [1, 2, 5])
@pytest.mark.parametrize("after_s", [0.15, 0.45, 0.95, 2.05])
async def test_a_stream_goes_on_behind_a_death_as_if_nothing_had_happened(after_s: float, tokens_per_delta: int):
    world = World(*(FakeReplica(name, tokens_per_delta=tokens_per_delta) for name in "ab"))
    outcome = await read_through(world, SCORED, [min(after_s, 3.5 / tokens_per_delta)])
    outcome.check(SCORED)
    assert sum(world.observer.migrations.values()) == 1


async def test_the_prompts_scores_are_not_asked_for_again_behind_output():
    world = World(FakeReplica("a"), FakeReplica("b"))
    (await read_through(world, SCORED, [1.5])).check(SCORED)
    [second] = [received for replica in world.replicas for received in replica.started if received.output_token_ids]
    assert second.params.prompt_logprobs is None
    assert world.observer.migrations == {"resumed": 1}


async def test_scores_given_before_a_death_are_not_repeated():
    """The first replica gives four scores, the second all of them again."""
    world = World(FakeReplica("a", scores_per_delta=4), FakeReplica("b", scores_per_delta=3))
    world.table.record(stats("a"))
    (await read_through(world, SCORED, [0.15])).check(SCORED)
    assert world.observer.migrations == {"restarted": 1}


async def test_a_request_present_at_two_deaths_runs_alone_on_its_third_replica():
    world = World(*(FakeReplica(name) for name in "abcd"))
    (await read_through(world, LONG, [0.3, 0.5])).check(LONG)
    received = [received for replica in world.replicas for received in replica.started]
    by_progress = sorted(received, key=lambda t: len(t.output_token_ids))
    assert [t.is_isolated for t in by_progress] == [False, False, True]


async def test_a_third_death_quarantines():
    world = World(*(FakeReplica(name) for name in "abcd"))
    outcome = await read_through(world, LONG, [0.3, 0.5, 0.5])
    assert isinstance(outcome.error, RequestQuarantined)
    assert "3 replicas died" in str(outcome.error) and not outcome.error.retryable
    assert world.observer.migrations == {"resumed": 2, "failed": 1}
    assert not world.observer.finishes


async def test_deaths_before_the_first_token_count_as_well():
    world = World(*(FakeReplica(name, death=ReplicaLost("gone")) for name in "abcd"))
    for replica in world.replicas:
        world.table.record(stats(replica.replica_id))
    outcome = await read(world.stream(LONG))
    assert isinstance(outcome.error, RequestQuarantined)
    assert sorted(len(replica.started) for replica in world.replicas) == [0, 1, 1, 1]


async def test_a_graceful_stop_is_never_a_death():
    world = World(*(FakeReplica(name) for name in "abcdefg"))
    outcome = await read_through(world, LONG, [0.3] * 6, how="stop")
    outcome.check(LONG)
    assert not any(received.is_isolated for replica in world.replicas for received in replica.started)
    assert world.observer.migrations == {"resumed": 6}


class HalfReplica(FakeReplica):
    """Ends every stream after three deltas, without a word."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        num_left = 3
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta
                num_left -= 1
                if not num_left:
                    return


async def test_a_replica_that_just_ends_the_stream_is_lost():
    world = World(HalfReplica("a"), FakeReplica("b"))
    for replica, outstanding in zip(world.replicas, (0, 1000), strict=True):
        world.table.record(stats(replica.replica_id, outstanding=outstanding))
    (await read(world.stream(LONG))).check(LONG)
    assert [len(received.output_token_ids) for received in world.replicas[1].started] == [3]


async def test_moves_are_bounded():
    world = World(*(FakeReplica(f"{number:02}", death=ReplicaLost("stopped", has_died=False)) for number in range(40)))
    for replica in world.replicas:
        world.table.record(stats(replica.replica_id))
    outcome = await read(world.stream(LONG))
    assert isinstance(outcome.error, ReplicaLost)
    assert sum(len(replica.started) for replica in world.replicas) == module._MAX_MIGRATIONS + 1
    assert world.observer.migrations["failed"] == 1
    world.check_idle()


async def test_a_death_moves_every_stream_of_the_replica():
    world = World(*(FakeReplica(name, num_slots=30) for name in "ab"))
    polling = asyncio.create_task(world.dispatcher.run())
    wanted = [request(str(number), prompt=(number, 2), max_tokens=30) for number in range(30)]
    reading = asyncio.create_task(world.read_all(wanted))
    await asyncio.sleep(0.75)
    world.replicas[0].die()
    for outcome, of in zip(await reading, wanted, strict=True):
        outcome.check(of)
    assert world.observer.migrations["resumed"] > 5
    polling.cancel()
    world.check_idle()


async def test_a_replica_that_drains_finishes_what_it_has_and_gets_nothing_new():
    world = World(FakeReplica("old", num_slots=1), FakeReplica("new"))
    world.table.record(world.replicas[0].stats())
    first = asyncio.create_task(read(world.stream(LONG)))
    await asyncio.sleep(0.25)
    world.replicas[0].drain()
    await world.dispatcher.refresh()
    await world.read_all([request(str(number)) for number in range(5)])
    (await first).check(LONG)
    assert [len(replica.started) for replica in world.replicas] == [1, 5]


async def test_a_request_refused_by_a_draining_replica_goes_elsewhere():
    world = World(FakeReplica("old", is_draining=True), FakeReplica("new"))
    world.table.record(stats("old"))
    polling = asyncio.create_task(world.dispatcher.run())
    (await read(world.stream(LONG))).check(LONG)
    assert not any(received.is_isolated for received in world.replicas[1].started)
    polling.cancel()


async def test_a_refusing_replica_gives_the_request_back_until_it_has_room():
    """Others fill the replica, which the ingress cannot know; the request waits for the next report."""
    world = World(FakeReplica("a", num_slots=1, max_waiting=0))
    world.table.record(stats("a", slots=1))
    polling = asyncio.create_task(world.dispatcher.run())
    world.replicas[0].running["of another ingress"] = request(band=Band.INTERACTIVE)
    reading = asyncio.create_task(read(world.stream(LONG)))
    await asyncio.sleep(5)
    assert len(world.replicas[0].started) == 1 and len(world.flow.queue) == 1
    del world.replicas[0].running["of another ingress"]
    (await reading).check(LONG)
    assert len(world.replicas[0].started) == 2
    polling.cancel()
    world.check_idle()


@pytest.mark.parametrize("in_delta", [False, True])
async def test_a_refusal_that_tells_no_load_does_not_use_up_the_moves(in_delta: bool):
    """As when Serve's own limit refuses: the table still shows room."""
    world = World(FakeReplica("a", death=Overloaded("too many calls"), fails_in_delta=in_delta))
    world.table.record(stats("a"))
    reading = asyncio.create_task(read(world.stream(LONG)))
    await settle_down()
    assert len(world.replicas[0].started) == 1 and len(world.flow.queue) == 1
    world.replicas[0].death = None
    await world.dispatcher.refresh()
    (await reading).check(LONG)
    world.check_idle()


async def test_when_no_replica_runs_any_more_requests_are_held_until_one_does():
    world = World()
    world.table.record(stats("vanished"))
    polling = asyncio.create_task(world.dispatcher.run())
    world.client.poll_error = ReplicaLost("no answer")
    reading = asyncio.create_task(read(world.stream(LONG)))
    await asyncio.sleep(30)
    assert len(world.client.rankings) == 1 and len(world.flow.queue) == 1
    world.client.poll_error = None
    world.client.add(FakeReplica("new"))
    (await reading).check(LONG)
    polling.cancel()
    world.check_idle()


async def test_a_refused_request_keeps_its_place_and_its_tenant_pays_nothing():
    """`first` was refused before `second` of another tenant is served."""
    world = World(FakeReplica("a", num_slots=1, death=Overloaded("full")))
    world.table.record(stats("a", slots=1))
    prompt = tuple(range(1, 200))
    wanted = [request("first", prompt, 4, tenant="x"), request("second", prompt, 4, tenant="y")]
    reading = asyncio.create_task(world.read_all(wanted))
    await settle_down()
    assert [received.request_id for received in world.replicas[0].started] == ["first"]
    world.replicas[0].death = None
    await world.dispatcher.refresh()
    for outcome, of in zip(await reading, wanted, strict=True):
        outcome.check(of)
    assert [received.request_id for received in world.replicas[0].started] == ["first", "first", "second"]
    assert [wait for _, wait, _ in world.observer.waits] == [Wait.DISPATCHED] * 3


async def test_closing_a_stream_after_a_move_leaves_nothing_behind():
    world = World(FakeReplica("a"), FakeReplica("b"))
    stream = world.stream(request(max_tokens=90, band=Band.BATCH))
    await anext(stream)
    serving(world).die()
    await anext(stream)
    await stream.aclose()
    assert [replica.num_closed for replica in world.replicas] == [1, 1]
    world.check_idle()


async def test_a_replica_that_did_not_take_a_request_meant_for_it_gets_nothing_until_it_is_heard_of():
    """It vanished; Serve gives the request to another, which refuses: that must not go on in a circle."""
    world = World(FakeReplica("draining", is_draining=True))
    world.table.record(stats("vanished"))
    reading = asyncio.create_task(read(world.stream(LONG)))
    await settle_down(200)
    assert len(world.replicas[0].started) == 1
    world.client.add(FakeReplica("new"))
    await world.dispatcher.refresh()
    (await reading).check(LONG)
    world.check_idle()


class DyingAfterwards(FakeReplica):
    """Gives all of a request, and dies before it has said that the stream is over."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta
        raise ReplicaLost("died")


async def test_a_death_after_the_last_delta_is_nobodys_move():
    world = World(DyingAfterwards("a"))
    (await read(world.stream(LONG))).check(LONG)
    assert not world.observer.migrations and len(world.observer.finishes) == 1
    assert world.in_flight() == {}, "but the replica is gone"
    world.check_idle()
