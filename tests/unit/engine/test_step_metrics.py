"""What is counted of each step."""

from __future__ import annotations

import pytest

from testkit.engine.shadow_runner import World, config, request


def test_steps_count_what_padding_would_have_cost_and_the_slots_used():
    world = World(config(max_num_seqs=8, max_num_batched_tokens=32))
    world.add(request("long", tuple(range(1, 21)), max_tokens=1))
    world.add(request("short", (1, 2, 3, 4), max_tokens=3))
    world.run()
    histograms = {histogram.name: histogram for histogram in world.engine.metrics().histograms}
    efficiency = histograms["headway:step_padding_efficiency"]
    utilization = histograms["headway:batch_utilization"]
    assert sum(efficiency.counts) == sum(utilization.counts) == len(world.runner.batches) == 3
    assert efficiency.sum == pytest.approx(24 / 40 + 1 + 1), "a rectangle of both prompts, then one token a step"
    assert utilization.sum == pytest.approx(2 / 8 + 1 / 8 + 1 / 8)
