"""Launching a step before the last one's tokens are known changes when they come, never which they are."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, replace

import pytest

from replicas.engine.batch import ItemResult, ScheduledBatch, ScheduledSequence
from replicas.engine.config import EngineConfig
from replicas.engine.interfaces import LaunchedStep
from replicas.errors import DeadlineExceeded, Overloaded
from replicas.protocol import Band, FinishReason, GenerateRequest
from tests.seeds import Seeds
from tests.unit.engine import test_waste
from tests.unit.engine.test_async_engine import collect, running, until_idle
from tests.unit.engine.test_random_worlds import random_config
from tests.unit.engine.test_waste import num_computed, prompt_of, wasted
from tests.unit.engine.worlds import FakeClock, Outcome, ShadowRunner, World, config, continuation, request

EOS = frozenset({3, 31, 59})
_GARBAGE = -1
_MAX_ITEMS = 5


@dataclass
class _Step:
    """A launched step of a device that works in order."""

    runner: PipelinedRunner
    results: list[ItemResult]
    slots: set[tuple[int, int]]
    fails: bool = False

    def collect(self) -> list[ItemResult]:
        assert self.runner.pending.popleft() is self, "steps are collected in order"
        if self.fails:
            for step in (self, *self.runner.pending):
                self.runner.spoil(step.slots)
            raise self.runner.failure()
        return self.results


class PipelinedRunner(ShadowRunner):
    """A shadow runner that knows what is launched and not collected, and may fail now and then.

    A step that fails spoils the KV that it and the steps launched after it write.
    """

    def __init__(self, block_size: int, step_s: float = 0.0, clock: FakeClock | None = None) -> None:
        super().__init__(block_size, step_s, clock)
        self.pending: deque[_Step] = deque()
        self.num_overlapping = 0
        self.rng = random.Random(0)
        self.failure_share = 0.0
        self._num_sound_launches = 0

    def failure(self) -> RuntimeError:
        """What to raise. Then all goes well for a while, so that the guiltless items come through one by one."""
        self._num_sound_launches = _MAX_ITEMS + 1
        return RuntimeError("the device failed")

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        assert len(self.pending) <= 1, "more than one step ahead"
        for item in batch.items:
            num_known = len(item.sequence.token_ids)
            assert item.end <= num_known + 1
            assert item.end <= num_known or not item.sequence.needs_known_tokens
        self._num_sound_launches -= 1
        fails = self._num_sound_launches < 0 and self.rng.random() < self.failure_share
        if fails and self.rng.random() < 0.5:
            raise self.failure()
        self.num_overlapping += bool(self.pending)
        results = super().launch(batch).collect()
        slots = {slot for item in batch.items for slot in self._slots_of(item)}
        self.pending.append(_Step(self, results, slots, fails))
        return self.pending[-1]

    def spoil(self, slots: set[tuple[int, int]]) -> None:
        self._slots.update(dict.fromkeys(slots, _GARBAGE))

    def _slots_of(self, item: ScheduledSequence) -> list[tuple[int, int]]:
        table, size = item.sequence.block_table, self._block_size
        return [(table[position // size], position % size) for position in range(item.start, item.end)]


class PipelinedWorld(World):
    """A world that runs a step ahead."""

    runner: PipelinedRunner

    def __init__(self, config: EngineConfig, step_s: float = 0.0) -> None:
        super().__init__(replace(config, async_scheduling=True), step_s, PipelinedRunner)

    def run(self, max_steps: int = 10_000) -> None:
        super().run(max_steps)
        assert not self.runner.pending, "an idle engine left a step on the device"
        load = self.engine.stats()
        assert load.outstanding_tokens == load.waiting_tokens == 0


def random_request(rng: random.Random, world: World, number: int) -> GenerateRequest:
    """Anything that ends by length, token or text, with or without a look back at its tokens."""
    limit = world.config.max_model_len
    prompt = tuple(rng.choice([1, 2]) for _ in range(rng.randint(1, limit - 1)))
    max_tokens = rng.choice([0, *range(1, limit - len(prompt) + 1)]) if rng.random() < 0.1 else limit - len(prompt)
    scores = max_tokens == 0 or rng.random() < 0.1
    deadline = world.clock.unix(world.clock.now + rng.uniform(0, 20)) if rng.random() < 0.1 else None
    made = request(
        f"r{number}", prompt, max_tokens, rng.choice(list(Band)), deadline,
        prompt_logprobs=0 if scores else None,
        stop=rng.choice([(), (), ("c",), ("ab", "g"), ("xyz",)]),
        stop_token_ids=rng.choice([(), (7, 8)]),
        min_tokens=rng.choice([0, 0, 2]),
        ignore_eos=rng.random() < 0.3,
        repetition_penalty=1.1 if rng.random() < 0.1 else 1.0,
        frequency_penalty=0.5 if rng.random() < 0.05 else 0.0,
    )  # fmt: skip
    return replace(made, runs_alone=rng.random() < 0.05)


def alone(asked: GenerateRequest) -> Outcome:
    """What a synchronous engine with room for everything answers."""
    world = World(config(num_blocks=200, max_model_len=800, eos_token_ids=EOS))
    world.add(replace(asked, deadline_unix_s=None))
    world.run()
    return world.outcomes[asked.request_id]


def act(rng: random.Random, world: World, requests: dict[str, GenerateRequest], aborted: set[str]) -> None:
    choice = rng.random()
    if choice < 0.3:
        new = random_request(rng, world, len(requests))
        try:
            world.add(new)
        except Overloaded:
            return
        requests[new.request_id] = new
    elif choice < 0.36 and requests:
        victim = rng.choice(list(requests))
        if world.outcomes[victim].finish_reason is None:
            aborted.add(victim)
        world.engine.abort(victim)
    else:
        world.clock.now += rng.uniform(0, 0.5)
        world.step()


def check_outcome(outcome: Outcome, asked: GenerateRequest, was_aborted: bool) -> None:
    expected = alone(asked)
    assert outcome.token_ids == expected.token_ids[: len(outcome.token_ids)]
    assert expected.text.startswith(outcome.text)
    if was_aborted:
        assert outcome.finish_reason is None
    elif outcome.finish_reason is FinishReason.ERROR:
        assert outcome.last is not None and isinstance(outcome.last.error, DeadlineExceeded)
    else:
        assert outcome.last is not None and expected.last is not None
        assert (outcome.token_ids, outcome.text) == (expected.token_ids, expected.text)
        assert outcome.finish_reason is expected.finish_reason
        assert outcome.last.stop_reason == expected.last.stop_reason
        assert outcome.prompt_logprobs == expected.prompt_logprobs
        assert outcome.last.usage.completion_tokens == len(expected.token_ids)


def play(rng: random.Random, world: PipelinedWorld) -> None:
    """Random adds, steps and aborts to the end, every answer checked."""
    requests: dict[str, GenerateRequest] = {}
    aborted: set[str] = set()
    for _ in range(rng.randint(20, 60)):
        act(rng, world, requests, aborted)
        world.engine.check_invariants()
    world.run()
    for asked in requests.values():
        check_outcome(world.outcomes[asked.request_id], asked, asked.request_id in aborted)


@pytest.mark.random_worlds(480, per_call=60)
def test_random_worlds_give_what_a_synchronous_engine_gives(seeds: Seeds) -> None:
    num_preemptions = num_overlapping = num_surplus = 0
    for seed in seeds:
        rng = random.Random(seed)
        world = PipelinedWorld(replace(random_config(rng), eos_token_ids=EOS))
        play(rng, world)
        num_preemptions += world.engine._scheduler.num_preemptions
        num_overlapping += world.runner.num_overlapping
        num_surplus += wasted(world)["surplus"] > 0
    if seeds.are_many:
        assert num_preemptions > 25, "the worlds do not reach what they test"
        assert num_overlapping > 250 and num_surplus > 10, "the worlds do not reach what they test"


@pytest.mark.random_worlds(240, per_call=20)
def test_a_device_that_fails_now_and_then_changes_no_answer(seeds: Seeds) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        world = PipelinedWorld(replace(random_config(rng), eos_token_ids=EOS))
        world.runner.rng, world.runner.failure_share = rng, 0.2
        play(rng, world)


@pytest.mark.random_worlds(40, per_call=10)
def test_every_computed_token_was_of_use_or_is_wasted(seeds: Seeds) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        limits = {"num_blocks": 24, "max_model_len": 64, "max_num_batched_tokens": rng.choice([9, 32])}
        caching = rng.random() < 0.7
        world = PipelinedWorld(config(**limits, enable_prefix_caching=caching, eos_token_ids=EOS), step_s=1.0)
        useful = test_waste.play(rng, world)
        assert useful + sum(wasted(world).values()) == num_computed(world)
        assert useful > 0 and wasted(world)["surplus"] > 0


def test_an_end_by_length_is_known_ahead_and_costs_nothing() -> None:
    worlds = World(config()), PipelinedWorld(config())
    for world in worlds:
        for number in range(4):
            world.add(request(str(number), prompt_of(number, 9), max_tokens=6 + number))
        world.run()
    synchronous, ahead = worlds
    assert len(ahead.runner.batches) == len(synchronous.runner.batches)
    assert num_computed(ahead) == num_computed(synchronous)
    assert sum(wasted(ahead).values()) == 0


def test_an_end_by_token_costs_one_surplus_token_that_nobody_sees() -> None:
    asked = request("r", (1, 2, 3), max_tokens=100)
    eos = frozenset({alone(asked).token_ids[5]})
    world = PipelinedWorld(config(eos_token_ids=eos))
    world.add(asked)
    world.run()
    outcome = world.outcomes["r"]
    assert outcome.finish_reason is FinishReason.STOP and outcome.token_ids[-1] in eos
    assert num_computed(world) == 3 + len(outcome.token_ids) - 1 + 1
    assert wasted(world)["surplus"] == 1


def test_a_sequence_that_looks_back_is_never_a_step_ahead() -> None:
    world = PipelinedWorld(config())
    world.add(request("back", (1, 2, 3), max_tokens=8, presence_penalty=0.5))
    world.run()
    assert world.runner.num_overlapping == 0
    assert world.num_steps == 8


def test_steps_overlap_while_nobody_looks_back() -> None:
    world = PipelinedWorld(config())
    world.add(request("r", (1, 2, 3), max_tokens=8))
    world.run()
    assert world.runner.num_overlapping == 7


def test_an_aborted_request_gives_back_its_blocks_while_its_step_is_on_its_way() -> None:
    world = PipelinedWorld(config())
    world.add(request("leaves", (1, 2, 3), max_tokens=50))
    for _ in range(5):
        world.step()
    assert world.runner.pending
    world.engine.abort("leaves")
    assert world.engine.stats().num_free_blocks == world.config.num_blocks
    assert world.engine.has_work, "a step is in flight"
    world.step()
    assert not world.engine.has_work and not world.runner.pending
    assert wasted(world)["abort"] == num_computed(world)


def test_time_on_the_device_is_counted_once_where_steps_overlap() -> None:
    world = PipelinedWorld(config(), step_s=0.1)
    world.add(request("r", (1, 2, 3), max_tokens=40))
    world.run()
    assert world.engine.stats().generated_tokens_per_s == pytest.approx(10.0, rel=0.1)


def test_a_broken_device_ends_the_engine() -> None:
    world = PipelinedWorld(config())
    for number in range(3):
        world.add(request(str(number), (1, 2, 3), max_tokens=50))
    for _ in range(4):
        world.step()
    world.runner.fail_on = frozenset(range(97))
    with pytest.raises(RuntimeError, match="failed"):
        world.run()


async def test_streams_of_an_engine_a_step_ahead_end_and_leave_it_idle() -> None:
    runner = PipelinedRunner(4)
    async with running(config(async_scheduling=True), runner=runner) as engine:
        requests = [request(f"r{n}", tuple(range(n, n + 5)), max_tokens=10) for n in range(12)]
        streams = await asyncio.gather(*(collect(engine, asked) for asked in requests))
        async with aclosing(engine.generate(request("leaves", (1, 2, 3), max_tokens=100))) as stream:
            await anext(stream)
        await engine.drain()
        await until_idle(engine)
    for asked, deltas in zip(requests, streams, strict=True):
        token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        assert token_ids == continuation(asked.prompt_token_ids, 10)
    assert runner.num_overlapping > 0
