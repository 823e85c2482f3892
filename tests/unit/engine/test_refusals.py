"""What an engine gives back is counted, and not as what a client was refused."""

from __future__ import annotations

import pytest

from replicas.errors import Overloaded
from testkit.engine.shadow_runner import World, config, request


def test_what_an_engine_gives_back_is_counted_by_limit() -> None:
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
    metrics = world.engine.metrics().metrics
    counts = {dict(m.labels)["reason"]: m.value for m in metrics if m.name == "headway:engine_refusals"}
    assert counts == {"max_num_queued_reqs": 2, "max_num_queued_tokens": 1}
    assert "vllm:admission_rejections" not in {metric.name for metric in metrics}
