"""A request's way through flow control to a replica and back, while nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from replicas.errors import DeadlineExceeded, InvalidRequest, Overloaded, ReplicaLost, SequenceFailed, ServingError
from replicas.protocol import Band, FinishReason, GenerateRequest, TokenDelta
from tests.unit.router.fakes import FakeReplica, request, stats, undisturbed
from tests.unit.router.flows import limits
from tests.unit.router.simulated_time import settle_down
from tests.unit.router.worlds import Outcome, World, read


async def test_a_stream_is_the_whole_output_in_order():
    world = World(FakeReplica("a", tokens_per_delta=3))
    wanted = request(max_tokens=20, prompt_logprobs=0, prompt=tuple(range(1, 8)))
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


async def test_what_waits_is_in_the_ingress_and_not_in_replicas():
    world = World(FakeReplica("a", num_slots=2))
    reading = asyncio.create_task(world.read_all([request(str(number)) for number in range(6)]))
    await asyncio.sleep(0.15)
    assert len(world.replicas[0].running) == 2 and not world.replicas[0].waiting
    assert len(world.flow.queue) == 4
    assert [outcome.finish_reason for outcome in await reading] == [FinishReason.LENGTH] * 6
    world.check_idle()


async def test_samples_of_one_prompt_go_to_one_replica_while_it_has_room():
    world = World(*(FakeReplica(name, num_slots=6) for name in "abc"))
    streams = world.dispatcher.start([request(str(number), seed=number) for number in range(6)])
    await asyncio.gather(*map(read, streams))
    assert sorted(len(replica.started) for replica in world.replicas) == [0, 0, 6]
    world.check_idle()


async def test_replicas_are_told_what_output_is_expected():
    world = World(FakeReplica("a"))
    for number in range(2):
        await read(world.stream(request(str(number), max_tokens=5)))
        await read(world.stream(request(f"long-{number}", max_tokens=500)))
    lengths = [told.expected_output_tokens for told in world.replicas[0].started]
    assert lengths[:2] == [5, 5]
    assert all(length is not None and length <= 500 for length in lengths)


async def test_closing_a_stream_aborts_its_request():
    world = World(FakeReplica("a"))
    stream = world.stream(request(max_tokens=100))
    await anext(stream)
    assert world.in_flight() == {"a": 1}
    await stream.aclose()
    assert world.replicas[0].num_closed == 1
    world.check_idle()


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.25])
async def test_cancelling_the_reader_aborts_its_request(after_s: float):
    world = World(FakeReplica("a"))
    reader = asyncio.create_task(read(world.stream(request(max_tokens=100))))
    await settle_down()
    await asyncio.sleep(after_s)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert world.replicas[0].num_closed == 1
    world.check_idle()


async def test_a_stream_that_was_never_read_counts_nowhere():
    world = World(FakeReplica("a"))
    await world.stream(request()).aclose()
    await world.dispatcher.refresh()
    assert world.in_flight() == {"a": 0}
    world.check_idle()


@pytest.mark.parametrize("in_delta", [False, True])
@pytest.mark.parametrize("error", [InvalidRequest("no"), DeadlineExceeded("late"), SequenceFailed("bad token")])
async def test_what_is_the_requests_own_fault_is_raised_and_not_tried_elsewhere(error: ServingError, in_delta: bool):
    world = World(FakeReplica("a", fails_in_delta=in_delta, death=error), FakeReplica("b", death=error))
    for replica in world.replicas:
        world.table.record(stats(replica.replica_id))
    outcome = await read(world.stream(request()))
    assert outcome.error is error
    assert len(world.client.rankings) == 1
    world.check_idle()


class LaggingReplica(FakeReplica):
    """Its reader lags, and gets its only token and a failure merged into one delta."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        async with aclosing(super().generate(request)) as deltas:
            delta = await anext(deltas)
        yield replace(delta, error=SequenceFailed("bad token"), finish_reason=FinishReason.ERROR)


async def test_output_that_comes_with_a_failure_is_given_before_it_is_raised():
    world = World(LaggingReplica("a"))
    outcome = await read(world.stream(request()))
    assert outcome.token_ids == [undisturbed(request()).token_ids[0]]
    assert isinstance(outcome.error, SequenceFailed)
    world.check_idle()


