"""Several ingresses in front of many replicas, in simulated time: `python -m bench.scale.simulator`.

Every ingress has the real flow control, routing and dispatcher, and every replica the real scheduler and KV cache. A
step takes the time of a real device (`slow-gpu`), and computes nothing. Records of more than 64 replicas were made with
a model of the scheduler, which the commits that they name still have. What the ingresses themselves compute takes no
time here (see `bench.scale.decisions`). All ingresses poll all replicas, at different moments.

The load is three times what the replicas can serve, in three bands. `--load even`: tenants with equal demands, half of
which send all requests to one ingress. `--load uneven`: demands by Zipf's law, half of the requests in bursts, prompts
with shared prefixes. `--trace FILE` replays the first `--seconds` of a trace of `headway bench`, or of a file that
`--write-trace FILE` has written, which also has tenants, prefixes and ingresses. `--faults` injects faults, one after
the other. The same arrivals go to one ingress for comparison, which knows of all requests.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.record import percentile, write
from bench.routing.streams import write_trace
from bench.scale.arrivals import (
    LOADS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Arrival,
    SimulatedRequest,
    arrivals_of,
    made_up,
)
from bench.scale.cluster import Cluster, Fault, Tally
from replicas.engine.config import EngineConfig
from replicas.protocol import Band
from serve_app.benchmark.trace import read_requests
from testkit.engine.timed_runner import STEP_TIMES, StepShape
from testkit.router.simulated_engines import SimulatedEngine
from testkit.router.simulated_time import FakeClock, SimulatedLoop, simulated_clock

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
    load: str = "even"
    trace: Path | None = None
    """Trace to replay instead of a load."""
    faults: tuple[Fault, ...] = ()

    @property
    def requests_per_s(self) -> float:
        """Rate of arrivals: `overload` times what full replicas serve."""
        step_s = _STEP_TIMES.of(StepShape(self.num_slots, 0, self.num_slots * (PROMPT_TOKENS + OUTPUT_TOKENS // 2)))
        prefill_s = _STEP_TIMES.per_prefill_token_s * PROMPT_TOKENS
        return self.overload * self.num_replicas / (step_s * OUTPUT_TOKENS / self.num_slots + prefill_s)

    @property
    def has_equal_tenants(self) -> bool:
        """True if all tenants ask for the same at all times."""
        return self.trace is None and self.load == "even"

    def requests(self) -> Iterable[SimulatedRequest]:
        """Return the requests of the load or the trace."""
        if self.trace is not None:
            return read_requests(self.trace, SimulatedRequest)
        return made_up(LOADS[self.load], self.requests_per_s, self.duration_s)

    def new_replica(self, clock: FakeClock, replica_id: str) -> SimulatedEngine:
        """Return a replica."""
        config = EngineConfig(
            num_blocks=64 * self.num_slots,
            max_model_len=2048,
            max_num_seqs=self.num_slots,
            max_num_batched_tokens=max(512, 4 * self.num_slots),
            async_scheduling=True,
            vocab_size=2**31,
        )
        return SimulatedEngine(config, _STEP_TIMES, clock, replica_id)


async def simulate(world: World, arrivals: list[Arrival]) -> dict[str, Any]:
    """Return the figures of a run. Runs in a `SimulatedLoop`."""
    clock, tally = simulated_clock(), Tally()
    new_replica = partial(world.new_replica, clock)
    cluster = Cluster(new_replica, world.num_replicas, world.num_ingresses, world.num_slots, clock, tally)
    await cluster.start()
    started_s, processor_s = clock.now, time.process_time()
    arrivals = [arrival for arrival in arrivals if arrival.at_s < world.duration_s]
    tasks = [asyncio.create_task(_sample(cluster, tally)), asyncio.create_task(_inject(cluster, world))]
    for arrival in arrivals:
        await asyncio.sleep(max(0.0, started_s + arrival.at_s - clock.now))
        tasks.append(asyncio.create_task(cluster.read(arrival.request, arrival.ingress)))
    await asyncio.sleep(max(0.0, started_s + world.duration_s - clock.now))
    figures = _figures(world, tally, arrivals, clock.now, time.process_time() - processor_s)
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    await cluster.stop()
    if errors := [end for end in ends if isinstance(end, Exception)]:
        raise errors[0]
    return figures


async def _inject(cluster: Cluster, world: World) -> None:
    """Inject the faults one after the other, evenly over the run."""

    async def inject(number: int, fault: Fault) -> None:
        await asyncio.sleep(world.duration_s * number / (len(world.faults) + 1))
        await cluster.inject(fault)

    await asyncio.gather(*(inject(number, fault) for number, fault in enumerate(world.faults, 1)))


async def _sample(cluster: Cluster, tally: Tally) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_S)
        outstanding = [stats.outstanding_tokens for stats in await cluster.client.poll_stats()]
        if any(outstanding):
            tally.outstanding.append(max(outstanding) / statistics.mean(outstanding))


def _figures(
    world: World, tally: Tally, arrivals: Iterable[Arrival], now_s: float, processor_s: float
) -> dict[str, Any]:
    num_tokens = sum(tally.tokens.values())
    queue_s, ttft_s = tally.queue_s.until(now_s), tally.ttft_s.until(now_s)
    demands: Counter[str] = Counter()
    for arrival in arrivals:
        if arrival.request.band is Band.STANDARD:
            demands[arrival.request.tenant] += arrival.request.params.max_tokens
    return {
        "tokens_per_s": num_tokens / world.duration_s,
        "tokens_per_s_by_band": {band.name.lower(): tally.tokens[band] / world.duration_s for band in Band},
        "queue_p50_s": _percentiles(queue_s, 50),
        "queue_p99_s": _percentiles(queue_s, 99),
        "ttft_p50_s": _percentiles(ttft_s, 50),
        "ttft_p99_s": _percentiles(ttft_s, 99),
        "refused": {band.name.lower(): tally.refused[band] for band in Band},
        "failed": tally.failed,
        "batch_before_waiting_interactive": tally.before_urgent,
        "sent_back": tally.num_sent_back,
        "sent_again": tally.num_sent_again,
        "fairness_of_standard": fairness(tally.tokens_by_tenant, demands),
        "max_over_mean_outstanding": statistics.median(tally.outstanding[len(tally.outstanding) // 4 :]),
        "prefix_hits": tally.cached_tokens / max(1, tally.prompt_tokens),
        "processor_s_per_million_tokens": 1e6 * processor_s / max(1, num_tokens),
    }


def _percentiles(seconds: Mapping[Band, list[float]], percent: float) -> dict[str, float]:
    return {band.name.lower(): percentile(its, percent) for band, its in seconds.items() if its}


def fairness(served: Mapping[str, int], demands: Mapping[str, int]) -> float:
    """Return Jain's index of what tenants got of their max-min fair shares.

    A fair share is what a tenant demands, or else as much as every other one whose demand is not met either.
    """
    shares, left, unmet = {}, float(sum(served.values())), sorted(demands, key=demands.__getitem__)
    for number, tenant in enumerate(unmet):
        shares[tenant] = min(demands[tenant], left / (len(unmet) - number))
        left -= shares[tenant]
    return jain([served.get(tenant, 0) / share for tenant, share in shares.items() if share])


def jain(shares: list[float]) -> float:
    """Return Jain's fairness index of shares: 1 for equal ones or none, 1 / n if one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)) if any(shares) else 1.0


