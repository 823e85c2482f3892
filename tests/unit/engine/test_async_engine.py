"""Streams over the engine thread."""

import asyncio
import itertools
import math
import os
import random
import threading
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.engine.async_engine import AsyncEngine
from replicas.engine.batch import IncrementalDecoder, ItemResult, ScheduledBatch
from replicas.engine.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.outbox import Coalescing, DeltaOutbox, FlushPolicy
from replicas.engine.output_processor import DecoderFactory
from replicas.engine.step_watch import StepWatch
from replicas.errors import EngineDead, InvalidRequest, NoReplicaAvailable, Overloaded, ReplicaLost, SequenceFailed
from replicas.protocol import Band, FinishReason, GenerateRequest, TokenDelta, Usage
from replicas.timing.clock import Clock
from replicas.timing.cpu_scheduling import use_batch_scheduling
from testkit.engine.shadow_runner import IDENTITY, ShadowRunner, config, continuation, decoders, request
from testkit.engine.single_stream import generate
from testkit.limits import LIMIT_S
from testkit.router.simulated_time import SimulatedLoop


@asynccontextmanager
async def running(
    engine_config: EngineConfig | None = None,
    coalescing: Coalescing | None = None,
    runner: ShadowRunner | None = None,
    make_decoder: DecoderFactory = decoders,
    **options: Any,
) -> AsyncGenerator[AsyncEngine, None]:
    engine_config = engine_config or config()
    runner = runner or ShadowRunner(engine_config.block_size)
    engine = AsyncEngine(Engine(engine_config, runner, make_decoder, IDENTITY), coalescing or Coalescing(), **options)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def collect(engine: AsyncEngine, asked: GenerateRequest) -> list[TokenDelta]:
    return [delta async for delta in generate(engine, asked)]


def token_ids(deltas: list[TokenDelta]) -> tuple[int, ...]:
    return tuple(token_id for delta in deltas for token_id in delta.token_ids)


async def until_idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(LIMIT_S):
        while engine.stats().num_running or engine.stats().num_waiting:
            await asyncio.sleep(0.001)
    engine._engine.check_invariants()


async def until_open(engine: AsyncEngine, num_streams: int) -> None:
    """Return once so many streams have put their requests into the engine's inbox and have not ended."""
    async with asyncio.timeout(LIMIT_S):
        while len(engine._mailboxes) < num_streams:
            await asyncio.sleep(0)


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


@asynccontextmanager
async def gated(
    engine_config: EngineConfig | None = None, coalescing: Coalescing | None = None, **options: Any
) -> AsyncGenerator[tuple[AsyncEngine, GatedRunner], None]:
    runner = GatedRunner(4)
    async with running(engine_config, coalescing, runner, **options) as engine:
        yield engine, runner


async def test_deltas_merge_while_the_reader_lags() -> None:
    async with running() as engine, aclosing(generate(engine, request(max_tokens=50))) as stream:
        deltas = [await anext(stream)]
        await until_idle(engine)
        deltas += [delta async for delta in stream]
    assert len(token_ids(deltas)) == 50
    # One read may come between the end of the engine's work and the delivery of its last deltas.
    assert len(deltas) <= 3 and deltas[-1].finish_reason is FinishReason.LENGTH


async def delta_sizes(flush_policy: FlushPolicy, asked: GenerateRequest) -> list[int]:
    """Return the number of tokens in each delta of a stream whose reader takes the first before the second is made."""
    async with (
        gated(coalescing=Coalescing(flush_policy)) as (engine, runner),
        aclosing(generate(engine, asked)) as stream,
    ):
        runner.gate.release()
        deltas = [await anext(stream)]
        runner.gate.release(10)
        deltas += [delta async for delta in stream]
    return [len(delta.token_ids) for delta in deltas]


async def test_coalescing_sends_one_token_at_once_and_then_several() -> None:
    sizes = await delta_sizes(FlushPolicy(interval_s=60.0, num_tokens=4), request(max_tokens=11))
    assert sizes[0] == 1 and sum(sizes) == 11
    assert all(size >= 4 for size in sizes[1:-1])


async def test_unstreamed_request_has_its_own_flush_interval() -> None:
    asked = replace(request(max_tokens=11), delta_interval_s=60.0)
    assert await delta_sizes(FlushPolicy(interval_s=0.0, num_tokens=1), asked) == [1, 10]


