"""Latency of an idle tenant beside a flood of another of its band: `python -m bench.routing.tenants`.

One engine of 32 slots behind flow control, in simulated time: a step takes the time of a real device (`slow-gpu`). The
tenant `idle` sends short requests now and then, first alone. Then the tenant `flood` has 102 clients in the same band,
each of which sends a request of 1,500 output tokens, reads it and sends the next. A refused client waits for the time
that the refusal names. `--checkout` measures other code, from a directory, in the same way and puts its figures beside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from bench.record import percentile, write
from replicas.engine.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.errors import Overloaded
from replicas.protocol import Band, GenerateRequest, SamplingParams
from router.balancing.load_table import LoadTable
from router.balancing.policy import LeastTokens
from router.dispatch import Dispatcher
from router.flow.flow_control import FlowController
from serve_app.config import HeadwayConfig
from testkit.engine.timed_runner import STEP_TIMES, StepShape
from testkit.router.simulated_engines import VOCABULARY, EngineClient, SimulatedEngine
from testkit.router.simulated_replicas import FakeObserver
from testkit.router.simulated_time import FakeClock, SimulatedLoop, simulated_clock

NUM_SLOTS, BUDGET = 32, 512
NUM_CLIENTS, FLOOD_PROMPT, FLOOD_OUTPUT = 102, 100, 1500
IDLE_PROMPT, IDLE_OUTPUT, IDLE_PER_S = 200, 50, 0.5
WARM_UP_S, MEASURED_S = 90.0, 300.0
_STEP_TIMES = STEP_TIMES["slow-gpu"]


@dataclass
class _Run:
    """Run of both tenants against one ingress."""

    dispatcher: Dispatcher
    clock: FakeClock
    rng: random.Random
    ttft_s: list[float] = field(default_factory=list)
    num: Counter[str] = field(default_factory=Counter)

    async def flood(self, client: int) -> None:
        while True:
            try:
                await self._read(f"flood-{client}-{self.clock.now}", FLOOD_PROMPT, FLOOD_OUTPUT, "flood")
            except Overloaded as refusal:
                self.num["refused of flood"] += 1
                await asyncio.sleep(refusal.retry_after_s)

    async def idle(self, number: int, arrival_s: float) -> None:
        await asyncio.sleep(max(0.0, arrival_s - self.clock.now))
        self.num["sent of idle"] += 1
        try:
            first_s = await self._read(f"idle-{number}", IDLE_PROMPT, IDLE_OUTPUT, "idle")
        except Overloaded:
            self.num["refused of idle"] += 1
        else:
            self.ttft_s.append(first_s - arrival_s)

    async def _read(self, name: str, num_prompt_tokens: int, num_output_tokens: int, tenant: str) -> float:
        """Read one request to its end; return the time of its first token."""
        prompt = tuple(self.rng.randrange(16, VOCABULARY) for _ in range(num_prompt_tokens))
        params = SamplingParams(num_output_tokens, temperature=0.0, ignore_eos=True)
        first_s: float | None = None
        async for delta in self.dispatcher.streams([GenerateRequest(name, prompt, params, Band.STANDARD, tenant)])[0]:
            first_s = first_s or self.clock.now
            self.num[f"tokens of {tenant}"] += len(delta.token_ids)
        assert first_s is not None
        return first_s


async def measure(num_clients: int, warm_up_s: float = WARM_UP_S, measured_s: float = MEASURED_S) -> dict[str, Any]:
    """Return the figures of one run with so many clients of the flood. Runs in a `SimulatedLoop`."""
    clock = simulated_clock()
    config = EngineConfig(
        num_blocks=4096, max_model_len=4096, max_num_seqs=NUM_SLOTS, max_num_batched_tokens=BUDGET,
        async_scheduling=True, vocab_size=2**31,
    )  # fmt: skip
    replica, table, observer = SimulatedEngine(config, _STEP_TIMES, clock), LoadTable(clock), FakeObserver()
    limits = HeadwayConfig(max_num_seqs=NUM_SLOTS, api_key_file="keys.yaml").flow_limits()
    flow = FlowController(limits, table, LeastTokens(random.Random(0)), observer)
    dispatcher = Dispatcher(EngineClient([replica]), flow, observer, unix_clock=clock.unix)
    run = _Run(dispatcher, clock, random.Random(1))
    floods = [run.flood(client) for client in range(num_clients)]
    tasks = [asyncio.create_task(work) for work in (replica.run(), dispatcher.run(), *floods)]
    await asyncio.sleep(warm_up_s if num_clients else 1.0)
    before, started_s = run.num["tokens of flood"], clock.now
    arrivals, rng = [started_s], random.Random(2)
    while arrivals[-1] < started_s + measured_s:
        arrivals.append(arrivals[-1] + rng.expovariate(IDLE_PER_S))
    await asyncio.gather(*(run.idle(number, arrival_s) for number, arrival_s in enumerate(arrivals)))
    duration_s = clock.now - started_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    ttft_ms = [1000 * seconds for seconds in run.ttft_s]
    return {
        "idle_requests": run.num["sent of idle"],
        "idle_refused": run.num["refused of idle"],
        "idle_ttft_p50_ms": percentile(ttft_ms, 50) if ttft_ms else None,
        "idle_ttft_p99_ms": percentile(ttft_ms, 99) if ttft_ms else None,
        "flood_tokens_per_s": (run.num["tokens of flood"] - before) / duration_s,
        "flood_refused": run.num["refused of flood"],
        **_engine_figures(replica.engine),
    }


def _engine_figures(engine: Engine) -> dict[str, float]:
    metrics = engine.metrics()
    computed = next(each.sum for each in metrics.histograms if each.name == "vllm:iteration_tokens_total")
    wasted = {dict(m.labels)["cause"]: m.value for m in metrics.metrics if m.name == "headway:wasted_tokens"}
    preemptions = next(metric.value for metric in metrics.metrics if metric.name == "vllm:num_preemptions")
    return {
        "preemptions": preemptions,
        "wasted_tokens_fairness": wasted.get("fairness", 0.0),
        "wasted_share_fairness": wasted.get("fairness", 0.0) / computed,
    }


def figures() -> dict[str, Any]:
    """Return the figures of the idle tenant alone and beside the flood, and the bar."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        alone = runner.run(measure(0))
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        beside = runner.run(measure(NUM_CLIENTS))
    prefill_ms = 1000 * _STEP_TIMES.of(StepShape(NUM_SLOTS - 1, BUDGET - NUM_SLOTS, NUM_SLOTS * FLOOD_OUTPUT))
    bar_ms = 2 * alone["idle_ttft_p99_ms"] + prefill_ms
    p99_ms = beside["idle_ttft_p99_ms"]
    is_kept = not beside["idle_refused"] and p99_ms is not None and p99_ms <= bar_ms
    return {"alone": alone, "beside_flood": beside, "bar_p99_ms": bar_ms, "is_kept": is_kept}


def main() -> int:
    """Measure this code, and that of `--checkout`; print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", help="directory of other code to measure too")
    parser.add_argument("--only-print", action="store_true", help="print the figures as JSON, and write no file")
    options = parser.parse_args()
    measured = figures()
    if options.checkout:
        environment = {**os.environ, "PYTHONPATH": options.checkout}
        command = [sys.executable, __file__, "--only-print"]
        done = subprocess.run(command, env=environment, cwd=options.checkout, capture_output=True, check=True)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=options.checkout, capture_output=True, text=True)
        measured["of_checkout"] = {"commit": commit.stdout.strip(), **json.loads(done.stdout)}
    print(json.dumps(measured, indent=2))
    if not options.only_print:
        print(write("routing_tenants", measured), file=sys.stderr)
    return 0 if measured["is_kept"] or options.only_print else 1


if __name__ == "__main__":
    sys.exit(main())
