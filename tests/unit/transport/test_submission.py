"""Submission of requests: one call for those that are sent together, and what becomes of those whose readers leave."""

import asyncio
import gc
from contextlib import aclosing
from dataclasses import replace

import pytest

from replicas.engine.outbox import DeltaOutbox
from replicas.errors import NoReplicaAvailable, SequenceFailed
from replicas.protocol import Band, GenerateRequest
from router.transport.submission import Submission
from testkit.engine.shadow_runner import continuation, request
from testkit.limits import LIMIT_S, until
from testkit.router.local_channels import QUICK, calls_of_submissions, read, running_channels, token_ids, until_gone

PROMPT = (1, 2, 3)


def line(number: int) -> GenerateRequest:
    """Return a batch request with a prompt of its own."""
    return replace(request(f"line-{number}", (number,), max_tokens=5), band=Band.BATCH)


async def test_a_stream_that_leaves_is_aborted_although_the_replica_does_not_answer_at_first() -> None:
    async with running_channels(limits=replace(QUICK, retry_s=0.001)) as (client, [replica]):
        reading = asyncio.create_task(read(client, request("staying", max_tokens=100)))
        client.transport.num_lost_aborts = 3
        async with aclosing(client.generate(request("gone", (9,), max_tokens=100), ["replica-0"])) as stream:
            await anext(stream)
        assert [len(each) for each in client.transport.submitted] == [2]
        await until_gone(replica)
        assert not client.transport.num_lost_aborts and not reading.done(), "it has not come to its end"
        await reading


async def test_a_stream_that_leaves_before_a_replica_has_taken_it_is_aborted_then() -> None:
    async with running_channels() as (client, [replica]):
        client.transport.submit_s = 0.05
        neighbour = asyncio.create_task(read(client, request("neighbour", max_tokens=100)))
        gone = asyncio.create_task(read(client, request("gone", (9,), max_tokens=10**6)))
        await until(lambda: client.transport.submitted)
        gone.cancel()
        await until(lambda: replica.engine.stats().num_running)
        await until_gone(replica)
        assert [len(each) for each in client.transport.submitted] == [2] and not neighbour.done()
        assert token_ids(await neighbour) == continuation(PROMPT, 100)


async def test_a_stream_that_leaves_before_it_is_submitted_is_not_sent() -> None:
    async with running_channels(limits=replace(QUICK, batching_delay_s=0.02)) as (client, _):
        gone = asyncio.create_task(read(client, replace(request("gone", max_tokens=10**6), band=Band.BATCH)))
        staying = asyncio.create_task(read(client, replace(request("staying", max_tokens=5), band=Band.BATCH)))
        await asyncio.sleep(0)
        gone.cancel()
        assert token_ids(await staying) == continuation(PROMPT, 5)
        assert [len(each) for each in client.transport.submitted] == [1]


async def test_batch_requests_wait_for_others_and_no_longer_when_an_urgent_one_comes() -> None:
    async with running_channels(limits=replace(QUICK, batching_delay_s=LIMIT_S)) as (client, _):
        batch = [asyncio.create_task(read(client, line(number))) for number in range(3)]
        await asyncio.sleep(0.01)
        assert not client.transport.submitted
        assert token_ids(await read(client, request("urgent", max_tokens=5))) == continuation(PROMPT, 5)
        for number, each in enumerate(batch):
            assert token_ids(await each) == continuation((number,), 5)
        assert [len(each) for each in client.transport.submitted] == [4]


