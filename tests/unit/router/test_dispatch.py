import asyncio
import random

import pytest

from replicas.errors import DeadlineExceeded, EngineDead, ReplicaLost, RequestQuarantined
from replicas.protocol import Band, FinishReason
from router.dispatch import Dispatcher
from router.flow_control import FlowController, FlowLimits
from router.flow_queue import BandLimits
from router.load_table import LoadTable
from router.policy import LeastTokens
from tests.unit.router.fakes import FakeClient, FakeClock, FakeReplica, SilentObserver, request

LIMITS = FlowLimits(dict.fromkeys(Band, BandLimits(max_requests=1000, max_tokens=1_000_000)))


def dispatcher(
    client: FakeClient, clock: FakeClock | None = None, observer: SilentObserver | None = None, **options
) -> Dispatcher:
    clock = clock or FakeClock()
    observer = observer or SilentObserver()
    table = LoadTable(clock)
    flow = FlowController(LIMITS, table, LeastTokens(random.Random(0)), observer, clock)
    return Dispatcher(client, flow, table, observer, **options)


def in_flight(dispatcher: Dispatcher) -> dict[str, int]:
    return {view.stats.replica_id: view.num_in_flight for view in dispatcher.load()}


async def collect(stream) -> list:
    return [delta async for delta in stream]


async def test_a_stream_is_every_delta_in_order():
    d = dispatcher(FakeClient.of(FakeReplica("a")))
    [stream] = d.start([request()])
    deltas = await collect(stream)
    assert [delta.token_ids for delta in deltas] == [(0,), (1,), (2,)]
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert in_flight(d) == {"a": 0}


async def test_requests_spread_over_replicas_by_what_is_in_flight():
    client = FakeClient.of(FakeReplica("a"), FakeReplica("b"))
    d = dispatcher(client)
    streams = [d.start([request(str(i))])[0] for i in range(8)]
    await asyncio.gather(*(collect(stream) for stream in streams))
    assert client.served() == {"a": 4, "b": 4}
    assert in_flight(d) == {"a": 0, "b": 0}


async def test_samples_of_one_prompt_go_to_one_replica():
    client = FakeClient.of(FakeReplica("a"), FakeReplica("b"), FakeReplica("c"))
    d = dispatcher(client)
    await asyncio.gather(*(collect(stream) for stream in d.start([request(str(i)) for i in range(4)])))
    assert sorted(client.served().values()) == [0, 0, 4]


async def test_closing_a_stream_aborts_its_request():
    replica = FakeReplica("a", has_endless_steps=True)
    d = dispatcher(FakeClient.of(replica))
    [stream] = d.start([request()])
    await anext(stream)
    assert in_flight(d) == {"a": 1}
    assert replica.num_running == 1
    await stream.aclose()
    assert in_flight(d) == {"a": 0}
    assert replica.num_running == 0


async def test_cancelling_the_reader_aborts_its_request():
    replica = FakeReplica("a", has_endless_steps=True)
    d = dispatcher(FakeClient.of(replica))
    [stream] = d.start([request()])
    reader = asyncio.create_task(collect(stream))
    while not replica.num_running:
        await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert replica.num_running == 0
    assert in_flight(d) == {"a": 0}


async def test_a_stream_that_was_never_read_counts_nowhere():
    d = dispatcher(FakeClient.of(FakeReplica("a")))
    [stream] = d.start([request()])
    await stream.aclose()
    await d.refresh()
    assert in_flight(d) == {"a": 0}


@pytest.mark.parametrize("fail_at", [0, 1, 2])
@pytest.mark.parametrize("is_error_in_delta", [False, True])
@pytest.mark.parametrize("error", [ReplicaLost("gone"), EngineDead("dead")])
async def test_a_request_survives_its_replica_and_the_client_sees_one_stream(error, is_error_in_delta, fail_at):
    bad = FakeReplica("bad", fail_at=fail_at, error=error, is_error_in_delta=is_error_in_delta)
    good = FakeReplica("good", num_running=1)
    observer = SilentObserver()
    d = dispatcher(FakeClient.of(bad, good), observer=observer)
    for attempt in range(12):
        [stream] = d.start([request(str(attempt))])
        deltas = [delta for delta in await collect(stream) if delta.token_ids]
        assert [(delta.start, delta.token_ids) for delta in deltas] == [(0, (0,)), (1, (1,)), (2, (2,))]
        await d.refresh()
    assert bad.num_started >= 1
    assert set(observer.migrations) == {"resumed" if fail_at else "restarted"}
    await d.refresh()
    assert set(in_flight(d).values()) == {0}


async def test_a_request_that_kills_every_replica_is_refused_for_good():
    client = FakeClient.of(*(FakeReplica(i, fail_at=0, error=EngineDead("dead")) for i in ("a", "b", "c", "d")))
    observer = SilentObserver()
    [stream] = dispatcher(client, observer=observer).start([request()])
    with pytest.raises(RequestQuarantined):
        await collect(stream)
    assert len(client.rankings) == 3
    assert observer.migrations[-1] == "failed"


async def test_a_stream_that_just_ends_goes_on_elsewhere():
    client = FakeClient.of(FakeReplica("a", fail_at=1), FakeReplica("b"))
    d = dispatcher(client)
    for attempt in range(4):
        [stream] = d.start([request(str(attempt))])
        assert sum(len(delta.token_ids) for delta in await collect(stream)) == 3
        await d.refresh()


async def test_other_errors_are_raised_and_not_retried():
    error = DeadlineExceeded("late")
    client = FakeClient.of(
        FakeReplica("a", fail_at=0, error=error), FakeReplica("b", fail_at=0, error=error, is_error_in_delta=True)
    )
    for attempt in range(4):
        [stream] = dispatcher(client).start([request(str(attempt))])
        with pytest.raises(DeadlineExceeded):
            await collect(stream)
    assert len(client.rankings) == 4


async def test_the_poll_survives_failures_and_forgets_what_vanished():
    client = FakeClient.of(FakeReplica("a"), FakeReplica("b"))
    clock = FakeClock()
    d = dispatcher(client, clock, poll_period_s=0.0)
    poll = asyncio.create_task(d.run())
    while client.num_polls < 2:
        await asyncio.sleep(0)
    assert sorted(in_flight(d)) == ["a", "b"]
    client.poll_error = ReplicaLost("no answer")
    failed_from = client.num_polls
    while client.num_polls < failed_from + 2:
        await asyncio.sleep(0)
    assert sorted(in_flight(d)) == ["a", "b"]
    client.poll_error = None
    del client.replicas["a"]
    while "a" in in_flight(d):
        clock.now += 1
        await asyncio.sleep(0)
    poll.cancel()
    with pytest.raises(asyncio.CancelledError):
        await poll
