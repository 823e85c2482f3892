"""Several ingresses in front of many replicas, in simulated time: `python -m bench.scale.simulator`.

Every ingress has the real flow control, routing and dispatcher, and every replica the real scheduler and KV cache; a
step takes the time of a real device (`slow-gpu`), and computes nothing. What the ingresses themselves compute takes no
time here (see `bench.scale.decisions`). All ingresses poll all replicas, at different moments.

The load is three times what the replicas can serve, in three bands, of tenants with equal demands. Half of the tenants
send all requests to one ingress, the others to any. The same arrivals go to one ingress for comparison, which knows of
all requests.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.record import percentile, write
from replicas.engine.config import EngineConfig
from replicas.errors import DeadlineExceeded, Overloaded
from replicas.protocol import Band, EngineMetrics, GenerateRequest, ModelCard, ReplicaStats, SamplingParams, TokenDelta
from router.balancing.load_table import LoadTable
from router.balancing.policy import LeastTokens, PrefixIndex
from router.dispatch import Dispatcher
from router.flow.flow_control import FlowController
from serve_app.config import HeadwayConfig
from testkit.engine.timed_runner import STEP_TIMES, StepShape
from testkit.router.simulated_engines import VOCABULARY, EngineClient, SimulatedEngine
from testkit.router.simulated_replicas import FakeObserver
from testkit.router.simulated_time import FakeClock, SimulatedLoop, simulated_clock

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
"""Tokens of a request: the prompt's, and the mean of the output's."""
SHARES = {Band.INTERACTIVE: 0.2, Band.STANDARD: 0.4, Band.BATCH: 0.4}
_TENANTS = 16
_STEP_TIMES = STEP_TIMES["slow-gpu"]
_SAMPLE_S = 0.5
_OBJECTS_PER_COLLECTION = 200_000
"""New objects between two garbage collections. With Python's 700 they take a fifth of the time and free nothing."""


