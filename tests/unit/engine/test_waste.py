"""What an engine computes in vain is counted, once for each time, by what made it vain."""

from __future__ import annotations

import random

import pytest

from testkit.engine.shadow_runner import World, config, request
from tests.seeds import Seeds


def wasted(world: World) -> dict[str, float]:
    """Tokens by cause."""
    metrics = world.engine.metrics().metrics
    return {dict(metric.labels)["cause"]: metric.value for metric in metrics if metric.name == "headway:wasted_tokens"}


def num_computed(world: World) -> int:
    """Tokens that the device computed, all in all."""
    return sum(batch.num_tokens for batch in world.runner.batches)


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    """A prompt that shares no beginning with that of another number."""
    return (number % 97, number // 97, *range(2, length))


def test_nothing_is_wasted_where_nothing_goes_wrong() -> None:
    world = World(config())
    for number in range(5):
        world.add(request(str(number), prompt_of(number, 20)))
    world.run()
    assert wasted(world) == {"preempt": 0, "abort": 0, "expired": 0, "surplus": 0}


def test_what_a_preempted_sequence_computes_again_is_wasted() -> None:
    """Two sequences of at most 7 blocks share 8: the later one gives way, and nothing is cached."""
    world = World(config(num_blocks=8, max_model_len=28, enable_prefix_caching=False))
    for number in range(2):
        world.add(request(str(number), prompt_of(number, 12), max_tokens=16))
    world.run()
    assert wasted(world)["preempt"] == num_computed(world) - 2 * (12 + 16 - 1) > 0


def test_what_the_prefix_cache_kept_of_a_preempted_sequence_is_not_wasted() -> None:
    amounts = []
    for enable_prefix_caching in (False, True):
        world = World(config(num_blocks=12, max_model_len=40, enable_prefix_caching=enable_prefix_caching))
        for number in range(2):
            world.add(request(str(number), prompt_of(number, 16), max_tokens=20))
        world.run()
        amounts.append(wasted(world)["preempt"])
    without, kept = amounts
    assert 0 < kept < without


def test_an_aborted_request_wasted_what_was_computed_for_it() -> None:
    world = World(config())
    world.add(request("leaves", prompt_of(1, 20), max_tokens=50))
    for _ in range(6):
        world.step()
    world.engine.abort("leaves")
    assert wasted(world) == {"preempt": 0, "abort": 20 + 5, "expired": 0, "surplus": 0}
    assert wasted(world)["abort"] == num_computed(world)


def test_what_an_aborted_request_found_in_the_cache_cost_nothing() -> None:
    world = World(config())
    world.add(request("before", prompt_of(1, 21), max_tokens=1))
    world.run()
    world.add(request("leaves", (*prompt_of(1, 20), 50, 51, 52, 53), max_tokens=50))
    world.step()
    world.engine.abort("leaves")
    assert wasted(world)["abort"] == 4


@pytest.mark.parametrize("is_first_aborted", [False, True])
def test_what_never_ran_or_has_ended_wastes_nothing(is_first_aborted: bool) -> None:
    world = World(config(max_num_seqs=1))
    world.add(request("runs", prompt_of(1, 8), max_tokens=2))
    world.add(request("waits", prompt_of(2, 8), max_tokens=2))
    if is_first_aborted:
        world.engine.abort("waits")
    world.run()
    for name in ("runs", "waits", "unknown"):
        world.engine.abort(name)
    assert wasted(world)["abort"] == 0


def test_a_request_whose_deadline_passes_wasted_what_was_computed_for_it() -> None:
    world = World(config(), step_s=1.0)
    deadline_unix_s = world.clock.unix(world.clock.now + 5.5)
    world.add(request("late", prompt_of(1, 10), max_tokens=50, deadline_unix_s=deadline_unix_s))
    world.run()
    assert wasted(world) == {"preempt": 0, "abort": 0, "expired": num_computed(world), "surplus": 0}
    assert num_computed(world) == 10 + 5


def play(rng: random.Random, world: World) -> int:
    """Random requests, deadlines and aborts to the end; how many of the computed tokens were of use."""
    names: list[str] = []
    for number in range(30):
        deadline_unix_s = world.clock.unix(world.clock.now + rng.randrange(4, 60)) if rng.random() < 0.3 else None
        world.add(
            request(
                str(number), prompt_of(number, rng.randrange(2, 40)), max_tokens=rng.randrange(1, 24),
                deadline_unix_s=deadline_unix_s,
            )
        )  # fmt: skip
        names.append(str(number))
        for _ in range(rng.randrange(4)):
            world.step()
        if rng.random() < 0.3:
            world.engine.abort(rng.choice(names))
    world.run()
    return sum(
        outcome.last.usage.prompt_tokens + outcome.last.usage.completion_tokens - 1 - outcome.last.usage.cached_tokens
        for outcome in world.outcomes.values()
        if outcome.last is not None and outcome.finish_reason is not None and outcome.last.error is None
    )


@pytest.mark.random_worlds(40, per_call=10)
def test_every_computed_token_was_of_use_or_is_wasted(seeds: Seeds) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        limits = {"num_blocks": 24, "max_model_len": 64, "max_num_batched_tokens": rng.choice([9, 32])}
        world = World(config(**limits, enable_prefix_caching=rng.random() < 0.7), step_s=1.0)
        useful = play(rng, world)
        assert useful + sum(wasted(world).values()) == num_computed(world)
        assert useful > 0 and sum(wasted(world).values()) > 0
