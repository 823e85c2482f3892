"""A failed forward pass fails the sequences at fault alone, whatever their number; a broken device ends the engine."""

import asyncio
import logging
import math
import random
from contextlib import aclosing

import pytest

from replicas.engine.async_engine import AsyncEngine
from replicas.engine.batch import ItemResult, LaunchedStep, ScheduledBatch
from replicas.engine.engine import Engine
from replicas.engine.outbox import Coalescing
from replicas.engine.step_watch import StepWatch
from replicas.errors import EngineDead, SequenceFailed
from replicas.protocol import GenerateRequest
from testkit.engine.shadow_runner import IDENTITY, Outcome, ShadowRunner, World, config, continuation, decoders, request
from testkit.engine.single_stream import generate
from tests.seeds import Seeds

POISON = 500
SLOTS = 128


class BrokenRunner(ShadowRunner):
    """Runner whose device fails every pass after some."""

    num_good = 0
    num_failed = 0

    def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        self.num_good -= 1
        if self.num_good < 0:
            self.num_failed += 1
            raise RuntimeError("the device failed")
        return super().execute(batch)


class CrowdedRunner(ShadowRunner):
    """Runner that fails every batch of more than two sequences, as a device with too little memory does."""

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        if len(batch.items) > 2:
            raise MemoryError("the device has too little memory")
        return super().launch(batch)


def requests_of(num_guilty: int, num_good: int, rng: random.Random) -> list[GenerateRequest]:
    """Requests in random order; a guilty one has the token that fails its batch somewhere in its prompt."""
    made = []
    for number in range(num_guilty + num_good):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 12))]
        is_guilty = number < num_guilty
        if is_guilty:
            prompt[rng.randrange(len(prompt))] = POISON
        made.append(request(f"{'guilty' if is_guilty else 'good'}-{number}", tuple(prompt), rng.randrange(1, 9)))
    rng.shuffle(made)
    return made