@pytest.mark.parametrize("is_refused", [False, True])
async def test_batch_requests_wait_while_a_call_before_them_is_on_its_way(is_refused: bool) -> None:
    async with running_channels(limits=replace(QUICK, batching_delay_s=0.0, batching_delay_in_flight_s=LIMIT_S)) as (
        client,
        [replica],
    ):
        client.transport.is_open.clear()
        first = asyncio.create_task(read(client, line(0)))
        await until(lambda: client.transport.submitted)
        others = [asyncio.create_task(read(client, line(number))) for number in range(1, 6)]
        await asyncio.sleep(0.01)
        others.pop().cancel()
        if is_refused:
            client.replicas.clear()
        client.transport.is_open.set()
        if is_refused:
            with pytest.raises(NoReplicaAvailable):
                await first
            client.replicas[replica.replica_id] = replica
        else:
            assert token_ids(await first) == continuation((0,), 5)
        for number, each in enumerate(others, 1):
            assert token_ids(await each) == continuation((number,), 5)
        assert [len(each) for each in client.transport.submitted] == [1, 4]
        assert not client.pool._on_way


async def test_no_batch_request_waits_for_long_behind_a_call() -> None:
    async with running_channels(limits=replace(QUICK, batching_delay_s=0.0, batching_delay_in_flight_s=0.01)) as (
        client,
        _,
    ):
        client.transport.is_open.clear()
        reading = [asyncio.create_task(read(client, line(0)))]
        await until(lambda: client.transport.submitted)
        reading.append(asyncio.create_task(read(client, line(1))))
        await until(lambda: len(client.transport.submitted) == 2)
        client.transport.is_open.set()
        for number, each in enumerate(reading):
            assert token_ids(await each) == continuation((number,), 5)


async def test_one_call_submits_so_many_requests_and_tokens_and_no_more() -> None:
    limits = replace(QUICK, max_submitted=3, max_submitted_tokens=10)
    async with running_channels(limits=limits) as (client, _):
        sizes = (1, 1, 1, 1, 9, 1, 30, 2)
        asked = [request(f"r{n}", (n,) * size, max_tokens=3) for n, size in enumerate(sizes)]
        outputs = await asyncio.gather(*(read(client, each) for each in asked))
        for each, deltas in zip(asked, outputs, strict=True):
            assert token_ids(deltas) == continuation(each.prompt_token_ids, 3)
        submitted = [[len(one.prompt_token_ids) for _, one in each] for each in client.transport.submitted]
        assert submitted == [[1, 1, 1], [1, 9], [1], [30], [2]]


async def test_batch_requests_beyond_a_full_call_wait_behind_it() -> None:
    limits = replace(QUICK, batching_delay_s=0.0, batching_delay_in_flight_s=LIMIT_S, max_submitted=2)
    async with running_channels(limits=limits) as (client, _):
        client.transport.is_open.clear()
        reading = [asyncio.create_task(read(client, line(number))) for number in range(3)]
        await until(lambda: client.transport.submitted)
        reading.append(asyncio.create_task(read(client, line(3))))
        await asyncio.sleep(0.01)
        client.transport.is_open.set()
        for number, each in enumerate(reading):
            assert token_ids(await each) == continuation((number,), 5)
        assert [len(each) for each in client.transport.submitted] == [2, 2]


async def test_a_submission_that_has_ended_is_not_kept() -> None:
    async with running_channels() as (client, _):
        gc.collect()
        gc.disable()
        try:
            await read(client, request(max_tokens=5))
            await until(lambda: not calls_of_submissions())
            assert not [each for each in gc.get_objects() if type(each) is Submission]
        finally:
            gc.enable()


async def test_a_fault_with_one_request_of_a_call_fails_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_channels() as (client, [replica]):
        generate_into = replica.engine.generate_into

        async def faulty(asked: GenerateRequest, outbox: DeltaOutbox, number: int) -> None:
            if asked.request_id == "faulty":
                raise ValueError("a fault")
            await generate_into(asked, outbox, number)

        monkeypatch.setattr(replica.engine, "generate_into", faulty)
        right = asyncio.create_task(read(client, request("right", max_tokens=50)))
        with pytest.raises(SequenceFailed, match="ValueError: a fault"):
            await read(client, request("faulty", (9,), max_tokens=50))
        assert [len(each) for each in client.transport.submitted] == [2]
        assert token_ids(await right) == continuation(PROMPT, 50)
