"""Channels between ingresses and replicas: one carries all deltas of an ingress's streams on a replica."""

import asyncio
import contextlib
import random
from contextlib import aclosing
from dataclasses import replace

import pytest

from replicas.engine.outbox import Coalescing, FlushPolicy
from replicas.errors import ReplicaLost, SequenceFailed
from replicas.protocol import FinishReason, PhaseSeconds, PositionLogprobs, TokenDelta, TokenLogprob, Usage, merge
from replicas.transport.channels import ChannelWaits, Credits
from replicas.transport.wire import WINDOW_BATCHES, ChannelId, DeltaBatch, StreamFailure, decoded, encoded
from router.transport.submission import ChannelLimits
from testkit.engine.shadow_runner import continuation, request
from testkit.engine.single_stream import generate
from testkit.limits import LIMIT_S, until
from testkit.router.channel_worlds import ChannelWorld
from testkit.router.local_channels import QUICK, read, running_channels, token_ids, until_gone
from testkit.router.simulated_replicas import stats
from tests.seeds import Seeds

PROMPT = (1, 2, 3)


LOGPROBS = (PositionLogprobs(TokenLogprob(7, -0.5), (TokenLogprob(7, -0.5), TokenLogprob(8, -1.5))),)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": LOGPROBS},
        {"prompt_logprobs": LOGPROBS},
        {"finish_reason": FinishReason.STOP, "stop_reason": "end"},
        {"finish_reason": FinishReason.STOP, "stop_reason": 0},
        {"finish_reason": FinishReason.ERROR, "error": SequenceFailed("it failed")},
        {"phases": PhaseSeconds(1.0, 2.0, 3.0, 4.0, 5)},
    ],
)
def test_a_delta_comes_out_of_a_batch_as_it_went_in(fields) -> None:
    sent = TokenDelta("r", 3, (7,), "x", Usage(1, 2, 3, 4, 5, 0.5), **fields)
    load = stats("a", taken=1.0)
    batch = decoded(encoded(DeltaBatch(load, [(5, sent)])))
    [(number, got)] = batch.deltas
    assert number == 5 and batch.stats == load
    assert repr(got.error) == repr(sent.error)
    assert got._replace(error=None) == sent._replace(error=None)


async def test_many_streams_share_one_channel_and_one_message_a_flush() -> None:
    async with running_channels(coalescing=Coalescing(FlushPolicy(0.02, 1000))) as (client, [replica]):
        asked = [request(f"r{n}", (1, 2, n), max_tokens=60) for n in range(16)]
        outputs = await asyncio.gather(*(read(client, each) for each in asked))
        for each, deltas in zip(asked, outputs, strict=True):
            assert token_ids(deltas) == continuation(each.prompt_token_ids, 60)
            assert {delta.request_id for delta in deltas} == {each.request_id}
            assert all(delta.stats is not None and delta.stats.replica_id == "replica-0" for delta in deltas)
        assert replica.num_batches < sum(map(len, outputs)) / 2
        assert len(client.pool._channels) == 1


async def test_a_channel_changes_nothing_in_what_a_reply_is_made_of() -> None:
    def whole(deltas: list[TokenDelta]) -> TokenDelta:
        merged = merge(deltas)
        counts = Usage(merged.usage.prompt_tokens, merged.usage.completion_tokens, 0)
        return merged._replace(usage=counts, stats=None, phases=None)

    async with running_channels() as (client, [replica]):
        plain, scored = request(max_tokens=30), request(prompt_logprobs=0, max_tokens=20)
        for asked in (plain, scored, request(max_tokens=10**6), replace(plain, output_token_ids=(4, 5))):
            direct = [delta async for delta in generate(replica.engine, asked)]
            assert repr(whole(await read(client, asked))) == repr(whole(direct))


async def test_a_slow_reader_holds_up_no_other_stream_and_gets_what_waited_in_one_delta() -> None:
    async with (
        running_channels() as (client, _),
        aclosing(client.generate(request("slow", max_tokens=80), ["replica-0"])) as slow,
    ):
        first = await anext(slow)
        others = await asyncio.gather(*(read(client, request(f"r{n}", (n,), max_tokens=40)) for n in range(5)))
        assert all(len(token_ids(deltas)) == 40 for deltas in others)
        await until(lambda: client.pool._channels and all(each.is_whole for each in client.replicas.values()))
        rest = [delta async for delta in slow]
        assert token_ids([first, *rest]) == continuation(PROMPT, 80) and len(rest) <= 3


async def test_closing_a_stream_frees_its_blocks_and_no_others() -> None:
    async with running_channels() as (client, [replica]):
        neighbour = asyncio.create_task(read(client, request("neighbour", max_tokens=100)))
        async with aclosing(client.generate(request("gone", (9,), max_tokens=100), ["replica-0"])) as stream:
            await anext(stream)
        await until_gone(replica)
        assert [len(each) for each in client.transport.submitted] == [2] and not neighbour.done()
        assert token_ids(await neighbour) == continuation(PROMPT, 100)
        await until(lambda: replica.is_whole)


