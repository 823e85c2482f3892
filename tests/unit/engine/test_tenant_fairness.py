"""Fair shares of the slots between tenants of a band: victims, shares, number of preemptions and their cost."""

import random
from dataclasses import replace

import pytest

from replicas.engine.config import EngineConfig, KVPressurePolicy
from replicas.engine.sequence import Sequence
from replicas.protocol import Band, GenerateRequest
from testkit.engine.random_worlds import play, random_config, random_request
from testkit.engine.shadow_runner import World, config, continuation, prompt, request
from tests.seeds import Seeds

pytestmark = pytest.mark.rotated


def flood(world: World, count: int, tenant: str = "flood", band: Band = Band.STANDARD, max_tokens: int = 60) -> None:
    """Add requests of one tenant, and let those with a slot decode."""
    first = len(world.outcomes)
    world.add(
        *(
            request(f"{tenant}{number}", prompt(6, 1 + number), max_tokens, band, tenant=tenant)
            for number in range(first, first + count)
        )
    )
    world.step(6)


def held(world: World) -> dict[str, int]:
    """Return the number of slots by tenant."""
    tenants = [sequence.request.tenant for sequence in world.engine._scheduler.running]
    return {tenant: tenants.count(tenant) for tenant in tenants}


def roomy(**changes: object) -> World:
    return World(config(num_blocks=400, max_model_len=128, max_num_seqs=8, **changes))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_idle_tenant_starts_in_the_next_step_beside_a_flood(async_scheduling: bool) -> None:
    world = roomy(async_scheduling=async_scheduling)
    flood(world, 12)
    world.add(request("idle", prompt(9, 40), 5, tenant="idle"))
    assert world.steps_until_first_token("idle") == 1 + async_scheduling
    assert held(world) == {"flood": 7, "idle": 1}
    world.run()
    for number in range(12):
        assert tuple(world.outcomes[f"flood{number}"].token_ids) == continuation(prompt(6, 1 + number), 60)


def test_a_second_flood_gets_half_of_the_slots_and_no_more() -> None:
    world = roomy()
    flood(world, 12, "one")
    flood(world, 12, "two")
    assert held(world) == {"one": 4, "two": 4}
    assert world.engine._scheduler.num_fairness_preemptions == 4
    world.step(10)
    assert world.engine._scheduler.num_fairness_preemptions == 4, "a tenant at its share takes nothing back"
    world.run()


def test_the_tenant_with_most_slots_is_preempted() -> None:
    world = roomy()
    flood(world, 6, "most")
    flood(world, 2, "few")
    world.add(request("idle", prompt(9, 40), 5, tenant="idle"))
    world.step()
    assert held(world) == {"most": 5, "few": 2, "idle": 1}
    (waiting,) = world.engine._scheduler.waiting.sequences()
    assert waiting.request_id == "most5"
    world.run()


def test_more_tenants_than_slots_keep_one_slot_each() -> None:
    world = roomy()
    for number in range(8):
        flood(world, 1, f"tenant{number}-")
    world.add(request("ninth", prompt(9, 40), 5, tenant="ninth"))
    world.step(10)
    assert world.engine._scheduler.num_fairness_preemptions == 0
    assert not world.outcomes["ninth"].token_ids
    world.run()


def test_free_slots_go_to_the_tenant_below_its_share_first() -> None:
    world = roomy(fairness_rest_steps=1000)
    flood(world, 20, max_tokens=8)
    world.add(*(request(f"idle{number}", prompt(9, 40), 5, tenant="idle") for number in range(2)))
    world.step(9)
    assert all(world.outcomes[f"idle{number}"].token_ids for number in range(2))
    assert not world.outcomes["flood19"].token_ids
    world.run()


def test_lower_bands_are_preempted_before_the_same_band() -> None:
    world = roomy()
    flood(world, 7)
    flood(world, 1, "batch", Band.BATCH)
    world.add(request("idle", prompt(9, 40), 5, tenant="idle"))
    world.step()
    assert held(world) == {"flood": 7, "idle": 1}
    assert world.engine._scheduler.num_fairness_preemptions == 0
    world.run()