def run(world: World) -> dict[str, Any]:
    """Return the figures of a world."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(simulate(world, arrivals_of(world.requests())))


def main() -> int:
    """Simulate each number of ingresses and of replicas, each in a process; print and write the figures."""
    options = _options()
    sizes = itertools.product(_numbers(options.replicas), sorted({1, *_numbers(options.ingresses)}))
    worlds = [_world(options, num_replicas, num_ingresses) for num_replicas, num_ingresses in sizes]
    if options.write_trace is not None:
        write_trace(options.write_trace, worlds[0].requests())
        return 0
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(
        min(len(worlds), options.processes), initializer=gc.set_threshold, initargs=(_OBJECTS_PER_COLLECTION,)
    ) as processes:
        for world, figures in zip(worlds, processes.map(run, worlds), strict=True):
            size = {"replicas": world.num_replicas, "ingresses": world.num_ingresses}
            rows.append(size | figures)
            alone = next(row for row in rows if row["replicas"] == world.num_replicas)
            rows[-1]["over_one_ingress"] = figures["tokens_per_s"] / alone["tokens_per_s"]
            rows[-1]["is_kept"] = is_kept(rows[-1], alone, world.has_equal_tenants)
            _show(rows)
    print(write(options.name, {"rows": rows}))
    return 0 if all(row["is_kept"] for row in rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ingresses", default="8", help="numbers of ingresses, separated by commas")
    parser.add_argument("--replicas", default="64", help="numbers of replicas, separated by commas")
    parser.add_argument("--slots", type=int, default=16, help="sequences that a replica runs together")
    parser.add_argument("--overload", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=15.0, help="simulated time")
    parser.add_argument("--load", choices=LOADS, default="even")
    parser.add_argument("--trace", type=Path, help="file with the requests, one in a line of JSON")
    parser.add_argument("--write-trace", type=Path, help="write the load into a file, and simulate nothing")
    parser.add_argument("--faults", default="", help=f"of {', '.join(fault.value for fault in Fault)}, in their order")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="rows simulated at the same time")
    parser.add_argument("--name", default="scale_simulator", help="file in bench/results")
    return parser.parse_args()


def _world(options: argparse.Namespace, num_replicas: int, num_ingresses: int) -> World:
    return World(
        num_ingresses=num_ingresses,
        num_replicas=num_replicas,
        num_slots=options.slots,
        overload=options.overload,
        duration_s=options.seconds,
        load=options.load,
        trace=options.trace,
        faults=tuple(Fault(name) for name in options.faults.split(",") if name),
    )


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def is_kept(figures: dict[str, Any], alone: dict[str, Any], has_equal_tenants: bool) -> bool:
    """Return True if a run keeps the bars beside one ingress.

    Outputs of unequal lengths leave replicas with unequal work even then. A tenant that comes while slots are free may
    take them all, so what tenants got says nothing of fairness unless they ask for the same at all times.
    """
    return bool(
        figures["over_one_ingress"] >= 0.97
        and figures["batch_before_waiting_interactive"] == 0
        and figures["failed"] == 0
        and (figures["fairness_of_standard"] >= 0.95 or not has_equal_tenants)
        and figures["max_over_mean_outstanding"] <= 1.2 * alone["max_over_mean_outstanding"]
    )


def _show(rows: list[dict[str, Any]]) -> None:
    """Print a column for each row: there are more figures than rows."""
    table = Table("", *(f"{row['ingresses']} by {row['replicas']}" for row in rows))
    for name in rows[0]:
        table.add_row(name, *(_cell(row[name]) for row in rows))
    Console(width=max(80, 30 + 24 * len(rows))).print(table)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name} {_cell(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:,.3f}" if value < 100 else f"{value:,.0f}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
