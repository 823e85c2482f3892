"""Streams over the engine thread."""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.cpu_sharing import do_not_interrupt_others
from replicas.engine.async_engine import AsyncEngine, Coalescing, Rhythm
from replicas.engine.batch import ItemResult, ScheduledBatch
from replicas.engine.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.interfaces import IncrementalDecoder
from replicas.errors import EngineDead, InvalidRequest, NoReplicaAvailable, Overloaded, SequenceFailed
from replicas.protocol import Band, FinishReason, GenerateRequest, TokenDelta
from tests.limits import LIMIT_S
from tests.unit.engine.worlds import IDENTITY, ShadowRunner, config, continuation, decoders, request


@asynccontextmanager
async def running(
    engine_config: EngineConfig | None = None, coalescing: Coalescing | None = None, runner: ShadowRunner | None = None
) -> AsyncGenerator[AsyncEngine, None]:
    engine_config = engine_config or config()
    runner = runner or ShadowRunner(engine_config.block_size)
    engine = AsyncEngine(Engine(engine_config, runner, decoders, IDENTITY), coalescing or Coalescing())
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def collect(engine: AsyncEngine, asked: GenerateRequest) -> list[TokenDelta]:
    return [delta async for delta in engine.generate(asked)]


async def until_idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(LIMIT_S):
        while engine.stats().num_running or engine.stats().num_waiting:
            await asyncio.sleep(0.001)


