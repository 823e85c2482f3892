"""Launching a step before the last one's tokens are known changes when they come, never which they are."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, replace

import pytest

from replicas.engine.batch import LaunchedStep, ScheduledBatch, ScheduledSequence, StepResults
from replicas.engine.config import EngineConfig
from replicas.protocol import Band, FinishReason, GenerateRequest
from testkit.engine.random_worlds import play, random_config, random_request
from testkit.engine.shadow_runner import FakeClock, Outcome, ShadowRunner, World, config, continuation, request
from testkit.engine.single_stream import generate
from tests.seeds import Seeds
from tests.unit.engine.test_async_engine import collect, running, token_ids, until_idle
from tests.unit.engine.test_engine_metrics import num_computed, prompt_of, wasted

pytestmark = pytest.mark.rotated

EOS = frozenset({3, 31, 59})
_GARBAGE = (-1, -1)
_MAX_ITEMS = 5


@dataclass
class _Step:
    """A launched step of a device that works in order."""

    runner: PipelinedRunner
    launched: LaunchedStep
    batch: ScheduledBatch
    fails: bool = False

    def sample(self) -> None:
        assert list(self.runner.pending) == [self], "the steps before are collected"
        self.launched.sample()

    def collect(self) -> StepResults:
        assert self.runner.pending.popleft() is self, "steps are collected in order"
        if self.fails:
            for step in (self, *self.runner.pending):
                self.runner.spoil(step.batch)
            raise self.runner.failure()
        return self.launched.collect()


class PipelinedRunner(ShadowRunner):
    """Shadow runner that knows its launched and uncollected steps, and may fail at random.

    A failed step makes its KV, and the KV of the steps launched after it, invalid.
    """

    def __init__(self, block_size: int, step_s: float = 0.0, clock: FakeClock | None = None) -> None:
        super().__init__(block_size, step_s, clock)
        self.pending: deque[_Step] = deque()
        self.num_overlapping = 0
        self.rng = random.Random(0)
        self.failure_share = 0.0
        self._num_sound_launches = 0

    def failure(self) -> RuntimeError:
        """Return an error to raise. The next steps succeed, so the other items of the batch can run one by one."""
        self._num_sound_launches = _MAX_ITEMS + 1
        return RuntimeError("the device failed")

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        assert len(self.pending) <= 1, "more than one step ahead"
        for item in batch.items:
            num_known = len(item.sequence.token_ids)
            assert item.end <= num_known + 1
            assert item.end <= num_known or not (item.sequence.has_penalties or item.sequence.has_bad_phrases)
        self._num_sound_launches -= 1
        fails = self._num_sound_launches < 0 and self.rng.random() < self.failure_share
        if fails and self.rng.random() < 0.5:
            raise self.failure()
        self.num_overlapping += bool(self.pending)
        launched = super().launch(batch)
        self.pending.append(_Step(self, launched, batch, fails))
        return self.pending[-1]

    def spoil(self, batch: ScheduledBatch) -> None:
        for item in batch.items:
            if item.holds_blocks:
                self._slots.update(dict.fromkeys(self._slots_of(item), _GARBAGE))
                self.states.spoil(item)

    def _slots_of(self, item: ScheduledSequence) -> list[tuple[int, int]]:
        tables, size = (item.sequence.block_table, *item.sequence.more_tables), self._block_size
        positions = range(item.start, item.end)
        return [(table[position // size], position % size) for table in tables for position in positions]


class PipelinedWorld(World):
    """A world that runs a step ahead."""

    runner: PipelinedRunner
    runner_type: type[PipelinedRunner] = PipelinedRunner

    def __init__(self, config: EngineConfig, step_s: float = 0.0) -> None:
        super().__init__(replace(config, async_scheduling=True), step_s, self.runner_type)

    def run(self, *requests: GenerateRequest) -> None:
        super().run(*requests)
        assert not self.runner.pending, "an idle engine left a step on the device"
        load = self.engine.stats()
        assert load.outstanding_tokens == load.waiting_tokens == 0


def anything(rng: random.Random, world: World, number: int) -> GenerateRequest:
    """Return a request that ends by length, token, text or constraint, with or without penalties for its tokens.

    Some of those with a constraint come from another replica, in the middle of their output.
    """
    made = random_request(
        rng, world, number,
        stop=rng.choice([(), (), ("c",), ("ab", "g"), ("xyz",)]),
        stop_token_ids=rng.choice([(), (7, 8)]),
        min_tokens=rng.choice([0, 0, 2]),
        ignore_eos=rng.random() < 0.3,
        repetition_penalty=1.1 if rng.random() < 0.1 else 1.0,
        frequency_penalty=0.5 if rng.random() < 0.05 else 0.0,
        grammar=f"{rng.randint(1, 9)} {rng.randint(1, 30)}" if rng.random() < 0.3 else None,
    )  # fmt: skip
    if made.params.grammar is None or rng.random() < 0.5:
        return made
    output = alone(made).token_ids
    return replace(made, output_token_ids=tuple(output[: rng.randrange(len(output))] if output else ()))


def alone(asked: GenerateRequest) -> Outcome:
    """Return the outcome in a synchronous engine with room for everything."""
    world = World(config(num_blocks=200, max_model_len=800, eos_token_ids=EOS))
    world.run(replace(asked, deadline_unix_s=None))
    return world.outcomes[asked.request_id]


def check_outcomes(rng: random.Random, world: World) -> None:
    """Play `world` to its end, and compare every outcome with that of a synchronous engine."""
    for asked, outcome, is_whole in play(rng, world, anything):
        expected = alone(asked)
        assert outcome.token_ids == expected.token_ids[: len(outcome.token_ids)]
        assert expected.text.startswith(outcome.text)
        if is_whole:
            assert outcome.last is not None and expected.last is not None
            assert replace(outcome, last=None) == replace(expected, last=None)
            assert outcome.last.stop_reason == expected.last.stop_reason
            assert outcome.last.usage.completion_tokens == len(expected.token_ids)
        if asked.output_token_ids:
            assert expected.token_ids == alone(replace(asked, output_token_ids=())).token_ids
        check_constraint(world, asked, outcome)


def check_constraint(world: World, asked: GenerateRequest, outcome: Outcome) -> None:
    """Check that the request's constraint has accepted the output tokens, and nothing else.

    A token that ends the sequence by itself is not among them, and the client of an aborted request has not seen all.
    """
    constraint = world.constraints.get(asked.request_id)
    if constraint is None:
        return
    num_accepted = len(constraint.accepted)
    if outcome.finish_reason is None:
        assert constraint.accepted[: len(outcome.token_ids)] == outcome.token_ids
    else:
        assert constraint.accepted == outcome.token_ids[:num_accepted]
        is_stopped = outcome.finish_reason is FinishReason.STOP and not constraint.is_complete
        assert len(outcome.token_ids) - num_accepted == is_stopped


@pytest.mark.random_worlds(480, per_call=60)
def test_random_worlds_give_what_a_synchronous_engine_gives(seeds: Seeds) -> None:
    num_preemptions = num_overlapping = num_surplus = num_cut = 0
    for seed in seeds:
        rng = random.Random(seed)
        world = PipelinedWorld(random_config(rng, eos_token_ids=EOS))
        check_outcomes(rng, world)
        num_preemptions += world.engine._scheduler.num_preemptions
        num_overlapping += world.runner.num_overlapping
        num_surplus += wasted(world)["surplus"] > 0
        num_cut += world.num_cut_constraints
    if seeds.are_many:
        assert num_cut > 0, "no constrained sequence is preempted in the middle of its output"
        assert num_preemptions > 25, "the worlds do not reach what they test"
        assert num_overlapping > 250 and num_surplus > 10, "the worlds do not reach what they test"


@pytest.mark.random_worlds(240, per_call=20)
def test_a_device_that_fails_now_and_then_changes_no_answer(seeds: Seeds) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        world = PipelinedWorld(random_config(rng, eos_token_ids=EOS))
        world.runner.rng, world.runner.failure_share = rng, 0.2
        check_outcomes(rng, world)


def ending_by_token(rng: random.Random) -> GenerateRequest:
    """Return an urgent request that ends by one of `EOS`, after at least three tokens and before its limit."""
    while True:
        prompt = prompt_of(rng.randrange(100), 8)
        output = continuation(prompt, 23)
        if EOS & set(output) and not EOS & set(output[:2]):
            return request("ends", prompt, 24, Band.INTERACTIVE)


def play_with_deadlines(rng: random.Random, world: World) -> int:
    """Play random requests, deadlines and aborts to the end; return the number of computed tokens that were of use.

    One of the requests is computed in every step until it ends by a token, so a step ahead has a surplus one.
    """
    names: list[str] = []
    urgent = rng.randrange(30)
    for number in range(30):
        if number == urgent:
            world.add(ending_by_token(rng))
        deadline_unix_s = world.clock.unix(world.clock.now + rng.randrange(4, 60)) if rng.random() < 0.3 else None
        world.add(
            request(
                str(number), prompt_of(number, rng.randrange(2, 40)), max_tokens=rng.randrange(1, 24),
                deadline_unix_s=deadline_unix_s,
            )
        )  # fmt: skip
        names.append(str(number))
        world.step(rng.randrange(4))
        if rng.random() < 0.3:
            world.engine.abort(rng.choice(names))
    world.run()
    return sum(
        outcome.last.usage.prompt_tokens + outcome.last.usage.completion_tokens - 1 - outcome.last.usage.cached_tokens
        for outcome in world.outcomes.values()
        if outcome.last is not None and outcome.finish_reason is not None and outcome.last.error is None
    )


@pytest.mark.parametrize(("make_world", "eos_token_ids"), [(World, frozenset()), (PipelinedWorld, EOS)])
@pytest.mark.random_worlds(40, per_call=10)
def test_every_computed_token_is_useful_or_counted_as_wasted(
    make_world: type[World], eos_token_ids: frozenset[int], seeds: Seeds
) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        limits = {"num_blocks": 24, "max_model_len": 64, "max_num_batched_tokens": rng.choice([9, 32])}
        caching = rng.random() < 0.7
        world = make_world(config(**limits, enable_prefix_caching=caching, eos_token_ids=eos_token_ids), step_s=1.0)
        useful = play_with_deadlines(rng, world)
        assert useful + sum(wasted(world).values()) == num_computed(world)
        assert useful > 0 and sum(wasted(world).values()) > 0
        assert make_world is World or wasted(world)["surplus"] > 0


def test_an_end_by_length_is_known_ahead_and_costs_nothing() -> None:
    worlds = World(config()), PipelinedWorld(config())
    for world in worlds:
        world.run(*(request(str(number), prompt_of(number, 9), max_tokens=6 + number) for number in range(4)))
    synchronous, ahead = worlds
    assert len(ahead.runner.batches) == len(synchronous.runner.batches)
    assert num_computed(ahead) == num_computed(synchronous)
    assert sum(wasted(ahead).values()) == 0


def test_an_end_by_token_hides_one_surplus_token() -> None:
    asked = request("r", (1, 2, 3), max_tokens=100)
    eos = frozenset({alone(asked).token_ids[5]})
    world = PipelinedWorld(config(eos_token_ids=eos))
    world.run(asked)
    outcome = world.outcomes["r"]
    assert outcome.finish_reason is FinishReason.STOP and outcome.token_ids[-1] in eos
    assert num_computed(world) == 3 + len(outcome.token_ids) - 1 + 1
    assert wasted(world)["surplus"] == 1


@pytest.mark.parametrize(("presence_penalty", "num_overlapping"), [(0.5, 0), (0.0, 7)])
def test_steps_overlap_unless_penalties_need_known_tokens(presence_penalty: float, num_overlapping: int) -> None:
    world = PipelinedWorld(config())
    world.run(request("r", (1, 2, 3), max_tokens=8, presence_penalty=presence_penalty))
    assert world.runner.num_overlapping == num_overlapping
    assert num_overlapping or world.num_steps == 8


def test_abort_frees_blocks_while_the_step_is_in_flight() -> None:
    world = PipelinedWorld(config())
    world.add(request("leaves", (1, 2, 3), max_tokens=50))
    world.step(5)
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
    world.step(30)
    assert world.engine.stats().generated_tokens_per_s == pytest.approx(10.0, rel=0.1)


def test_an_idle_engine_keeps_its_measured_speed() -> None:
    world = PipelinedWorld(config(max_num_seqs=1), step_s=0.1)
    world.run(request("r", (1, 2, 3), max_tokens=40))
    assert world.engine.stats().generated_tokens_per_s == 0.0
    assert world.engine.stats().saturated_tokens_per_s > 0.0
    world.add(request("next", (1, 2, 3), max_tokens=40))
    world.step(3)
    assert world.engine.stats().generated_tokens_per_s > 0.0


@pytest.mark.parametrize("num_steps", [0, 4])
@pytest.mark.parametrize("make_world", [World, PipelinedWorld])
def test_a_device_that_fails_everything_ends_the_engine(make_world: type[World], num_steps: int) -> None:
    world = make_world(config())
    world.add(*(request(str(number), (1, 2, 3), max_tokens=50) for number in range(3)))
    world.step(num_steps)
    world.runner.fail_on = frozenset(range(97))
    with pytest.raises(RuntimeError, match="the device failed"):
        world.run()


@pytest.mark.parametrize("is_ahead", [False, True])
async def test_streams_run_together_and_each_is_right(is_ahead: bool) -> None:
    runner = PipelinedRunner(4) if is_ahead else ShadowRunner(4)
    async with running(config(async_scheduling=is_ahead), runner=runner) as engine:
        requests = [request(f"r{n}", tuple(range(n, n + 5)), max_tokens=10) for n in range(12)]
        streams = await asyncio.gather(*(collect(engine, asked) for asked in requests))
        async with aclosing(generate(engine, request("leaves", (1, 2, 3), max_tokens=100))) as stream:
            await anext(stream)
        await engine.drain()
        await until_idle(engine)
    for asked, deltas in zip(requests, streams, strict=True):
        assert token_ids(deltas) == continuation(asked.prompt_token_ids, 10)
        assert [delta.finish_reason for delta in deltas].count(FinishReason.LENGTH) == 1
        assert deltas[-1].finish_reason is FinishReason.LENGTH and deltas[-1].stats is not None
    assert not isinstance(runner, PipelinedRunner) or runner.num_overlapping > 0