def test_a_resumed_sequence_keeps_its_slot_for_some_steps() -> None:
    world = World(config(num_blocks=400, max_num_seqs=2, fairness_rest_steps=20))
    flood(world, 2, max_tokens=90)
    first_token: dict[str, int] = {}
    for number in range(3):
        world.add(request(f"idle{number}", prompt(9, 40), 2, tenant="idle"))
        first_token[f"idle{number}"] = world.steps_until_first_token(f"idle{number}")
        world.step(3)
    assert (first_token["idle0"], first_token["idle1"]) == (1, 1)
    assert 20 - 4 <= first_token["idle2"] + 4 <= 20, "both sequences of the flood have given way lately"
    world.run()


def test_resuming_after_preemption_costs_less_than_a_block() -> None:
    world = roomy()
    flood(world, 8)
    world.add(request("idle", prompt(9, 40), 5, tenant="idle"))
    world.run()
    wasted = {
        dict(metric.labels)["cause"]: metric.value
        for metric in world.engine.metrics().metrics
        if metric.name == "headway:wasted_tokens"
    }
    assert wasted["preempt"] == 0
    assert 0 < wasted["fairness"] <= world.config.block_size


def crowded(rng: random.Random, world: World, number: int) -> GenerateRequest:
    """Return a random request, mostly of one band and of one tenant."""
    made = random_request(rng, world, number)
    if rng.random() < 0.2:
        return made
    brief = replace(made, prompt_token_ids=made.prompt_token_ids[:3])
    room = world.config.max_model_len - len(brief.prompt_token_ids)
    params = replace(made.params, max_tokens=rng.randint(1, room), prompt_logprobs=None)
    return replace(brief, params=params, band=Band.STANDARD, tenant=rng.choice("aaab"))


class WatchedWorld(World):
    """World that checks after each step that no sequence was preempted again within its rest steps."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._preempted_at: dict[Sequence, int] = {}

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            super().step()
            scheduler = self.engine._scheduler
            for sequence in [*scheduler.running, *scheduler.waiting.sequences()]:
                self._check(sequence)

    def _check(self, sequence: Sequence) -> None:
        step, last = sequence.fairness_preemption_step, self._preempted_at.get(sequence)
        if step is not None and step != last:
            assert last is None or step - last >= self.config.fairness_rest_steps
            self._preempted_at[sequence] = step


@pytest.mark.random_worlds(300, per_call=50)
def test_random_tenants_are_preempted_seldom_and_exactly(seeds: Seeds) -> None:
    num_fairness_preemptions = 0
    for seed in seeds:
        rng = random.Random(seed)
        limits = random_config(rng, async_scheduling=rng.random() < 0.5)
        limits = replace(limits, num_blocks=limits.num_blocks * 8, max_queued_requests=100)
        world = WatchedWorld(replace(limits, max_model_len=max(limits.max_model_len, 24)))
        for asked, outcome, is_whole in play(rng, world, crowded):
            expected = continuation(asked.prompt_token_ids, asked.params.max_tokens)
            assert tuple(outcome.token_ids) == expected[: len(outcome.token_ids)]
            assert not is_whole or len(outcome.token_ids) == len(expected)
        num_fairness_preemptions += world.engine._scheduler.num_fairness_preemptions
    if seeds.are_many:
        assert num_fairness_preemptions > 0, "the worlds do not reach what they should test"


@pytest.mark.parametrize("policy", list(KVPressurePolicy))
@pytest.mark.parametrize("seed", range(3))
def test_waste_for_fairness_is_bounded_by_the_rest_steps(policy: KVPressurePolicy, seed: int) -> None:
    """Without a prefix cache a resumed sequence is computed whole: the worst case."""
    rng = random.Random(seed)
    rest = 16
    world = World(
        config(
            num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False,
            kv_pressure_policy=policy, fairness_rest_steps=rest,
        )
    )  # fmt: skip
    flood(world, 12, max_tokens=100)
    for number in range(150):
        if rng.random() < 0.3:
            world.add(request(f"idle{number}", prompt(9, 40), rng.randint(1, 9), tenant="idle"))
        world.step()
    scheduler = world.engine._scheduler
    assert 0 < scheduler.num_fairness_preemptions <= 12 * (1 + world.num_steps // rest)
    world.run()
