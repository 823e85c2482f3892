import asyncio
import random

import pytest

from replicas.errors import DeadlineExceeded, EngineDead, NoReplicaAvailable, Overloaded, ReplicaLost
from replicas.protocol import FinishReason
from router.dispatch import Dispatcher
from router.load_table import LoadTable
from router.policy import LeastOutstanding
from tests.unit.router.fakes import FakeClient, FakeClock, FakeReplica, request


def dispatcher(client: FakeClient, clock: FakeClock | None = None, **options) -> Dispatcher:
    return Dispatcher(client, LeastOutstanding(random.Random(0)), LoadTable(clock or FakeClock()), **options)


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


async def test_a_group_goes_to_one_replica():
    client = FakeClient.of(FakeReplica("a"), FakeReplica("b"), FakeReplica("c"))
    d = dispatcher(client)
    await asyncio.gather(*(collect(stream) for stream in d.start([request(str(i)) for i in range(6)])))
    assert sorted(client.served().values()) == [0, 0, 6]


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


@pytest.mark.parametrize("is_error_in_delta", [False, True])
@pytest.mark.parametrize("error", [ReplicaLost("gone"), EngineDead("dead")])
async def test_a_replica_lost_before_any_output_is_replaced_unseen(error, is_error_in_delta):
    bad = FakeReplica("bad", fail_at=0, error=error, is_error_in_delta=is_error_in_delta)
    good = FakeReplica("good", num_running=1)
    d = dispatcher(FakeClient.of(bad, good))
    [stream] = d.start([request()])
    assert len(await collect(stream)) == 3
    assert (bad.num_started, good.num_started) == (1, 1)
    await d.refresh()
    assert set(in_flight(d).values()) == {0}


async def test_a_second_loss_is_raised():
    client = FakeClient.of(*(FakeReplica(i, fail_at=0, error=ReplicaLost("gone")) for i in ("a", "b", "c")))
    [stream] = dispatcher(client).start([request()])
    with pytest.raises(ReplicaLost):
        await collect(stream)
    assert len(client.rankings) == 2
    assert client.rankings[0][0] not in client.rankings[1]


async def test_a_loss_after_output_is_raised():
    client = FakeClient.of(
        FakeReplica("a", fail_at=1, error=ReplicaLost("gone")), FakeReplica("b", fail_at=1, error=ReplicaLost("gone"))
    )
    d = dispatcher(client)
    [stream] = d.start([request()])
    assert (await anext(stream)).token_ids == (0,)
    with pytest.raises(ReplicaLost):
        await anext(stream)
    assert len(client.rankings) == 1
    await d.refresh()
    assert set(in_flight(d).values()) == {0}


async def test_a_stream_that_just_ends_is_a_lost_replica():
    client = FakeClient.of(FakeReplica("a", fail_at=1))
    [stream] = dispatcher(client).start([request()])
    with pytest.raises(ReplicaLost):
        await collect(stream)


@pytest.mark.parametrize("error", [Overloaded("full"), DeadlineExceeded("late")])
async def test_other_errors_are_raised_and_not_retried(error):
    client = FakeClient.of(
        FakeReplica("a", fail_at=0, error=error), FakeReplica("b", fail_at=0, error=error, is_error_in_delta=True)
    )
    for attempt in range(4):
        [stream] = dispatcher(client).start([request(str(attempt))])
        with pytest.raises(type(error)):
            await collect(stream)
    assert len(client.rankings) == 4


async def test_without_any_replica_a_request_is_refused():
    [stream] = dispatcher(FakeClient.of()).start([request()])
    with pytest.raises(NoReplicaAvailable):
        await collect(stream)


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
