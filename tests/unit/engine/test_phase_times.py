"""Times of sequences in their phases: they add up to the time in the engine."""

import random

import pytest

from replicas.protocol import PhaseSeconds
from testkit.engine.random_worlds import play, random_config, random_request
from testkit.engine.shadow_runner import World, config, request
from tests.seeds import Seeds

pytestmark = pytest.mark.rotated


def phases_of(world: World, name: str) -> PhaseSeconds:
    last = world.outcomes[name].last
    assert last is not None and last.phases is not None
    return last.phases


def test_a_sequence_alone_prefills_and_decodes() -> None:
    world = World(config(), step_s=1.0)
    world.run(request("r", max_tokens=4))
    assert phases_of(world, "r") == PhaseSeconds(waiting_s=0.0, prefill_s=1.0, decode_s=3.0)


def test_the_second_of_one_slot_waits() -> None:
    world = World(config(max_num_seqs=1), step_s=1.0)
    world.run(request("first", max_tokens=4), request("second", max_tokens=2))
    assert phases_of(world, "second") == PhaseSeconds(waiting_s=4.0, prefill_s=1.0, decode_s=1.0)


def test_a_preempted_sequence_tells_how_long_it_had_no_slot() -> None:
    """Two sequences of at most 7 blocks share 8: the later one gives way."""
    world = World(config(num_blocks=8, max_model_len=28), step_s=1.0)
    world.run(*(request(str(number), (number, *range(2, 12)), max_tokens=16) for number in range(2)))
    phases = phases_of(world, "1")
    assert phases.num_preemptions == 1 and phases.preempted_s > 0
    assert phases.total_s == world.clock.now - world.added_s["1"]


def test_times_come_with_the_first_delta_and_the_last_alone() -> None:
    world = World(config(), step_s=1.0)
    world.add(request("r", max_tokens=4))
    deltas = [delta for _ in range(4) for delta in world.engine.step()]
    assert [delta.phases is not None for delta in deltas] == [True, False, False, True]


@pytest.mark.random_worlds(600, per_call=100)
def test_phases_add_up_to_the_time_in_the_engine(seeds: Seeds) -> None:
    num_preempted = 0
    for seed in seeds:
        rng = random.Random(seed)
        world = World(random_config(rng, async_scheduling=rng.random() < 0.5), step_s=0.5)
        for asked, outcome, is_whole in play(rng, world, random_request):
            if not is_whole:
                continue
            phases = phases_of(world, asked.request_id)
            whole_s = world.ended_s[asked.request_id] - world.added_s[asked.request_id]
            assert phases.total_s == pytest.approx(whole_s, abs=1e-6), (seed, asked.request_id)
            assert outcome.last is not None and min(phases.waiting_s, phases.prefill_s, phases.decode_s) >= 0
            num_preempted += phases.preempted_s > 0
    assert num_preempted > 10 or not seeds.are_many