def world_of(is_asynchronous: bool, runner: type[ShadowRunner] = ShadowRunner) -> World:
    limits = {"num_blocks": 1024, "max_num_seqs": SLOTS, "max_num_batched_tokens": 4 * SLOTS}
    return World(config(**limits, async_scheduling=is_asynchronous), make_runner=runner)


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("num_good", [0, 1, 50])
@pytest.mark.parametrize("num_guilty", [1, 2, 8, 64])
def test_guilty_sequences_fail_and_good_ones_never_notice(
    num_guilty: int, num_good: int, is_asynchronous: bool
) -> None:
    rng = random.Random(num_guilty + num_good)
    world = world_of(is_asynchronous)
    world.runner.fail_on = frozenset({POISON})
    asked = requests_of(num_guilty, num_good, rng)
    world.run(*asked[: len(asked) // 2])
    world.run(*asked[len(asked) // 2 :])
    for each in asked:
        check_outcome(each, world.outcomes[each.request_id])


def check_outcome(asked: GenerateRequest, outcome: Outcome) -> None:
    assert outcome.last is not None
    if asked.request_id.startswith("good"):
        assert tuple(outcome.token_ids) == continuation(asked.prompt_token_ids, asked.params.max_tokens)
        return
    error = outcome.last.error
    assert isinstance(error, SequenceFailed) and asked.request_id in error.message
    assert "device failed" not in error.message, "a client sees the log's id, not the exception"


@pytest.mark.random_worlds(20, per_call=5)
def test_guilty_requests_at_random_moments_leave_no_block(seeds: Seeds) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        world = World(
            config(num_blocks=40, max_model_len=64, max_num_batched_tokens=24, async_scheduling=rng.random() < 0.5)
        )
        world.runner.fail_on = frozenset({POISON})
        asked = requests_of(rng.randrange(1, 12), rng.randrange(12), rng)
        for each in asked:
            world.add(each)
            world.step(rng.randrange(3))
            world.engine.check_invariants()
        world.run()
        for each in asked:
            check_outcome(each, world.outcomes[each.request_id])


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("num_good", [0, 1, 7])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 64, SLOTS])
def test_a_broken_device_ends_the_engine_within_twice_its_slots(
    num_requests: int, num_good: int, is_asynchronous: bool
) -> None:
    world = world_of(is_asynchronous, BrokenRunner)
    runner = world.runner
    assert isinstance(runner, BrokenRunner)
    runner.num_good = num_good
    world.add(*(request(str(number), (1, 2, number), max_tokens=50) for number in range(num_requests)))
    with pytest.raises(RuntimeError, match="the device failed"):
        world.run()
    assert 0 < runner.num_failed <= 2 * num_requests + 2
    errors = [outcome.last.error for outcome in world.outcomes.values() if outcome.last is not None]
    assert errors == [None] * len(errors), "no sequence is blamed for the device"


def test_a_device_that_breaks_while_a_batch_is_repeated_blames_no_sequence() -> None:
    world = world_of(False, BrokenRunner)
    runner = world.runner
    assert isinstance(runner, BrokenRunner)
    runner.fail_on, runner.num_good = frozenset({POISON}), 3
    world.add(*(request(str(number), (1, POISON if number == 0 else 2), max_tokens=9) for number in range(8)))
    with pytest.raises(RuntimeError, match="the device failed"):
        world.run()
    assert all(outcome.last is None or outcome.last.error is None for outcome in world.outcomes.values())


def test_batches_that_fail_for_no_sequence_end_the_engine_in_the_end() -> None:
    world = world_of(False, CrowdedRunner)
    world.add(*(request(str(number), (1, 2, number), max_tokens=50) for number in range(4)))
    world.step(2)
    assert all(len(outcome.token_ids) == 2 for outcome in world.outcomes.values()), "the parts were computed"
    with pytest.raises(MemoryError):
        world.run()


def test_the_log_has_traceback_ids_and_shapes(caplog: pytest.LogCaptureFixture) -> None:
    world = world_of(False)
    world.runner.fail_on = frozenset({POISON})
    with caplog.at_level(logging.ERROR):
        world.run(request("good", (1, 2, 3)), request("guilty#7", (1, POISON, 3)))
    assert "the device failed" in caplog.text and "Traceback" in caplog.text
    assert "guilty#7 (tokens 0 to 3 of 3, 1 blocks)" in caplog.text
    assert "1 of 2 sequences failed" in caplog.text
    outcome = world.outcomes["guilty#7"].last
    assert outcome is not None and outcome.error is not None
    assert "request guilty;" in outcome.error.message, "the id is the client's, without the number of the stream"


async def test_a_long_repetition_is_not_a_hung_step() -> None:
    steps, now = StepWatch(5.0), 100.0
    steps.begin(now)
    for num_repeats in range(1, 20):
        now += 4.0
        assert steps.hung_for_s(now, num_repeats) is None
    assert steps.hung_for_s(now + 6.0, 19) == 6.0
    steps.end(now, 20)
    assert steps.longest_step_s == 0.0, "a repeated step says nothing about the next"


async def test_streams_beside_guilty_ones_go_on() -> None:
    runner = ShadowRunner(4)
    runner.fail_on = frozenset({POISON})
    engine = AsyncEngine(Engine(config(), runner, decoders, IDENTITY), Coalescing(), steps=StepWatch(math.inf))
    engine.start()
    asked = requests_of(8, 8, random.Random(1))

    async def play(each: GenerateRequest) -> Outcome:
        outcome = Outcome()
        async with aclosing(generate(engine, each)) as deltas:
            async for delta in deltas:
                outcome.read(delta)
        return outcome

    outcomes = await asyncio.gather(*map(play, asked))
    for each, outcome in zip(asked, outcomes, strict=True):
        assert outcome.last is not None and not isinstance(outcome.last.error, EngineDead)
        check_outcome(each, outcome)
    engine.check_alive()
    await engine.stop()
