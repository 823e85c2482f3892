"""A request's way through flow control to a replica and back, while no replica is lost."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from replicas.errors import DeadlineExceeded, InvalidRequest, Overloaded, ReplicaLost, SequenceFailed, ServingError
from replicas.protocol import Band, FinishReason, GenerateRequest, TokenDelta
from router.flow.flow_control import FlowLimits
from router.flow.flow_queue import BandLimits
from router.types import Outcome
from testkit.router.dispatch_worlds import MakeWorld, World, read
from testkit.router.flow_worlds import limits
from testkit.router.simulated_replicas import FakeReplica, request, stats, undisturbed
from testkit.router.simulated_time import settle_down

SIX = [request(str(number)) for number in range(6)]


async def test_a_stream_is_the_whole_output_in_order(make_world: MakeWorld):
    world = make_world(FakeReplica("a", tokens_per_delta=3))
    wanted = request(max_tokens=20, prompt_logprobs=0, prompt=tuple(range(1, 8)))
    (await read(world.stream(wanted))).check(wanted)
    assert world.in_flight() == {"a": 0}
    [(band, ttft_s, duration_s, num_tokens)] = world.observer.finishes
    assert (band, num_tokens) == (Band.STANDARD, len(undisturbed(wanted).token_ids))
    assert ttft_s is not None and 0 < ttft_s < duration_s


async def test_requests_spread_over_replicas_by_their_number_in_flight(make_world: MakeWorld):
    world = make_world(FakeReplica("a"), FakeReplica("b"))
    await world.read_all(SIX)
    assert [len(replica.started) for replica in world.replicas] == [3, 3]


async def test_requests_wait_in_the_ingress_and_not_in_replicas(make_world: MakeWorld):
    world = make_world(FakeReplica("a", num_slots=2))
    reading = asyncio.create_task(world.read_all(SIX))
    await asyncio.sleep(0.15)
    assert len(world.replicas[0].running) == 2 and not world.replicas[0].waiting
    assert len(world.flow.queue) == 4
    assert [outcome.finish_reason for outcome in await reading] == [FinishReason.LENGTH] * 6


async def test_samples_of_one_prompt_share_a_replica_with_room(make_world: MakeWorld):
    world = make_world(*(FakeReplica(name, num_slots=6) for name in "abc"))
    streams = world.dispatcher.streams([request(str(number), seed=number) for number in range(6)])
    await asyncio.gather(*map(read, streams))
    assert sorted(len(replica.started) for replica in world.replicas) == [0, 0, 6]


async def test_sequences_of_a_request_that_has_begun_are_not_refused_for_the_wait_behind_each_other(
    make_world: MakeWorld,
):
    """The first is admitted for all: a second such request is refused at once, and as one."""
    tight = FlowLimits({band: BandLimits(100, 10**6, max_wait_s=1.0) for band in Band}, promote_after_s=30.0)
    reports = [stats(slots=2, rate=10.0, running=(0, 0, 0))]
    world = make_world(FakeReplica("a", num_slots=2), known=reports, limits=tight)
    sequences = [request(f"part-{number}", seed=number, prompt=(number, 1, 2)) for number in range(60)]
    reading = asyncio.gather(*map(read, world.dispatcher.streams(sequences)))
    await settle_down()
    assert len(world.flow.queue) == 58 and (world.dispatcher.headroom(Band.STANDARD, "t").wait_s or 0.0) > 1.0
    others = [request(f"other-{number}", seed=number) for number in range(60)]
    refused = await asyncio.gather(*map(read, world.dispatcher.streams(others)))
    assert all(isinstance(outcome.error, Overloaded) for outcome in refused)
    outcomes = [outcome for _, outcome, _ in world.observer.waits]
    assert outcomes == [Outcome.DISPATCHED] * 2 + [Outcome.REJECTED_CAPACITY]
    for outcome, part in zip(await reading, sequences, strict=True):
        outcome.check(part)


async def test_a_request_needs_room_for_its_sequences_together(make_world: MakeWorld):
    small = FlowLimits({band: BandLimits(8, 10**6) for band in Band}, promote_after_s=30.0)
    world = make_world(FakeReplica("a", num_slots=1), limits=small)
    large = [request(f"large-{number}", seed=number) for number in range(20)]
    reading = asyncio.gather(*map(read, world.dispatcher.streams(large)))
    await settle_down()
    assert len(world.flow.queue) > 8, "a request with more sequences than the limit fits if nothing waits"
    [refused] = await world.read_all([request("late")])
    assert isinstance(refused.error, Overloaded) and "standard requests wait; the limit is 8" in str(refused.error)
    assert not any(outcome.error for outcome in await reading)


async def test_requests_carry_the_expected_output(make_world: MakeWorld):
    world = make_world(FakeReplica("a"))
    for number in range(2):
        await read(world.stream(request(str(number), max_tokens=5)))
        await read(world.stream(request(f"long-{number}", max_tokens=500)))
    lengths = [received.expected_output_tokens for received in world.replicas[0].started]
    assert lengths[:2] == [5, 5]
    assert all(length is not None and length <= 500 for length in lengths)


async def test_closing_a_stream_aborts_its_request(make_world: MakeWorld):
    world = make_world(FakeReplica("a"))
    async with aclosing(world.stream(request(max_tokens=100))) as stream:
        await anext(stream)
        assert world.in_flight() == {"a": 1}
    assert world.replicas[0].num_closed == 1


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.25])
async def test_cancelling_the_reader_aborts_its_request(make_world: MakeWorld, after_s: float):
    world = make_world(FakeReplica("a"))
    reader = asyncio.create_task(read(world.stream(request(max_tokens=100))))
    await settle_down()
    await asyncio.sleep(after_s)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert world.replicas[0].num_closed == 1


async def test_a_stream_that_was_never_read_counts_nowhere(make_world: MakeWorld):
    world = make_world(FakeReplica("a"))
    await world.stream(request()).aclose()
    await world.dispatcher.refresh()
    assert world.in_flight() == {"a": 0}


@pytest.mark.parametrize("in_delta", [False, True])
@pytest.mark.parametrize("error", [InvalidRequest("no"), DeadlineExceeded("late"), SequenceFailed("bad token")])
async def test_an_error_of_the_request_itself_is_not_tried_elsewhere(
    make_world: MakeWorld, error: ServingError, in_delta: bool
):
    world = make_world(
        FakeReplica("a", fails_in_delta=in_delta, death=error),
        FakeReplica("b", death=error),
        known=(stats("a"), stats("b")),
    )
    assert (await read(world.stream(request()))).error is error
    assert len(world.client.rankings) == 1


class LaggingReplica(FakeReplica):
    """Replica whose reader lags, and gets its only token and a failure merged into one delta."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        async with aclosing(super().generate(request)) as deltas:
            delta = await anext(deltas)
        yield delta._replace(error=SequenceFailed("bad token"), finish_reason=FinishReason.ERROR)