@pytest.mark.parametrize(("age_s", "delay_s"), [(16.0, 0.05), (0.16, 0.01)])
def test_the_end_of_a_batch_request_waits_for_those_of_others_but_not_for_long(age_s: float, delay_s: float) -> None:
    async def end_line_after_line() -> None:
        outbox, start_s = DeltaOutbox(), asyncio.get_running_loop().time()
        policy = partial(Coalescing(batch_delay_s=0.05).unstreamed_policy, Band.BATCH, 60.0)
        lines = [outbox.open(number, policy) for number in range(3)]
        reading = asyncio.create_task(outbox.take())
        await asyncio.sleep(age_s)
        for line in lines:
            line.put(last_delta())
            await asyncio.sleep(0.6 * delay_s)
        assert [number for number, _ in await reading] == [0, 1]
        assert [number for number, _ in await outbox.take()] == [2]
        assert asyncio.get_running_loop().time() - start_s == pytest.approx(age_s + 2.2 * delay_s, rel=0.02)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(end_line_after_line())


async def test_a_delayed_delta_leaves_at_once_with_a_more_urgent_delta() -> None:
    outbox = DeltaOutbox()
    line = outbox.open(1, lambda: FlushPolicy(60.0, 1, batching_delay_s=LIMIT_S))
    urgent = outbox.open(2, FlushPolicy)
    await asyncio.sleep(0.01)
    for mailbox in (line, urgent):
        mailbox.put(last_delta())
    assert [number for number, _ in await outbox.take()] == [1, 2]


async def test_an_almost_full_flush_leaves_with_a_full_one_and_with_no_other() -> None:
    outbox = DeltaOutbox()
    boxes = [outbox.open(number, lambda: FlushPolicy(60.0, 8)) for number in range(4)]

    async def leaving(*nums_tokens: int) -> dict[int, int]:
        for mailbox, num_tokens in zip(boxes, nums_tokens, strict=False):
            for _ in range(num_tokens):
                mailbox.put(TokenDelta("r", next(starts[mailbox]), (1,), "", Usage(1, 1, 0)))
        return {number: len(delta.token_ids) for number, delta in await outbox.take()}

    starts = {mailbox: itertools.count() for mailbox in boxes}
    assert await leaving(1, 1, 1) == {0: 1, 1: 1, 2: 1}
    assert await leaving(7, 7, 5, 1) == {3: 1}, "the first token of a stream takes no other stream with it"
    assert await leaving(1) == {0: 8, 1: 7}
    assert await leaving(8, 8) == {0: 8, 1: 8}
    assert await leaving(0, 0, 3) == {2: 8}


def last_delta() -> TokenDelta:
    return TokenDelta("r", 0, (1,), "", Usage(1, 1, 0), finish_reason=FinishReason.LENGTH)


async def test_coalescing_waits_no_longer_than_its_interval() -> None:
    async with (
        gated(coalescing=Coalescing(FlushPolicy(interval_s=0.01, num_tokens=1000))) as (engine, runner),
        aclosing(generate(engine, request(max_tokens=3))) as stream,
    ):
        for _ in range(2):
            runner.gate.release()
            async with asyncio.timeout(5):
                assert len((await anext(stream)).token_ids) == 1
        runner.gate.release()


async def test_many_streams_are_throttled_except_more_urgent_ones() -> None:
    coalescing = Coalescing(FlushPolicy(interval_s=0.5, num_tokens=4), max_stream_chunks_per_s=0.05)
    async with gated(coalescing=coalescing) as (engine, runner), AsyncExitStack() as streams:
        assert engine.flush_policy(Band.BATCH) == coalescing.flush_policy
        for number in range(3):
            asked = replace(request(f"request-{number}", max_tokens=12), band=Band.BATCH)
            stream = await streams.enter_async_context(aclosing(generate(engine, asked)))
            first = asyncio.ensure_future(anext(stream))
            await until_open(engine, number + 1)
            runner.gate.release(2)  # of a step that has begun without it, and of its own
            assert len((await first).token_ids) >= 1
        assert [engine.flush_policy(band).interval_s for band in Band] == [0.5, 0.5, 60.0]
        runner.gate.release(100)
        assert len([delta async for delta in stream]) == 1, "what came within the minute, at its end"


def test_only_throttled_streams_flush_together() -> None:
    coalescing = Coalescing(
        FlushPolicy(interval_s=0.5, num_tokens=4), max_stream_chunks_per_s=4.0, align_when_throttled=True
    )
    assert [coalescing.policy_for(num_streams).is_aligned for num_streams in (1, 2, 3)] == [False, False, True]


@given(st.floats(0, 1e6), st.floats(0.01, 100))
def test_aligned_flushes_are_about_an_interval_apart(last_s: float, interval_s: float) -> None:
    flush_policy = FlushPolicy(interval_s, 1, is_aligned=True)
    next_flush_s = flush_policy.next_flush_s(last_s)
    assert 0.499 < (next_flush_s - last_s) / interval_s < 1.501
    assert math.isclose(next_flush_s, round(next_flush_s / interval_s) * interval_s)
    assert flush_policy.next_flush_s(-math.inf) == -math.inf, "the first delta waits for nothing"