@dataclass(frozen=True, slots=True)
class World:
    """Size and load of one run."""

    num_ingresses: int
    num_replicas: int
    num_slots: int
    overload: float
    duration_s: float

    @property
    def requests_per_s(self) -> float:
        """Rate of arrivals: `overload` times what full replicas serve."""
        step_s = _STEP_TIMES.of(StepShape(self.num_slots, 0, self.num_slots * (PROMPT_TOKENS + OUTPUT_TOKENS // 2)))
        prefill_s = _STEP_TIMES.per_prefill_token_s * PROMPT_TOKENS
        return self.overload * self.num_replicas / (step_s * OUTPUT_TOKENS / self.num_slots + prefill_s)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request of the load."""

    at_s: float
    request: GenerateRequest
    ingress: float
    """Place of its ingress among all, 0 to 1: the same arrivals serve any number of ingresses."""


@dataclass
class Tally:
    """Figures that are collected while the simulation runs."""

    dispatched: Counter[Band] = field(default_factory=Counter)
    before_urgent: int = 0
    """Batch requests dispatched by an ingress while an interactive one waited there."""
    refused: Counter[Band] = field(default_factory=Counter)
    tokens: Counter[Band] = field(default_factory=Counter)
    tokens_by_tenant: Counter[str] = field(default_factory=Counter)
    ttft_s: dict[Band, list[float]] = field(default_factory=lambda: {band: [] for band in Band})
    outstanding: list[float] = field(default_factory=list)
    """Greatest over mean outstanding tokens of the replicas, sampled."""
    num_sent_back: int = 0


class Ingress:
    """One ingress: the real parts over a client of all engines. It is the client itself, to see each dispatch."""

    def __init__(self, number: int, engines: EngineClient, num_slots: int, clock: FakeClock, tally: Tally) -> None:
        self._engines = engines
        self._tally = tally
        table, observer = LoadTable(clock, f"ingress-{number}"), FakeObserver()
        limits = HeadwayConfig(max_num_seqs=num_slots).flow_limits()
        policy = LeastTokens(random.Random(number), PrefixIndex())
        self.flow = FlowController(limits, table, policy, observer)
        self.dispatcher = Dispatcher(self, self.flow, observer, unix_clock=clock.unix)

    async def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of one request, and count its dispatch."""
        self._tally.dispatched[request.band] += 1
        if request.band is Band.BATCH and not request.is_promoted:
            self._tally.before_urgent += self.flow.queue.num_requests(Band.INTERACTIVE) > 0
        try:
            async with aclosing(self._engines.generate(request, ranking)) as deltas:
                async for delta in deltas:
                    yield delta
        except Overloaded:
            self._tally.num_sent_back += 1
            raise

    async def poll_stats(self) -> list[ReplicaStats]:
        """Return the load of all engines."""
        return await self._engines.poll_stats()

    async def poll_metrics(self) -> list[EngineMetrics]:
        """Return the metrics of all engines."""
        return await self._engines.poll_metrics()

    async def drain(self, replica_id: str) -> bool:
        """Have an engine refuse new requests."""
        return await self._engines.drain(replica_id)

    async def describe(self) -> ModelCard:
        """Refuse: engines have no model."""
        return await self._engines.describe()


def arrivals_of(world: World, seed: int = 1) -> list[Arrival]:
    """Return the load, in order of time: arrivals at random, a tenth of them in bursts of 20."""
    rng, arrivals, at_s = random.Random(seed), list[Arrival](), 0.0
    while at_s < world.duration_s:
        at_s += rng.expovariate(world.requests_per_s * 0.9)
        for _ in range(20 if rng.random() < 0.1 / 20 / 0.9 else 1):
            arrivals.append(_arrival(rng, at_s, len(arrivals)))
    return arrivals


def _arrival(rng: random.Random, at_s: float, number: int) -> Arrival:
    band = rng.choices(list(SHARES), list(SHARES.values()))[0]
    tenant = rng.randrange(_TENANTS)
    prompt = tuple(rng.randrange(16, VOCABULARY) for _ in range(PROMPT_TOKENS))
    num_tokens = max(1, min(4 * OUTPUT_TOKENS, round(rng.gammavariate(2.0, OUTPUT_TOKENS / 2))))
    params = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(f"request-{number}", prompt, params, band, f"tenant-{tenant}")
    return Arrival(at_s, request, tenant / _TENANTS if tenant < _TENANTS // 2 else rng.random())


async def simulate(world: World, arrivals: list[Arrival]) -> dict[str, Any]:
    """Return the figures of a run. Runs in a `SimulatedLoop`."""
    clock, tally = simulated_clock(), Tally()
    config = EngineConfig(
        num_blocks=64 * world.num_slots,
        max_model_len=2048,
        max_num_seqs=world.num_slots,
        max_num_batched_tokens=max(512, 4 * world.num_slots),
        async_scheduling=True,
    )
    engines = [
        SimulatedEngine(config, _STEP_TIMES, clock, f"replica-{number:04}") for number in range(world.num_replicas)
    ]
    client = EngineClient(engines)
    ingresses = [Ingress(number, client, world.num_slots, clock, tally) for number in range(world.num_ingresses)]
    tasks = [asyncio.create_task(each.run()) for each in engines]
    for ingress in ingresses:
        tasks.append(asyncio.create_task(ingress.dispatcher.run()))
        await asyncio.sleep(0.5 / world.num_ingresses)
    tasks.append(asyncio.create_task(_sample(engines, tally)))
    started_s, processor_s = clock.now, time.process_time()
    for arrival in arrivals:
        await asyncio.sleep(max(0.0, started_s + arrival.at_s - clock.now))
        ingress = ingresses[int(arrival.ingress * len(ingresses))]
        tasks.append(asyncio.create_task(_read(ingress, arrival.request, clock, tally)))
    await asyncio.sleep(max(0.0, started_s + world.duration_s - clock.now))
    figures = _figures(world, tally, time.process_time() - processor_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures


async def _read(ingress: Ingress, request: GenerateRequest, clock: FakeClock, tally: Tally) -> None:
    """Read one request to its end."""
    begun_s, has_begun = clock.now, False
    try:
        async for delta in ingress.dispatcher.start([request])[0]:
            if not has_begun:
                has_begun = True
                tally.ttft_s[request.band].append(clock.now - begun_s)
            tally.tokens[request.band] += len(delta.token_ids)
            if request.band is Band.STANDARD:
                tally.tokens_by_tenant[request.tenant] += len(delta.token_ids)
    except (Overloaded, DeadlineExceeded):
        tally.refused[request.band] += 1


async def _sample(engines: list[SimulatedEngine], tally: Tally) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_S)
        outstanding = [each.engine.stats().outstanding_tokens for each in engines]
        if any(outstanding):
            tally.outstanding.append(max(outstanding) / statistics.mean(outstanding))


def _figures(world: World, tally: Tally, processor_s: float) -> dict[str, Any]:
    num_tokens = sum(tally.tokens.values())
    return {
        "tokens_per_s": num_tokens / world.duration_s,
        "tokens_per_s_by_band": {band.name.lower(): tally.tokens[band] / world.duration_s for band in Band},
        "ttft_p50_s": {b.name.lower(): percentile(tally.ttft_s[b], 50) for b in Band if tally.ttft_s[b]},
        "ttft_p99_s": {b.name.lower(): percentile(tally.ttft_s[b], 99) for b in Band if tally.ttft_s[b]},
        "refused": {band.name.lower(): tally.refused[band] for band in Band},
        "batch_before_waiting_interactive": tally.before_urgent,
        "sent_back": tally.num_sent_back,
        "fairness_of_standard": jain(list(tally.tokens_by_tenant.values())),
        "max_over_mean_outstanding": statistics.median(tally.outstanding[len(tally.outstanding) // 4 :]),
        "processor_s_per_million_tokens": 1e6 * processor_s / num_tokens,
    }


def jain(shares: list[int]) -> float:
    """Return Jain's fairness index of shares: 1 for equal ones, 1 / n if one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def run(world: World) -> dict[str, Any]:
    """Return the figures of a world."""
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(simulate(world, arrivals_of(world)))


def main() -> int:
    """Simulate each number of ingresses beside one, each in a process; print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ingresses", default="8", help="numbers of ingresses, separated by commas")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16, help="sequences that a replica runs together")
    parser.add_argument("--overload", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=15.0, help="simulated time")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="rows simulated at the same time")
    parser.add_argument("--name", default="scale_simulator", help="file in bench/results")
    options = parser.parse_args()
    numbers = [1, *sorted({int(each) for each in options.ingresses.split(",")} - {1})]
    worlds = [World(each, options.replicas, options.slots, options.overload, options.seconds) for each in numbers]
    rows: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(min(len(worlds), options.processes)) as processes:
        for world, figures in zip(worlds, processes.map(run, worlds), strict=True):
            rows[str(world.num_ingresses)] = figures
            _show(rows)
    for figures in rows.values():
        figures["over_one_ingress"] = figures["tokens_per_s"] / rows["1"]["tokens_per_s"]
    print(write(options.name, {"replicas": options.replicas, "slots": options.slots, "ingresses": rows}))
    return 0 if all(is_kept(figures, rows["1"]) for figures in rows.values()) else 1


def is_kept(figures: dict[str, Any], alone: dict[str, Any]) -> bool:
    """Return True if a run keeps the bars beside one ingress.

    Outputs of unequal lengths leave replicas with unequal work even then.
    """
    return bool(
        figures["over_one_ingress"] >= 0.97
        and figures["batch_before_waiting_interactive"] == 0
        and figures["fairness_of_standard"] >= 0.95
        and figures["max_over_mean_outstanding"] <= 1.2 * alone["max_over_mean_outstanding"]
    )


def _show(rows: dict[str, dict[str, Any]]) -> None:
    table = Table("ingresses", *next(iter(rows.values())))
    for number, figures in rows.items():
        table.add_row(number, *(_cell(value) for value in figures.values()))
    Console(width=220).print(table)


def _cell(value: float | dict[str, float]) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name} {_cell(each)}" for name, each in value.items())
    return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
