"""Slots of recurrent state: shared, moved, cached and given back as blocks are, with the same answers."""

import random

import pytest

from replicas.engine.batch import ItemResult, ScheduledBatch
from replicas.engine.config import EngineConfig
from replicas.protocol import Band
from testkit.engine.random_worlds import play, random_config, random_request
from testkit.engine.shadow_runner import Outcome, ShadowRunner, World, config, continuation, prompt, request
from tests.seeds import Seeds
from tests.unit.engine.test_async_scheduling import EOS, PipelinedWorld, check_outcomes

pytestmark = pytest.mark.rotated

LONG = prompt(30)


class RepeatingRunner(ShadowRunner):
    """Runner that computes every step twice."""

    def execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        super().execute(batch)
        return super().execute(batch)


def hybrid(**changes: object) -> EngineConfig:
    return config(**{"num_state_slots": 24, **changes})


def hits(world: World, *names: str) -> list[int]:
    """Return the prompt tokens of each request that were found cached."""
    usages = [last.usage for name in names if (last := world.outcomes[name].last) is not None]
    return [usage.cached_tokens for usage in usages]


def random_hybrid(rng: random.Random, **changes: object) -> EngineConfig:
    return random_config(rng, num_state_slots=rng.randint(3, 14), **changes)


@pytest.mark.random_worlds(450, per_call=50)
def test_random_worlds_read_no_stale_state_and_give_back_every_slot(seeds: Seeds) -> None:
    num_preemptions = num_hits = 0
    for seed in seeds:
        rng = random.Random(seed)
        world = World(random_hybrid(rng), make_runner=RepeatingRunner if rng.random() < 0.5 else ShadowRunner)
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
        world = PipelinedWorld(random_hybrid(rng, eos_token_ids=EOS))
        world.runner.rng, world.runner.failure_share = rng, rng.choice([0.0, 0.2])
        check_outcomes(rng, world)


def test_a_sequence_alone_needs_few_slots_however_long_it_is() -> None:
    for make_world, num_slots in ((World, 2), (PipelinedWorld, 3)):
        world = make_world(hybrid(num_state_slots=num_slots))
        world.run(request("r", prompt(50), max_tokens=60))
        assert world.outcomes["r"].token_ids == list(continuation(prompt(50), 60))


def test_too_few_slots_for_one_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="1 slots for recurrent state; one sequence needs 2"):
        hybrid(num_state_slots=1)
    with pytest.raises(ValueError, match="one sequence needs 3"):
        hybrid(num_state_slots=2, async_scheduling=True)


def test_slots_limit_the_sequences_that_run_together() -> None:
    world = World(hybrid(num_state_slots=5))
    world.add(*(request(str(number), prompt(9, number), max_tokens=9) for number in range(6)))
    world.step(3)
    assert world.engine.stats().num_running == 2 == world.engine.stats().num_slots
    world.add(request("urgent", prompt(5, 20), band=Band.INTERACTIVE))
    world.step(2)
    assert world.engine._scheduler.num_preemptions == 1
    world.run()


@pytest.mark.parametrize("make_world", [World, PipelinedWorld])
def test_a_prompt_keeps_the_last_two_boundaries_before_its_end(make_world: type[World]) -> None:
    world = make_world(hybrid())
    world.run(request("a", LONG, max_tokens=1))  # Boundaries at 24 and 28.
    world.run(request("same", LONG, max_tokens=1), request("shorter", LONG[:27], max_tokens=1))
    world.run(request("before", LONG[:20], max_tokens=1))
    assert hits(world, "a", "same", "shorter", "before") == [0, 28, 24, 0]


def test_a_sequence_that_ends_leaves_its_last_state() -> None:
    world = World(hybrid())
    world.run(request("a", LONG, max_tokens=20))
    reply = continuation(LONG, 20)
    world.run(request("next", (*LONG, *reply, 1), max_tokens=1))
    assert hits(world, "next") == [48]


def test_a_preempted_sequence_resumes_from_its_last_state() -> None:
    world = World(hybrid(max_num_seqs=1))
    world.add(request("a", LONG, max_tokens=30))
    world.step(12)
    computed = world.engine._scheduler.running[0].num_computed_tokens
    world.run(request("urgent", (7, 8), band=Band.INTERACTIVE))
    resumed = next(item for batch in world.runner.batches for item in batch.items if item.preemption == 1)
    assert resumed.start == computed - computed % 4


def test_the_end_of_a_cached_prefix_without_a_state_is_kept() -> None:
    world = World(hybrid(num_state_slots=40))
    for number, expected in enumerate((0, 0, 16, 16)):
        name = str(number)
        world.run(request(name, (*LONG[:17], *prompt(20, 60 + number)), max_tokens=1))
        assert hits(world, name) == [expected]


def test_a_neighbour_waits_for_a_prefix_only_where_a_state_will_come() -> None:
    world = World(hybrid())
    world.run(request("a", LONG, max_tokens=1), request("same", LONG, max_tokens=1))
    assert hits(world, "a", "same") == [0, 28]
    world = World(hybrid())
    world.add(request("a", LONG, max_tokens=1), request("branch", (*LONG[:9], 99), max_tokens=1))
    world.step()
    assert {item.sequence.request_id for item in world.runner.batches[0].items} == {"a", "branch"}


def test_snapshots_give_way_to_running_sequences() -> None:
    world = World(hybrid(num_state_slots=4, max_num_seqs=2))
    outcomes: list[Outcome] = []
    for number in range(6):
        world.run(*(request(f"{number}-{part}", prompt(21, 3 * number + part), max_tokens=9) for part in range(2)))
        outcomes += [world.outcomes[f"{number}-{part}"] for part in range(2)]
    assert [len(outcome.token_ids) for outcome in outcomes] == [9] * 12


def test_without_prefix_caching_no_state_is_kept() -> None:
    world = World(hybrid(enable_prefix_caching=False))
    world.run(request("a", LONG, max_tokens=9), request("b", LONG, max_tokens=9))
    assert hits(world, "a", "b") == [0, 0]
    assert world.engine._scheduler.blocks.states.num_hit_blocks([b""]) == 0
