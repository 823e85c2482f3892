"""An idle tenant beside a flood, through flow control and the engine together, in simulated time."""

import asyncio

from bench.routing.tenants import NUM_CLIENTS, measure
from testkit.router.simulated_time import SimulatedLoop


def test_an_idle_tenant_is_served_at_once_beside_a_flood() -> None:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        figures = runner.run(measure(NUM_CLIENTS, warm_up_s=3.0, measured_s=4.0))
    assert figures["idle_refused"] == 0 and figures["idle_requests"] > 1
    assert figures["idle_ttft_p99_ms"] < 400, "simulated time: at most two steps with a whole prefill"
    assert 0 < figures["wasted_share_fairness"] < 0.05