async def test_output_with_a_failure_is_given_before_the_error(make_world: MakeWorld):
    outcome = await read(make_world(LaggingReplica("a")).stream(request()))
    assert outcome.token_ids == [undisturbed(request()).token_ids[0]]
    assert isinstance(outcome.error, SequenceFailed)


async def test_load_is_learnt_from_deltas():
    world = World(FakeReplica("a"))
    world.replicas[0].running["of another ingress"] = request()
    async with aclosing(world.stream(request())) as stream:
        await anext(stream)
        [known] = world.dispatcher.load()
    assert known.num_by_band == (0, 2, 0) and known.num_in_flight == 1
    assert (known.unseen_tokens, known.outstanding_tokens) == (0, 7), "the prompt and one of eight tokens are done"


async def test_a_request_counts_on_the_replica_that_serves_it(make_world: MakeWorld):
    world = make_world(FakeReplica("a"), FakeReplica("b"), known=[stats("vanished")])
    async with aclosing(world.stream(request())) as stream:
        await anext(stream)
        assert world.client.rankings == [["vanished"]]
        assert world.in_flight() == {"a": 1}, "and the one it was meant for gets nothing until it reports again"


async def test_an_idle_replica_is_found_by_the_first_request(make_world: MakeWorld):
    world = make_world(FakeReplica("a"))
    (await read(world.stream(request()))).check(request())
    assert world.client.num_polls == 1


