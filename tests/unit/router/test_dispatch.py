"""A request's way through flow control to a replica and back."""

from __future__ import annotations

import asyncio

import pytest

from replicas.errors import (
    ReplicaLost,
)
from replicas.protocol import Band
from tests.unit.router.fakes import FakeReplica, request, undisturbed
from tests.unit.router.worlds import World, read


async def test_a_stream_is_the_whole_output_in_order():
    world = World(FakeReplica("a", tokens_per_delta=3))
    wanted = request(max_tokens=20)
    outcome = await read(world.stream(wanted))
    outcome.check(wanted)
    assert world.in_flight() == {"a": 0}
    [(band, ttft_s, duration_s, num_tokens)] = world.observer.finishes
    assert (band, num_tokens) == (Band.STANDARD, len(undisturbed(wanted).token_ids))
    assert ttft_s is not None and 0 < ttft_s < duration_s
    world.check_idle()


async def test_requests_spread_over_replicas_by_what_is_in_flight():
    world = World(FakeReplica("a"), FakeReplica("b"))
    await world.read_all([request(str(number)) for number in range(8)])
    assert [len(replica.started) for replica in world.replicas] == [4, 4]
    world.check_idle()


async def test_samples_of_one_prompt_go_to_one_replica_while_it_has_room():
    world = World(*(FakeReplica(name, num_slots=6) for name in "abc"))
    streams = world.dispatcher.start([request(str(number), seed=number) for number in range(6)])
    await asyncio.gather(*map(read, streams))
    assert sorted(len(replica.started) for replica in world.replicas) == [0, 0, 6]
    world.check_idle()


async def test_closing_a_stream_aborts_its_request():
    world = World(FakeReplica("a"))
    stream = world.stream(request(max_tokens=1000))
    await anext(stream)
    assert world.in_flight() == {"a": 1}
    await stream.aclose()
    assert world.replicas[0].num_closed == 1 and not world.replicas[0].running
    world.check_idle()


async def test_a_stream_that_was_never_read_counts_nowhere():
    world = World(FakeReplica("a"))
    await world.stream(request()).aclose()
    await world.dispatcher.refresh()
    assert world.in_flight() == {"a": 0}
    world.check_idle()


async def test_the_poll_survives_failures_and_forgets_what_vanished():
    world = World(FakeReplica("a"), FakeReplica("b"), poll_period_s=1.0)
    poll = asyncio.create_task(world.dispatcher.run())
    await asyncio.sleep(1.5)
    assert world.in_flight() == {"a": 0, "b": 0}
    world.client.poll_error = ReplicaLost("no answer")
    await asyncio.sleep(5)
    assert world.in_flight() == {"a": 0, "b": 0} and not poll.done()
    world.client.poll_error = None
    world.client.replicas.pop("a")
    await asyncio.sleep(1)
    assert world.in_flight() == {"b": 0}
    poll.cancel()
    with pytest.raises(asyncio.CancelledError):
        await poll