async def test_closing_a_stream_frees_only_its_blocks() -> None:
    async with running() as engine:
        neighbour = asyncio.create_task(collect(engine, request("neighbour", max_tokens=100)))
        async with aclosing(generate(engine, request("gone", max_tokens=100))) as stream:
            await anext(stream)
        deltas = await neighbour
        await until_idle(engine)
        assert len(token_ids(deltas)) == 100
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks


async def test_streams_dropped_at_random_moments_leave_no_block() -> None:
    rng = random.Random(7)

    async def drop(engine: AsyncEngine, number: int) -> None:
        async with aclosing(generate(engine, request(f"r{number}", (1, 2, rng.randrange(9)), max_tokens=60))) as stream:
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


async def test_an_idle_engine_checks_its_invariants_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, checked_s = [0.0], []
    monkeypatch.setattr(Engine, "check_invariants", lambda _: checked_s.append(now[0]))
    async with running(clock=Clock(lambda: now[0])) as engine:
        for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0, 119.0, 130.0):
            for _ in range(2):  # Before the second one the engine has been idle at this time.
                await collect(engine, request())
    assert checked_s == [0.0, 60.0, 130.0]


async def test_a_broken_invariant_of_an_idle_engine_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    async with running(clock=Clock(lambda: now[0])) as engine:
        await collect(engine, request())
        await until_idle(engine)
        now[0] = 61.0
        engine._engine._scheduler.blocks._free.popitem()
        last = (await collect(engine, request()))[-1]
        assert last.finish_reason is not None
        async with asyncio.timeout(LIMIT_S):
            while not engine.stats().is_draining:
                await asyncio.sleep(0.001)
        with pytest.raises(EngineDead):
            engine.check_alive()


async def test_refusals_are_the_only_delta_of_their_stream() -> None:
    async with gated(config(max_num_seqs=1, max_queued_requests=0)) as (engine, runner):
        running_stream = asyncio.create_task(collect(engine, request("runs", max_tokens=2)))
        await asyncio.to_thread(runner.entered.acquire)
        overloaded = asyncio.create_task(collect(engine, request("refused")))
        too_long = asyncio.create_task(collect(engine, request("long", max_tokens=4000)))
        await until_open(engine, 3)
        runner.gate.release(2)
        for deltas, error in ((await overloaded, Overloaded), (await too_long, InvalidRequest)):
            assert len(deltas) == 1 and isinstance(deltas[0].error, error)
            assert deltas[0].finish_reason is FinishReason.ERROR
        assert (await running_stream)[-1].finish_reason is FinishReason.LENGTH


async def test_request_sent_again_before_its_abort_gets_its_own_tokens() -> None:
    async with gated() as (engine, runner):
        first = asyncio.create_task(collect(engine, request("x", (1, 2, 3), max_tokens=9)))
        await asyncio.to_thread(runner.entered.acquire)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(collect(engine, request("x", (4, 5, 6), max_tokens=3)))
        runner.gate.release(100)
        deltas = await second
    assert {delta.request_id for delta in deltas} == {"x"}
    assert token_ids(deltas) == continuation((4, 5, 6), 3)