async def test_a_request_waits_for_the_first_replica(make_world: MakeWorld):
    world = make_world(is_polled=True)
    world.client.poll_error = ReplicaLost("nobody there")
    reading = asyncio.create_task(read(world.stream(request())))
    await asyncio.sleep(60)
    world.client.poll_error = None
    world.client.add(FakeReplica("new"))
    (await reading).check(request())
    assert world.observer.waits[0][2] == pytest.approx(60, abs=1.01), "within one poll of its being there"


async def test_limits_hold_before_any_replica_is_known(make_world: MakeWorld):
    world = make_world(limits=limits(max_requests=2))
    reading = asyncio.create_task(world.read_all(SIX))
    await settle_down()
    assert len(world.flow.queue) == 2
    world.client.add(FakeReplica("new"))
    await world.dispatcher.refresh()
    assert [isinstance(outcome.error, Overloaded) for outcome in await reading] == [False] * 2 + [True] * 4


async def test_leaving_with_the_last_delta_still_records_the_output(make_world: MakeWorld):
    world = make_world(FakeReplica("a"))
    async with aclosing(world.stream(request(max_tokens=3))) as stream:
        async for delta in stream:
            if delta.finish_reason is not None:
                break
    assert len(world.observer.finishes) == 1


async def test_the_deadline_ends_a_request_on_a_silent_replica(make_world: MakeWorld):
    world = make_world(FakeReplica("a", step_s=1000.0))
    started_s = world.clock.now
    outcome = await read(world.stream(request(max_tokens=5, deadline_unix_s=world.clock.unix() + 2.0)))
    assert isinstance(outcome.error, DeadlineExceeded)
    assert world.clock.now - started_s < 10.0


async def test_a_reader_slower_than_the_deadline_is_not_interrupted(make_world: MakeWorld):
    world = make_world(FakeReplica("a", tokens_per_delta=2))
    async with aclosing(world.stream(request(max_tokens=4, deadline_unix_s=world.clock.unix() + 2.0))) as deltas:
        assert (await anext(deltas)).finish_reason is None
        await asyncio.sleep(10.0)
        with pytest.raises(DeadlineExceeded):
            await anext(deltas)


async def test_a_deadline_on_the_wire_bounds_the_wait(make_world: MakeWorld):
    world = make_world(FakeReplica("a", num_slots=1))
    async with aclosing(world.stream(request("first", max_tokens=90))) as blocking:
        await anext(blocking)
        late = await read(world.stream(request("late", deadline_unix_s=world.clock.unix() + 2.0)))
    assert isinstance(late.error, DeadlineExceeded)
    assert world.observer.waits[-1][2] == pytest.approx(2.0)


async def test_the_poll_survives_failures_and_forgets_lost_replicas(make_world: MakeWorld):
    world = make_world(FakeReplica("a"), FakeReplica("b"), is_polled=True)
    await asyncio.sleep(1.5)
    assert world.in_flight() == {"a": 0, "b": 0}
    world.client.poll_error = ReplicaLost("no answer")
    await asyncio.sleep(5)
    assert world.in_flight() == {"a": 0, "b": 0}
    world.client.poll_error = None
    del world.client.replicas["a"]
    await asyncio.sleep(1)
    assert world.in_flight() == {"b": 0}, "within one period"
