"""Fair shares of the KV blocks between tenants of a band: victims, shares and progress."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from replicas.engine.sequence import Sequence
from replicas.engine.tenant_slots import TenantBlocks
from replicas.protocol import Band, GenerateRequest
from testkit.engine.random_worlds import random_config
from testkit.engine.shadow_runner import World, config, continuation, prompt, request
from tests.seeds import Seeds

pytestmark = pytest.mark.rotated

NUM_BLOCKS = 40


def tight(**changes: object) -> World:
    """Return a world of 40 blocks of 4 tokens and more slots than anybody needs."""
    return World(
        config(num_blocks=NUM_BLOCKS, max_model_len=128, max_num_seqs=31, enable_prefix_caching=False, **changes)
    )


def add(
    world: World, tenant: str, count: int, num_tokens: int, max_tokens: int = 20, band: Band = Band.STANDARD
) -> None:
    first = len(world.outcomes)
    world.add(
        *(
            request(f"{tenant}{number}", prompt(num_tokens, 1 + number), max_tokens, band, tenant=tenant)
            for number in range(first, first + count)
        )
    )


def held(world: World) -> Counter[str]:
    """Return the number of blocks by tenant."""
    blocks: Counter[str] = Counter()
    for sequence in world.engine._scheduler.running:
        blocks[sequence.request.tenant] += sequence.num_blocks
    return blocks


def num_fairness_preemptions(world: World) -> int:
    return world.engine._scheduler.num_fairness_preemptions


def test_a_tenant_alone_uses_the_whole_pool() -> None:
    world = tight()
    add(world, "one", 8, 20)
    world.step(12)
    assert held(world)["one"] >= NUM_BLOCKS - 8 and num_fairness_preemptions(world) == 0
    world.run()


def test_a_tenant_below_its_share_starts_although_another_holds_all_blocks() -> None:
    world = tight()
    add(world, "long", 6, 24, max_tokens=60)
    world.step(10)
    assert world.engine.stats().num_free_blocks < 10 and len(world.engine._scheduler.running) < 31
    add(world, "idle", 1, 24, max_tokens=5)
    assert world.steps_until_first_token("idle6") == 1
    assert held(world)["long"] >= NUM_BLOCKS // 2, "it keeps its share"
    world.run()
    for number in range(6):
        assert tuple(world.outcomes[f"long{number}"].token_ids) == continuation(prompt(24, 1 + number), 60)


def test_a_tenant_beyond_its_share_is_preempted_first_when_blocks_run_out() -> None:
    world = tight()
    add(world, "long", 4, 24, max_tokens=40)
    world.step(4)
    add(world, "short", 1, 8, max_tokens=60)
    for _ in range(80):
        world.step()
        short = world.outcomes["short4"]
        assert short.finish_reason is not None or held(world)["short"] > 0 or not short.token_ids
    assert world.engine._scheduler.num_preemptions > 0
    world.run()


def test_an_only_sequence_keeps_its_blocks_even_beyond_the_share() -> None:
    world = tight()
    add(world, "one", 1, 100, max_tokens=20)
    world.step(8)
    add(world, "many", 6, 12, max_tokens=20)
    world.step(8)
    assert held(world)["one"] > NUM_BLOCKS // 2 and num_fairness_preemptions(world) == 0
    world.run()
    assert world.engine._scheduler.num_preemptions <= 12


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_two_tenants_beyond_the_pool_end_without_taking_blocks_in_turn(async_scheduling: bool) -> None:
    world = tight(async_scheduling=async_scheduling, fairness_rest_steps=1)
    add(world, "one", 6, 20, max_tokens=40)
    add(world, "two", 6, 20, max_tokens=40)
    world.run()
    assert num_fairness_preemptions(world) <= 6, "what one of them got before the other came"
    assert world.engine._scheduler.num_preemptions <= 24
    for name in world.outcomes:
        assert len(world.outcomes[name].token_ids) == 40


def test_lower_bands_give_their_blocks_before_any_tenant_of_the_band() -> None:
    world = tight()
    add(world, "long", 3, 32)
    add(world, "batch", 1, 24, band=Band.BATCH)
    world.step(8)
    assert held(world)["batch"] >= 6
    add(world, "idle", 1, 16, max_tokens=4)
    world.step()
    assert "batch" not in held(world) and num_fairness_preemptions(world) == 0
    world.run()


@pytest.mark.sampled(40)
@pytest.mark.parametrize("seed", range(200))
def test_whoever_yields_keeps_its_share(seed: int) -> None:
    rng = random.Random(seed)
    running = []
    for number in range(rng.randint(1, 12)):
        asked = replace(request(f"r{number}", (1,), 1, rng.choice(list(Band))), tenant=rng.choice("aaabc"))
        running.append(Sequence(asked, 0.0, None, number))
        running[-1].num_blocks = rng.randint(1, 20)
    running.sort(key=lambda sequence: sequence.urgency)
    band = rng.choice(list(Band))
    of_band = [sequence for sequence in running if sequence.band is band]
    num_tenants = max(1, len({sequence.request.tenant for sequence in of_band})) + rng.randint(0, 2)
    more_urgent = sum(sequence.num_blocks for sequence in running if sequence.band < band)
    num_blocks = sum(sequence.num_blocks for sequence in running)
    blocks = TenantBlocks(running, band, num_blocks, num_tenants)
    assert blocks.share == max(1, (num_blocks - more_urgent) // num_tenants)
    yielding = blocks.yielding(lambda sequence: rng.random() < 0.9)
    left = [sequence for sequence in of_band if sequence not in yielding]
    assert len(set(yielding)) == len(yielding) and set(yielding) <= set(of_band)
    for tenant in {sequence.request.tenant for sequence in yielding}:
        assert sum(s.num_blocks for s in left if s.request.tenant == tenant) >= blocks.share
    if num_tenants == 1 and num_blocks > more_urgent:
        assert not yielding


@pytest.mark.random_worlds(300, per_call=50)
def test_random_contexts_all_end_and_have_the_same_tokens(seeds: Seeds) -> None:
    num_for_fairness = 0
    for seed in seeds:
        rng = random.Random(seed)
        limits = random_config(rng, async_scheduling=rng.random() < 0.5)
        limits = replace(limits, num_blocks=rng.randint(20, 60), max_num_seqs=24, max_num_batched_tokens=40)
        longest = max(2, limits.num_blocks * limits.block_size // rng.choice([2, 6, 10]))
        world = World(replace(limits, max_model_len=longest, max_queued_requests=100))
        asked: list[GenerateRequest] = []
        for _ in range(120):
            if rng.random() < 0.3:
                context = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, longest - 1)))
                band = rng.choice([Band.STANDARD, Band.STANDARD, Band.BATCH])
                name = f"r{len(world.outcomes)}"
                max_tokens = rng.randint(1, longest - len(context))
                asked.append(request(name, context, max_tokens, band, tenant=rng.choice("aaaaaab")))
                world.add(asked[-1])
            world.step()
            world.engine.check_invariants()
        world.run()
        for made in asked:
            expected = continuation(made.prompt_token_ids, made.params.max_tokens)
            assert tuple(world.outcomes[made.request_id].token_ids) == expected
        assert world.engine._scheduler.num_preemptions <= 4 * len(asked), "nobody is preempted again and again"
        num_for_fairness += num_fairness_preemptions(world)
    if seeds.are_many:
        assert num_for_fairness > 5, "the worlds do not reach what they should test"