class FailingDecoder:
    """Fails at its third token."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def push(self, token_id: int) -> str:
        self._num_tokens += 1
        if self._num_tokens == 3:
            raise OverflowError("no such character")
        return "x"

    def finish(self) -> str:
        return ""


async def test_sequence_whose_text_cannot_be_decoded_fails_alone() -> None:
    def failing_decoder(asked: GenerateRequest) -> IncrementalDecoder:
        if asked.request_id.startswith("never"):
            raise OverflowError("no decoder")
        return FailingDecoder() if asked.request_id.startswith("bad") else decoders(asked)

    async with running(coalescing=Coalescing(FlushPolicy(0.05, 100)), make_decoder=failing_decoder) as engine:
        names = ("bad", "good", "never")
        bad, good, never = await asyncio.gather(*(collect(engine, request(name, max_tokens=8)) for name in names))
    assert isinstance(bad[-1].error, SequenceFailed) and len(token_ids(bad)) == 2
    assert good[-1].finish_reason is FinishReason.LENGTH
    assert isinstance(never[-1].error, SequenceFailed)


async def test_a_request_that_is_not_valid_after_all_fails_alone() -> None:
    async with running() as engine:
        ids: Any = (1, None, "3")
        invalid = replace(request("bad"), prompt_token_ids=ids)
        bad, good = await asyncio.gather(collect(engine, invalid), collect(engine, request("good")))
        assert isinstance(bad[-1].error, SequenceFailed)
        assert token_ids(good) == continuation((1, 2, 3), 4)
        engine.check_alive()


async def test_death_of_the_engine_answers_every_waiting_request() -> None:
    async with gated(config(max_num_seqs=2)) as (engine, runner):
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
        assert isinstance(refusal.error, ReplicaLost) and not refusal.error.has_died
        with pytest.raises(EngineDead, match="the device failed"):
            engine.check_alive()


@pytest.mark.parametrize(("num_done", "waiting_and_running"), [(0, (1, 0)), (1, (0, 1))])
async def test_stats_report_the_duration_of_a_hung_step(num_done: int, waiting_and_running: tuple[int, int]) -> None:
    async with gated() as (engine, runner):
        stream = asyncio.create_task(collect(engine, request(max_tokens=2)))
        await asyncio.to_thread(runner.entered.acquire)
        for _ in range(num_done):
            runner.gate.release()
            await asyncio.to_thread(runner.entered.acquire)
        first = engine.stats()
        async with asyncio.timeout(LIMIT_S):
            while engine.stats().stalled_s < first.stalled_s + 0.01:
                await asyncio.sleep(0.001)
        assert (first.num_waiting, first.num_running) == waiting_and_running
        runner.gate.release(10)
        await stream
        await until_idle(engine)
        assert engine.stats().stalled_s == 0


@pytest.mark.parametrize(
    ("steps", "limit_s"),
    [
        (StepWatch(5.0), 5.0),
        (StepWatch(5.0, first_step_s=30.0), 30.0),
        (StepWatch(5.0, first_step_s=30.0, num_steps=16), 5.0),
        (StepWatch(5.0, longest_step_s=9.0, first_step_s=30.0), 36.0),
    ],
)
async def test_hung_step_fails_the_streams_and_is_not_waited_for(steps: StepWatch, limit_s: float) -> None:
    """The first steps may compile where kernels are compiled, so they have longer."""
    now = [100.0]
    async with gated(clock=Clock(lambda: now[0]), steps=steps) as (engine, runner):
        stream = asyncio.create_task(collect(engine, request(max_tokens=9)))
        await asyncio.to_thread(runner.entered.acquire)
        now[0] += limit_s - 0.1
        engine.check_alive()
        now[0] += 0.2
        with pytest.raises(EngineDead, match="step has not ended for"):
            engine.check_alive()
        assert isinstance((await stream)[-1].error, EngineDead)
        assert engine.stats().is_draining
        await asyncio.wait_for(engine.stop(), 1.0)
        runner.gate.release(100)  # The step ends; nobody reads its result.
        await asyncio.to_thread(engine._thread.join, LIMIT_S)


async def test_slow_steps_are_not_hung() -> None:
    now = [100.0]
    steps = StepWatch(5.0, longest_step_s=3.0, num_steps=16)
    async with gated(clock=Clock(lambda: now[0]), steps=steps) as (engine, runner):
        stream = asyncio.create_task(collect(engine, request(max_tokens=2)))
        for seconds in (11.9, 40.0):  # Each within four times the longest before.
            await asyncio.to_thread(runner.entered.acquire)
            now[0] += seconds
            engine.check_alive()
            runner.gate.release()
        assert (await stream)[-1].finish_reason is FinishReason.LENGTH


async def test_drain_ends_when_the_accepted_streams_have() -> None:
    async with running() as engine:
        accepted = asyncio.create_task(collect(engine, request("accepted", max_tokens=50)))
        await until_open(engine, 1)
        await asyncio.wait_for(engine.drain(), LIMIT_S)
        assert accepted.done() or (await accepted)[-1].finish_reason is FinishReason.LENGTH
        (refusal,) = await collect(engine, request("new"))
        assert isinstance(refusal.error, NoReplicaAvailable)
        assert engine.stats().is_draining


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")
def test_engine_thread_has_the_normal_scheduling_policy() -> None:
    seen: list[int] = []

    class NotingRunner(ShadowRunner):
        def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
            seen.append(os.sched_getscheduler(0))
            return super().execute(batch)

    async def serve() -> None:
        async with running(runner=NotingRunner(config().block_size)) as engine:
            await collect(engine, request("a"))
        seen.append(os.sched_getscheduler(0))

    def in_thread() -> None:
        use_batch_scheduling()
        asyncio.run(serve())

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join(LIMIT_S)
    assert set(seen[:-1]) == {os.SCHED_OTHER} and seen[-1] == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
