"""Blocks of layers with a window: given back behind it, cached, shared and bounded, with the same answers."""

import random

import pytest

from replicas.engine.config import EngineConfig
from testkit.engine.random_worlds import play, random_config, random_request
from testkit.engine.shadow_runner import ShadowRunner, World, config, continuation
from tests.seeds import Seeds
from tests.unit.engine.test_async_scheduling import EOS, PipelinedWorld, check_outcomes
from tests.unit.engine.test_state_slots import RepeatingRunner

WINDOWS: tuple[tuple[int | None, ...], ...] = ((1, None), (6, None), (6, 6, None), (3, 9, None), (5, None, None), (7,))
NUM_OPERATIONS = 2_500


def windowed(**changes: object) -> EngineConfig:
    return config(**{"windows": (10, None), "num_blocks": 64, "max_num_batched_tokens": 16, **changes})


def random_windowed(rng: random.Random, **changes: object) -> EngineConfig:
    num_state_slots = rng.randint(3, 14) if rng.random() < 0.3 else 0
    return random_config(rng, windows=rng.choice(WINDOWS), num_state_slots=num_state_slots, **changes)


@pytest.mark.random_worlds(450, per_call=50)
def test_random_worlds_read_no_stale_block_and_give_back_all(seeds: Seeds) -> None:
    num_preemptions = num_hits = 0
    for seed in seeds:
        rng = random.Random(seed)
        world = World(random_windowed(rng), make_runner=RepeatingRunner if rng.random() < 0.5 else ShadowRunner)
        for asked, outcome, is_whole in play(rng, world, random_request):
            expected = continuation(asked.prompt_token_ids, asked.params.max_tokens)
            assert tuple(outcome.token_ids) == (expected if is_whole else expected[: len(outcome.token_ids)])
            num_hits += outcome.last is not None and outcome.last.usage.cached_tokens > 0
        num_preemptions += world.engine._scheduler.num_preemptions
    if seeds.are_many:
        assert num_preemptions > 5 and num_hits > 5, "the worlds do not reach what they test"


@pytest.mark.random_worlds(225, per_call=25)
def test_steps_ahead_on_a_device_that_fails_now_and_then_change_no_answer(seeds: Seeds) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        world = PipelinedWorld(random_windowed(rng, eos_token_ids=EOS))
        world.runner.rng, world.runner.failure_share = rng, rng.choice([0.0, 0.2])
        check_outcomes(rng, world)