async def test_load_is_learnt_from_deltas():
    world = World(FakeReplica("a"))
    world.replicas[0].running["of another ingress"] = request()
    stream = world.stream(request())
    await anext(stream)
    [known] = world.dispatcher.load()
    assert known.num_by_band == (0, 2, 0) and known.num_in_flight == 1
    assert (known.unseen_tokens, known.outstanding_tokens) == (0, 7), "the prompt and one of eight tokens are done"
    await stream.aclose()


async def test_a_request_is_counted_on_the_replica_that_really_serves_it():
    world = World(FakeReplica("a"), FakeReplica("b"))
    world.table.record(stats("vanished"))
    stream = world.stream(request())
    await anext(stream)
    assert world.client.rankings == [["vanished"]]
    assert world.in_flight() == {"a": 1}, "and the one it was meant for gets nothing until it is heard of again"
    await stream.aclose()
    world.check_idle()


async def test_an_idle_replica_is_found_by_the_first_request():
    world = World(FakeReplica("a"))
    (await read(world.stream(request()))).check(request())
    assert world.client.num_polls == 1


async def test_a_request_waits_for_the_first_replica():
    world = World()
    world.client.poll_error = ReplicaLost("nobody there")
    polling = asyncio.create_task(world.dispatcher.run())
    reading = asyncio.create_task(read(world.stream(request())))
    await asyncio.sleep(60)
    world.client.poll_error = None
    world.client.add(FakeReplica("new"))
    (await reading).check(request())
    assert world.observer.waits[0][2] == pytest.approx(60, abs=1.01), "within one poll of its being there"
    polling.cancel()


async def test_limits_hold_for_requests_that_come_together_while_no_replica_is_known():
    world = World(limits=limits(max_requests=2))
    reading = asyncio.gather(*(read(world.stream(request(str(number)))) for number in range(6)))
    await settle_down()
    assert len(world.flow.queue) == 2
    world.client.add(FakeReplica("new"))
    await world.dispatcher.refresh()
    outcomes = await reading
    assert [isinstance(outcome.error, Overloaded) for outcome in outcomes] == [False] * 2 + [True] * 4
    world.check_idle()


async def test_a_reader_that_leaves_with_the_last_delta_teaches_as_much():
    world = World(FakeReplica("a"))
    async with aclosing(world.stream(request(max_tokens=3))) as stream:
        async for delta in stream:
            if delta.finish_reason is not None:
                break
    assert len(world.observer.finishes) == 1
    world.check_idle()


async def test_a_replica_that_falls_silent_does_not_outlast_the_deadline():
    world = World(FakeReplica("a", step_s=1000.0))
    wanted = request(max_tokens=5, deadline_unix_s=world.clock.unix() + 2.0)
    started_s = world.clock.now
    outcome = await read(world.stream(wanted))
    assert isinstance(outcome.error, DeadlineExceeded)
    assert world.clock.now - started_s < 10.0
    world.check_idle()


async def test_a_reader_that_lags_beyond_the_deadline_is_not_interrupted():
    world = World(FakeReplica("a", tokens_per_delta=2))
    wanted = request(max_tokens=4, deadline_unix_s=world.clock.unix() + 2.0)
    outcome = Outcome()
    async with aclosing(world.stream(wanted)) as deltas:
        outcome.read(await anext(deltas))
        await asyncio.sleep(10.0)
        assert outcome.finish_reason is None
        with pytest.raises(DeadlineExceeded):
            await anext(deltas)
    world.check_idle()


async def test_a_deadline_on_the_wire_bounds_the_wait():
    world = World(FakeReplica("a", num_slots=1))
    blocking = world.stream(request("first", max_tokens=90))
    await anext(blocking)
    late = await read(world.stream(request("late", deadline_unix_s=world.clock.unix() + 2.0)))
    assert isinstance(late.error, DeadlineExceeded)
    assert world.observer.waits[-1][2] == pytest.approx(2.0)
    await blocking.aclose()
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