async def test_a_call_that_comes_twice_takes_the_place_of_the_first_and_leaves_no_stream() -> None:
    async with running_channels() as (_, [replica]):
        channel_id = ChannelId("twice", 1)
        asked = [(number, request(f"r{number}", (number,), max_tokens=100)) for number in range(4)]
        reading = replica.channels.read(channel_id)
        calls = [replica.channels.submit(asked, channel_id) for _ in range(2)]
        for call in calls:
            assert await anext(call) == "replica-0"
        batch = await anext(reading)
        assert batch.deltas
        await until(lambda: replica.engine.stats().num_running == 4)
        for call in calls:
            await call.aclose()
        await until(lambda: replica.is_whole)
        await reading.aclose()


async def test_a_call_that_ends_before_the_channel_has_a_reader_ends_no_other_one() -> None:
    async with running_channels() as (_, [replica]):
        channel_id = ChannelId("early", 1)
        first = replica.channels.submit([(1, request("first", max_tokens=50))], channel_id)
        second = replica.channels.submit([(2, request("second", (9,), max_tokens=50))], channel_id)
        await anext(first)
        await asyncio.gather(first.aclose(), anext(second))
        ending = asyncio.create_task(anext(second, None))
        tokens: list[int] = []
        async with aclosing(replica.channels.read(channel_id)) as batches:
            num_batches = 0
            async for batch in batches:
                tokens += [token_id for _, delta in batch.deltas for token_id in delta.token_ids]
                if len(tokens) == 50:
                    break
                num_batches += 1
                replica.channels.acknowledge(channel_id, num_batches)
        assert tuple(tokens) == continuation((9,), 50)
        assert await ending is None, "no stream has failed"


async def test_batches_leave_as_they_are_acknowledged_and_deltas_merge_meanwhile() -> None:
    async with running_channels() as (_, [replica]):
        channel_id, batches = ChannelId("slow", 1), asyncio.Queue[DeltaBatch]()
        call = replica.channels.submit([(1, request("slow", max_tokens=60))], channel_id)
        await anext(call)

        async def read_all() -> None:
            async with aclosing(replica.channels.read(channel_id)) as arriving:
                async for batch in arriving:
                    batches.put_nowait(batch)

        reading, ending = asyncio.create_task(read_all()), asyncio.create_task(anext(call, None))
        await until(lambda: batches.qsize() == WINDOW_BATCHES)
        await until(lambda: replica.engine.stats().num_running == 0)
        assert batches.qsize() == WINDOW_BATCHES
        replica.channels.acknowledge(channel_id, 1)
        assert await asyncio.wait_for(ending, LIMIT_S) is None
        taken = [batches.get_nowait() for _ in range(batches.qsize())]
        token_ids = [token_id for batch in taken for _, delta in batch.deltas for token_id in delta.token_ids]
        assert tuple(token_ids) == continuation(PROMPT, 60), "what waited left together"
        reading.cancel()


async def test_lost_acknowledgements_are_repeated() -> None:
    async with running_channels(limits=replace(QUICK, retry_s=0.01)) as (client, [replica]):
        client.transport.num_lost_acknowledgements = 3
        deltas = await read(client, request(max_tokens=100))
        assert token_ids(deltas) == continuation(PROMPT, 100)
        assert replica.num_batches > WINDOW_BATCHES and not client.transport.num_lost_acknowledgements


@pytest.mark.random_worlds(50, per_call=10)
def test_credits_bound_the_batches_on_their_way(seeds: Seeds) -> None:
    for seed in seeds:
        rng, credits = random.Random(seed), Credits()
        num_sent = 0
        for _ in range(200):
            if rng.random() < 0.6 and credits.has_credit:
                credits.spend()
                num_sent += 1
            else:
                credits.acknowledge(rng.randrange(num_sent + 3))
            credits.check_invariants()
        credits.acknowledge(num_sent)
        assert credits.has_credit, "nothing is on its way"


async def test_a_call_without_a_reader_that_is_cancelled_twice_leaves_no_channel() -> None:
    async with running_channels() as (_, [replica]):
        calling = replica.channels.submit([(1, request(max_tokens=10**6))], ChannelId("ingress", 1))
        await anext(calling)
        ending = asyncio.create_task(anext(calling))
        for _ in range(2):
            await asyncio.sleep(0)
            ending.cancel()
        await asyncio.wait([ending])
        await until(lambda: not replica.channels._channels)


async def test_the_death_of_a_replica_ends_all_its_streams_also_one_that_is_just_being_sent() -> None:
    async with running_channels(2) as (client, [replica, _]):
        streams = [client.generate(request(f"r{n}", (n,), max_tokens=100), ["replica-0"]) for n in range(4)]
        for stream in streams:
            await anext(stream)
        sent = asyncio.create_task(read(client, request("sent", max_tokens=100)))
        await asyncio.sleep(0)
        replica.die()
        for stream in streams:
            with pytest.raises(ReplicaLost) as lost:
                _ = [delta async for delta in stream]
            assert lost.value.has_died
        # It goes to another replica, or is lost with this one.
        with contextlib.suppress(ReplicaLost):
            assert token_ids(await sent) == continuation(PROMPT, 100)


