"""Steps, refusals, and tokens that were computed in vain, by cause, are counted."""

import pytest

from replicas.errors import Overloaded
from testkit.engine.shadow_runner import World, config, request


def by_label(world: World, name: str, label: str) -> dict[str, float]:
    """Return the values of a metric by the value of one of its labels."""
    metrics = world.engine.metrics().metrics
    return {dict(metric.labels)[label]: metric.value for metric in metrics if metric.name == name}


def wasted(world: World) -> dict[str, float]:
    """Return the wasted tokens by cause."""
    return by_label(world, "headway:wasted_tokens", "cause")


def num_computed(world: World) -> int:
    """Tokens that the device computed, all in all."""
    return sum(batch.num_tokens for batch in world.runner.batches)


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    """Return a prompt that shares no beginning with that of another number."""
    return (number % 97, number // 97, *range(2, length))


def test_undisturbed_requests_waste_no_token() -> None:
    world = World(config())
    world.run(*(request(str(number), prompt_of(number, 20)) for number in range(5)))
    assert wasted(world) == {"preempt": 0, "fairness": 0, "abort": 0, "expired": 0, "surplus": 0}


def test_recomputed_tokens_of_a_preemption_are_wasted() -> None:
    """Two sequences of at most 7 blocks share 8: the later one gives way, and nothing is cached."""
    world = World(config(num_blocks=8, max_model_len=28, enable_prefix_caching=False))
    world.run(*(request(str(number), prompt_of(number, 12), max_tokens=16) for number in range(2)))
    assert wasted(world)["preempt"] == num_computed(world) - 2 * (12 + 16 - 1) > 0


def test_cached_tokens_of_a_preempted_sequence_are_not_wasted() -> None:
    amounts = []
    for enable_prefix_caching in (False, True):
        world = World(config(num_blocks=12, max_model_len=40, enable_prefix_caching=enable_prefix_caching))
        world.run(*(request(str(number), prompt_of(number, 16), max_tokens=20) for number in range(2)))
        amounts.append(wasted(world)["preempt"])
    without, kept = amounts
    assert 0 < kept < without


def test_computed_tokens_of_an_aborted_request_are_wasted() -> None:
    world = World(config())
    world.add(request("leaves", prompt_of(1, 20), max_tokens=50))
    world.step(6)
    world.engine.abort("leaves")
    assert wasted(world) == {"preempt": 0, "fairness": 0, "abort": num_computed(world), "expired": 0, "surplus": 0}
    assert num_computed(world) == 20 + 5


def test_cached_tokens_of_an_aborted_request_are_not_wasted() -> None:
    world = World(config())
    world.run(request("before", prompt_of(1, 21), max_tokens=1))
    world.add(request("leaves", (*prompt_of(1, 20), 50, 51, 52, 53), max_tokens=50))
    world.step()
    world.engine.abort("leaves")
    assert wasted(world)["abort"] == 4


@pytest.mark.parametrize("is_first_aborted", [False, True])
def test_aborting_a_waiting_or_ended_request_wastes_nothing(is_first_aborted: bool) -> None:
    world = World(config(max_num_seqs=1))
    world.add(request("runs", prompt_of(1, 8), max_tokens=2), request("waits", prompt_of(2, 8), max_tokens=2))
    if is_first_aborted:
        world.engine.abort("waits")
    world.run()
    for name in ("runs", "waits", "unknown"):
        world.engine.abort(name)
    assert wasted(world)["abort"] == 0


@pytest.mark.parametrize("num_blocks", [8, 64])
def test_sequences_report_their_shares_of_the_work(num_blocks: int) -> None:
    world = World(config(num_blocks=num_blocks, max_model_len=28, enable_prefix_caching=False), step_s=0.5)
    world.run(*(request(str(number), prompt_of(number, 12), max_tokens=16) for number in range(3)))
    usages = [outcome.last.usage for outcome in world.outcomes.values() if outcome.last is not None]
    assert sum(usage.computed_tokens for usage in usages) == num_computed(world)
    assert sum(usage.recomputed_tokens for usage in usages) == wasted(world)["preempt"]
    assert (wasted(world)["preempt"] > 0) == (num_blocks == 8)
    assert sum(usage.device_s for usage in usages) == pytest.approx(0.5 * len(world.runner.batches))


def test_tokens_of_a_request_past_its_deadline_are_wasted() -> None:
    world = World(config(), step_s=1.0)
    world.run(request("late", prompt_of(1, 10), max_tokens=50, deadline_unix_s=world.clock.unix(world.clock.now + 5.5)))
    assert wasted(world) == {"preempt": 0, "fairness": 0, "abort": 0, "expired": num_computed(world), "surplus": 0}
    assert num_computed(world) == 10 + 5


def test_refusals_are_counted_by_limit() -> None:
    world = World(config(max_num_seqs=1, max_queued_requests=2, max_queued_tokens=100))
    world.add(request("runs", max_tokens=20))
    world.step()
    world.add(request("waits", max_tokens=20))
    with pytest.raises(Overloaded):
        world.add(request("too long", max_tokens=90))
    world.add(request("waits, too", max_tokens=20))
    for number in range(2):
        with pytest.raises(Overloaded):
            world.add(request(f"one too many {number}", max_tokens=20))
    assert by_label(world, "headway:engine_refusals", "reason") == {
        "max_num_queued_reqs": 2,
        "max_num_queued_tokens": 1,
    }
    assert not by_label(world, "vllm:admission_rejections", "reason"), "the client was not refused"


def test_steps_count_padded_tokens_and_used_slots():
    world = World(config(max_num_seqs=8, max_num_batched_tokens=32))
    world.run(request("long", tuple(range(1, 21)), max_tokens=1), request("short", (1, 2, 3, 4), max_tokens=3))
    histograms = {histogram.name: histogram for histogram in world.engine.metrics().histograms}
    efficiency = histograms["headway:step_padding_efficiency"]
    utilization = histograms["headway:batch_utilization"]
    assert sum(efficiency.counts) == sum(utilization.counts) == len(world.runner.batches) == 3
    assert efficiency.sum == pytest.approx(24 / 40 + 1 + 1), "a rectangle of both prompts, then one token a step"
    assert utilization.sum == pytest.approx(2 / 8 + 1 / 8 + 1 / 8)