class GatedRunner(ShadowRunner):
    """Computes a step only when let through, so that a test decides what happens between two."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        self.entered.release()
        self.gate.acquire(timeout=LIMIT_S)
        return super().execute(batch)


async def test_streams_run_together_and_each_is_right() -> None:
    async with running() as engine:
        requests = [request(f"r{n}", tuple(range(n, n + 5)), max_tokens=10) for n in range(12)]
        streams = await asyncio.gather(*(collect(engine, asked) for asked in requests))
    for asked, deltas in zip(requests, streams, strict=True):
        token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        assert token_ids == continuation(asked.prompt_token_ids, 10)
        assert [delta.finish_reason for delta in deltas].count(FinishReason.LENGTH) == 1
        assert deltas[-1].finish_reason is FinishReason.LENGTH and deltas[-1].stats is not None


async def test_deltas_merge_while_the_reader_lags() -> None:
    async with running() as engine, aclosing(engine.generate(request(max_tokens=50))) as stream:
        deltas = [await anext(stream)]
        await until_idle(engine)
        deltas += [delta async for delta in stream]
    assert sum(len(delta.token_ids) for delta in deltas) == 50
    # Between the engine's being idle and its last deltas' being delivered we may read once.
    assert len(deltas) <= 3 and deltas[-1].finish_reason is FinishReason.LENGTH


async def test_coalesced_stream_sends_the_first_token_at_once_and_then_several() -> None:
    runner = GatedRunner(4)
    async with (
        running(coalescing=Coalescing(Rhythm(interval_s=60.0, num_tokens=4)), runner=runner) as engine,
        aclosing(engine.generate(request(max_tokens=11))) as stream,
    ):
        runner.gate.release()
        sizes = [len((await anext(stream)).token_ids)]
        runner.gate.release(10)
        sizes += [len(delta.token_ids) async for delta in stream]
    assert sizes[0] == 1 and sum(sizes) == 11
    assert all(size >= 4 for size in sizes[1:-1])


async def test_coalescing_waits_no_longer_than_its_interval() -> None:
    runner = GatedRunner(4)
    async with (
        running(coalescing=Coalescing(Rhythm(interval_s=0.01, num_tokens=1000)), runner=runner) as engine,
        aclosing(engine.generate(request(max_tokens=3))) as stream,
    ):
        for _ in range(2):
            runner.gate.release()
            async with asyncio.timeout(5):
                assert len((await anext(stream)).token_ids) == 1
        runner.gate.release()


async def test_the_more_streams_the_less_often_each_sends_but_urgent_ones_do_not_mind_others() -> None:
    runner = GatedRunner(4)
    coalescing = Coalescing(Rhythm(interval_s=0.5, num_tokens=4), max_deltas_per_s=0.05)
    async with running(coalescing=coalescing, runner=runner) as engine, AsyncExitStack() as streams:
        assert engine.rhythm(Band.BATCH) == coalescing.rhythm
        for number in range(3):
            asked = replace(request(f"request-{number}", max_tokens=12), band=Band.BATCH)
            stream = await streams.enter_async_context(aclosing(engine.generate(asked)))
            runner.gate.release(2)  # of a step that has begun without it, and of its own
            assert len((await anext(stream)).token_ids) >= 1
        assert [engine.rhythm(band).interval_s for band in Band] == [0.5, 0.5, 60.0]
        runner.gate.release(100)
        assert len([delta async for delta in stream]) == 1, "what came within the minute, at its end"


def test_only_streams_that_were_slowed_down_send_together() -> None:
    coalescing = Coalescing(Rhythm(interval_s=0.5, num_tokens=4), max_deltas_per_s=4.0, slowed_are_common=True)
    assert [coalescing.rhythm_of(num_streams).is_common for num_streams in (1, 2, 3)] == [False, False, True]


@given(st.floats(0, 1e6), st.floats(0.01, 100))
def test_a_common_moment_is_one_for_all_and_about_an_interval_away(last_s: float, interval_s: float) -> None:
    rhythm = Rhythm(interval_s, 1, is_common=True)
    due_s = rhythm.due_s(last_s)
    assert 0.499 < (due_s - last_s) / interval_s < 1.501
    assert math.isclose(due_s, round(due_s / interval_s) * interval_s)
    assert rhythm.due_s(-math.inf) == -math.inf, "the first delta waits for nothing"


async def test_a_request_that_nobody_watches_has_its_own_interval() -> None:
    runner = GatedRunner(4)
    asked = replace(request(max_tokens=11), delta_interval_s=60.0)
    async with (
        running(coalescing=Coalescing(Rhythm(interval_s=0.0, num_tokens=1)), runner=runner) as engine,
        aclosing(engine.generate(asked)) as stream,
    ):
        runner.gate.release()
        sizes = [len((await anext(stream)).token_ids)]
        runner.gate.release(10)
        sizes += [len(delta.token_ids) async for delta in stream]
    assert sizes == [1, 10]


async def test_closing_a_stream_frees_its_blocks_and_its_neighbours_go_on() -> None:
    async with running() as engine:
        neighbour = asyncio.create_task(collect(engine, request("neighbour", max_tokens=100)))
        async with aclosing(engine.generate(request("gone", max_tokens=100))) as stream:
            await anext(stream)
        deltas = await neighbour
        await until_idle(engine)
        assert sum(len(delta.token_ids) for delta in deltas) == 100
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks


async def test_streams_dropped_at_random_moments_leave_no_block() -> None:
    rng = random.Random(7)

    async def drop(engine: AsyncEngine, number: int) -> None:
        async with aclosing(engine.generate(request(f"r{number}", (1, 2, rng.randrange(9)), max_tokens=60))) as stream:
            for _ in range(rng.randrange(4)):
                await anext(stream, None)

    async with running(config(max_queued_requests=5000)) as engine:
        async with asyncio.TaskGroup() as group:
            for number in range(2000):
                group.create_task(drop(engine, number))
        await until_idle(engine)
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert not engine._mailboxes


async def test_refusals_are_the_only_delta_of_their_stream() -> None:
    runner = GatedRunner(4)
    async with running(config(max_num_seqs=1, max_queued_requests=0), runner=runner) as engine:
        running_stream = asyncio.create_task(collect(engine, request("runs", max_tokens=2)))
        await asyncio.to_thread(runner.entered.acquire)
        overloaded = asyncio.create_task(collect(engine, request("refused")))
        too_long = asyncio.create_task(collect(engine, request("long", max_tokens=4000)))
        await asyncio.sleep(0)  # Both tasks have put their requests into the engine's inbox.
        runner.gate.release(2)
        for deltas, error in ((await overloaded, Overloaded), (await too_long, InvalidRequest)):
            assert len(deltas) == 1 and isinstance(deltas[0].error, error)
            assert deltas[0].finish_reason is FinishReason.ERROR
        assert (await running_stream)[-1].finish_reason is FinishReason.LENGTH


async def test_request_sent_again_before_its_abort_is_done_gets_its_own_tokens() -> None:
    runner = GatedRunner(4)
    async with running(runner=runner) as engine:
        first = asyncio.create_task(collect(engine, request("x", (1, 2, 3), max_tokens=9)))
        await asyncio.to_thread(runner.entered.acquire)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(collect(engine, request("x", (4, 5, 6), max_tokens=3)))
        runner.gate.release(100)
        deltas = await second
    assert {delta.request_id for delta in deltas} == {"x"}
    assert tuple(token for delta in deltas for token in delta.token_ids) == continuation((4, 5, 6), 3)


class FailingDecoder:
    """Fails at its third token."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def push(self, token_id: int) -> str:
        self._num_tokens += 1
        if self._num_tokens == 3:
            raise OverflowError("no such character")
        return "x"