async def test_a_replica_that_is_stopped_in_order_has_not_died() -> None:
    async with running_channels(2) as (client, [replica, _]):
        client.stopping.add("replica-0")
        async with aclosing(client.generate(request(max_tokens=100), ["replica-0"])) as stream:
            first = await anext(stream)
            assert first.stats is not None and first.stats.is_draining
            replica.die()
            with pytest.raises(ReplicaLost) as lost:
                _ = [delta async for delta in stream]
            assert not lost.value.has_died


async def test_a_request_that_another_replica_takes_is_read_from_there() -> None:
    async with running_channels(2) as (client, [_, other]):
        client.transport.refused.add("replica-0")
        outputs = await asyncio.gather(*(read(client, request(f"r{n}", (n,), max_tokens=9)) for n in range(4)))
        for number, deltas in enumerate(outputs):
            assert token_ids(deltas) == continuation((number,), 9)
            assert {delta.stats.replica_id for delta in deltas if delta.stats} == {other.replica_id}


async def test_streams_whose_channel_breaks_fail_and_leave_the_replica() -> None:
    async with running_channels() as (client, [replica]):
        streams = [client.generate(request(f"r{n}", (n,), max_tokens=100), ["replica-0"]) for n in range(3)]
        for stream in streams:
            await anext(stream)
        replica.break_channels()
        for stream in streams:
            with pytest.raises(ReplicaLost) as lost:
                _ = [delta async for delta in stream]
            assert not lost.value.has_died
        assert token_ids(await read(client, request(max_tokens=9))) == continuation(PROMPT, 9)


async def test_a_channel_that_nobody_reads_ends_and_frees_its_streams() -> None:
    async with running_channels(waits=ChannelWaits(reader_s=0.05)) as (_, [replica]):
        call = replica.channels.submit([(1, request(max_tokens=100))], ChannelId("gone", 1))
        async with asyncio.timeout(LIMIT_S):
            assert await anext(call) == "replica-0"
            [failure] = [answer async for answer in call]
        assert isinstance(failure, StreamFailure) and failure.number == 1
        assert isinstance(failure.error, ReplicaLost) and not failure.error.has_died
        assert not replica.channels._channels


async def test_the_streams_of_a_lost_ingress_leave_the_replica() -> None:
    async with running_channels() as (client, [replica]):
        client.transport.is_cut = True
        async with aclosing(client.generate(request(max_tokens=100), ["replica-0"])) as stream:
            await anext(stream)
        assert replica.engine.stats().num_running == 1
        replica.lost_ingresses.add("ingress")
        await until(lambda: replica.is_whole)


async def test_a_channel_of_a_lost_ingress_ends_while_it_is_idle_and_while_its_streams_are_silent() -> None:
    async with running_channels(waits=ChannelWaits(LIMIT_S, 0.05)) as (client, [replica]):
        client.transport.is_cut = True
        await read(client, request(max_tokens=5))
        assert replica.channels._channels
        await until(lambda: not replica.channels._channels)
        silent = replace(request(max_tokens=100), delta_interval_s=LIMIT_S)
        async with aclosing(client.generate(silent, ["replica-0"])) as stream:
            await anext(stream)
        replica.lost_ingresses.add("ingress")
        await until(lambda: not replica.channels._channels and replica.is_whole)


async def test_a_request_that_is_long_on_its_way_finds_its_channel_open() -> None:
    async with running_channels(waits=ChannelWaits(LIMIT_S, 0.02)) as (client, [replica]):
        client.transport.submit_s = 0.2
        assert token_ids(await read(client, request(max_tokens=5))) == continuation(PROMPT, 5)
        assert replica.num_batches > 0


async def test_closing_the_ingress_closes_its_channels() -> None:
    async with running_channels(limits=ChannelLimits(idle_s=LIMIT_S)) as (client, [replica]):
        await read(client, request(max_tokens=5))
        client.pool.close()
        await until(lambda: not replica.channels._channels)


async def test_a_stream_whose_last_delta_is_lost_fails_after_a_while() -> None:
    async with running_channels() as (client, [replica]):
        stream = client.generate(request(max_tokens=50), ["replica-0"])
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        [channel] = client.pool._channels.values()
        channel.deliver = lambda batch: None  # type: ignore[method-assign]
        with pytest.raises(ReplicaLost, match="last tokens"):
            await asyncio.wait_for(reading, LIMIT_S)
        await until(lambda: replica.is_whole)


async def test_an_idle_channel_is_closed_and_the_next_request_opens_another() -> None:
    async with running_channels() as (client, [replica]):
        for _ in range(2):
            assert token_ids(await read(client, request(max_tokens=5))) == continuation(PROMPT, 5)
            assert client.pool._channels
            await until(lambda: not client.pool._channels and not replica.channels._channels)


@pytest.mark.random_worlds(60, per_call=5)
async def test_every_stream_has_an_owner_and_every_block_comes_back(seeds: Seeds) -> None:
    num_right = 0
    for seed in seeds:
        world = ChannelWorld(seed)
        await world.run()
        num_right += world.num_right
    assert num_right > 0 or not seeds.are_many