async def test_sequence_whose_text_cannot_be_decoded_fails_alone_even_if_its_reader_lags() -> None:
    def fussy(asked: GenerateRequest) -> IncrementalDecoder:
        if asked.request_id.startswith("never"):
            raise OverflowError("no decoder")
        return FailingDecoder() if asked.request_id.startswith("bad") else decoders(asked)

    engine = AsyncEngine(Engine(config(), ShadowRunner(4), fussy, IDENTITY), Coalescing(Rhythm(0.05, 100)))
    engine.start()
    names = ("bad", "good", "never")
    streams = await asyncio.gather(*(collect(engine, request(name, max_tokens=8)) for name in names))
    await engine.stop()
    bad, good, never = streams
    assert isinstance(bad[-1].error, SequenceFailed) and sum(len(delta.token_ids) for delta in bad) == 2
    assert good[-1].finish_reason is FinishReason.LENGTH
    assert isinstance(never[-1].error, SequenceFailed)


async def test_hang_of_the_first_step_after_idleness_shows() -> None:
    runner = GatedRunner(4)
    async with running(runner=runner) as engine:
        stream = asyncio.create_task(collect(engine, request(max_tokens=1)))
        await asyncio.to_thread(runner.entered.acquire)
        async with asyncio.timeout(5):
            while not engine.stats().stalled_s > 0.01:
                await asyncio.sleep(0.001)
        assert engine.stats().num_waiting == 1
        runner.gate.release(10)
        await stream


async def test_death_of_the_engine_answers_every_waiting_request() -> None:
    runner = GatedRunner(4)
    async with running(config(max_num_seqs=2), runner=runner) as engine:
        streams = [asyncio.create_task(collect(engine, request(f"r{n}", max_tokens=9))) for n in range(5)]
        await asyncio.to_thread(runner.entered.acquire)
        runner.gate.release()
        await asyncio.to_thread(runner.entered.acquire)
        runner.fail_on = frozenset(range(97))
        runner.gate.release(100)
        for stream in streams:
            last = (await stream)[-1]
            assert isinstance(last.error, EngineDead) and last.finish_reason is FinishReason.ERROR
        (refusal,) = await collect(engine, request("later"))
        assert isinstance(refusal.error, EngineDead)
        with pytest.raises(EngineDead, match="the device failed"):
            engine.check_alive()


async def test_stats_tell_how_long_a_step_has_hung() -> None:
    runner = GatedRunner(4)
    async with running(runner=runner) as engine:
        stream = asyncio.create_task(collect(engine, request(max_tokens=2)))
        runner.gate.release()
        await asyncio.to_thread(lambda: [runner.entered.acquire() for _ in range(2)])
        first = engine.stats()
        while engine.stats().stalled_s < first.stalled_s + 0.01:
            await asyncio.sleep(0.001)
        assert first.num_running == 1
        runner.gate.release(10)
        await stream
        await until_idle(engine)
        assert engine.stats().stalled_s == 0


async def test_drain_ends_when_the_accepted_streams_have() -> None:
    async with running() as engine:
        accepted = asyncio.create_task(collect(engine, request("accepted", max_tokens=50)))
        await asyncio.sleep(0)
        await asyncio.wait_for(engine.drain(), LIMIT_S)
        assert accepted.done() or (await accepted)[-1].finish_reason is FinishReason.LENGTH
        (refusal,) = await collect(engine, request("new"))
        assert isinstance(refusal.error, NoReplicaAvailable)
        assert engine.stats().is_draining


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")
def test_of_a_process_that_interrupts_nobody_the_engine_alone_may() -> None:
    seen: list[int] = []

    class NotingRunner(ShadowRunner):
        def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
            seen.append(os.sched_getscheduler(0))
            return super().execute(batch)

    async def generate() -> None:
        async with running(runner=NotingRunner(config().block_size)) as engine:
            await collect(engine, request("a"))
        seen.append(os.sched_getscheduler(0))

    def in_thread() -> None:
        do_not_interrupt_others()
        asyncio.run(generate())

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join(LIMIT_S)
    assert set(seen[:-1]) == {os.SCHED_OTHER} and seen[-1] == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
