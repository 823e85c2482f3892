"""Cost of one ingress's decisions by the number of replicas: `python -m bench.scale.decisions`.

The real dispatcher, flow control, load table and policy, over replicas that compute nothing. Every slot of every
replica is taken by this ingress's requests, and `--queued` requests of `--tenants` tenants wait. Measured, in
microseconds of processor time of the event loop's thread:

- `delta`: a delta of a running stream arrives, with its replica's new report;
- `end_and_dispatch`: a stream ends, and a waiting request is dispatched to its slot;
- `arrival`: a request arrives while every replica is full;
- `poll`: the answers of all replicas are taken in; ten of them have changed;
- `metrics`: the page `/metrics` is built.

Every replica has reported before, so each changed one brings the tokens that 16 tenants were served since then.

`others` are growing costs besides: the tick of the autoscaling loop and an arrival, also after a poll, and the tenants
with most waiting requests.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.record import write
from replicas.protocol import (
    Band,
    EngineMetrics,
    FinishReason,
    GenerateRequest,
    IngressShare,
    ModelCard,
    ReplicaStats,
    SamplingParams,
    TenantTokens,
    TokenDelta,
    Usage,
)
from router.balancing.load_table import InFlight, LoadTable
from router.balancing.policy import LeastTokens
from router.dispatch import Dispatcher
from router.flow.flow_control import FlowController, FlowLimits, SampleGroup
from router.flow.flow_queue import BandLimits
from router.scaling.autoscaling import Autoscaler, AutoscalingSettings, ReplicaBounds
from router.scaling.autoscaling_loop import AutoscalingLoop, IngressLoad
from router.scaling.ingress_reports import IngressGossip
from router.timeline import Timeline
from router.types import LatencyTargets
from serve_app.monitoring.http import HttpMetrics
from serve_app.monitoring.page import exposition
from serve_app.monitoring.router import RouterCollector, RouterMetrics
from testkit.engine.shadow_runner import World as EngineWorld
from testkit.engine.shadow_runner import config as engine_config
from testkit.engine.shadow_runner import request as engine_request

_NUM_SLOTS, _NUM_BATCH_AHEAD = 16, 2
_PROMPT_TOKENS, _OUTPUT_TOKENS, _BLOCK_SIZE = 512, 256, 16
_NUM_CHANGED = 10
_NUM_SERVED, _NUM_SERVED_NEWLY = 64, 16
"""Tenants in a replica's report, and those of them that it has served since the last poll."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a world, and the number of samples of each cost."""

    num_replicas: int
    num_queued: int
    num_tenants: int
    num_samples: int
    num_pages: int = 3


class Clock:
    """Clock that the measurement moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class IdleReplicas:
    """Client of replicas that compute nothing; each next delta and poll is prepared before it is timed."""

    def __init__(self) -> None:
        self.delta: TokenDelta | None = None
        self.polled: list[ReplicaStats] = []
        self.ranking: list[str] = []

    async def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """Yield the prepared delta each time."""
        self.ranking = ranking
        is_finished = False
        while not is_finished:
            assert self.delta is not None
            is_finished = self.delta.finish_reason is not None
            yield self.delta

    async def poll_stats(self) -> list[ReplicaStats]:
        """Return the prepared answers."""
        return self.polled

    async def poll_metrics(self) -> list[EngineMetrics]:
        """Return none: the pages are built from engines' metrics given to them."""
        return []

    async def drain(self, replica_id: str) -> bool:
        return False

    async def describe(self) -> ModelCard:
        """Refuse: no caller of this client needs the model card."""
        raise NotImplementedError


@dataclass(slots=True)
class Stream:
    """Stream that is measured, on one replica."""

    deltas: AsyncGenerator[TokenDelta, None]
    replica_id: str
    num_tokens: int = 0


class ScaleWorld:
    """Ingress whose replicas are all full, with its queue; made inside an event loop."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.rng = random.Random(0)
        self.clock, self.client = Clock(), IdleReplicas()
        self.table = LoadTable(self.clock)
        self.http = HttpMetrics("model")
        observer = RouterMetrics(self.http.registry, dict.fromkeys(Band, LatencyTargets()))
        limits = FlowLimits({band: BandLimits(10**6, 10**9) for band in Band}, 30.0, max_queue_wait_s=10**6)
        self.flow = FlowController(limits, self.table, LeastTokens(random.Random(0)), observer)
        self.dispatcher = Dispatcher(self.client, self.flow, observer, unix_clock=self.clock)
        self.gossip = IngressGossip("ingress")
        settings = AutoscalingSettings()
        load = IngressLoad(self.flow.queue, self.table, self.gossip, unix_clock=self.clock)
        self.autoscaling = AutoscalingLoop(
            Autoscaler(settings, ReplicaBounds(1, 4096, 1), self.clock), load, self.gossip, lambda: asyncio.sleep(0)
        )
        self.http.registry.register(RouterCollector(self.flow.queue, self.table, self.autoscaling))
        self.own: dict[str, list[InFlight]] = defaultdict(list)
        self.served: dict[str, dict[str, int]] = {}
        self.versions: dict[str, int] = {}
        self.queued: list[asyncio.Task[Any]] = []
        self.num_requests = 0
        self.num_dispatched = 0

    @property
    def replica_ids(self) -> list[str]:
        """Ids of all replicas."""
        return [f"replica-{number:04}" for number in range(self.size.num_replicas)]

    async def fill(self) -> list[Stream]:
        """Take every slot, with the streams to be measured among the requests, then fill the queue."""
        for replica_id in self.replica_ids:
            tenants = self.rng.sample(range(self.size.num_tenants), min(_NUM_SERVED, self.size.num_tenants))
            self.served[replica_id] = {f"tenant-{tenant}": 1000 for tenant in tenants}
            for number in range(_NUM_SLOTS + _NUM_BATCH_AHEAD):
                band = Band.STANDARD if number < _NUM_SLOTS else Band.BATCH
                self._begin(replica_id, band, tenants[number % len(tenants)])
        # One replica after the other is known and has a free slot, so each stream's dispatch is quick.
        streams = []
        for number in range(self.size.num_samples):
            replica_id = self.replica_ids[number % self.size.num_replicas]
            if len(self.own[replica_id]) == _NUM_BATCH_AHEAD:
                break
            self._know(replica_id)
            taken = self.own[replica_id].pop(0)
            self.table.end(taken)
            streams.append(await self._start(replica_id, taken.tenant))
            self.table.forget(replica_id)
        await self._fill_queue()
        # The first poll is the baseline of every replica's totals of served tokens, so the later ones bring charges.
        self.clock.now_s += 1.0
        await self._take_poll(self.poll(self.size.num_replicas))
        return streams

    def report(self, replica_id: str, has_changed: bool = True) -> ReplicaStats:
        """Return the replica's next report, as it comes out of another process."""
        self.versions[replica_id] = self.versions.get(replica_id, 1) + has_changed
        outstanding = (100 + self.versions[replica_id] * 7919 % 97) * _NUM_SLOTS
        return ReplicaStats(
            replica_id=replica_id, node_id="node", pid=1, taken_unix_s=self.clock.now_s, num_slots=_NUM_SLOTS,
            num_blocks=10_000, num_free_blocks=5_000 - self.versions[replica_id] % 89,
            num_running_by_band=(0, _NUM_SLOTS, 0), num_waiting_by_band=(0, 0, _NUM_BATCH_AHEAD), waiting_tokens=1000,
            generated_tokens_per_s=900.0, is_draining=False, num_held_blocks_by_band=(0, 5_000, 0),
            outstanding_tokens=outstanding, saturated_tokens_per_s=1000.0, block_size=_BLOCK_SIZE,
            by_ingress=(IngressShare("", (0, _NUM_SLOTS, _NUM_BATCH_AHEAD), outstanding),),
            version=self.versions[replica_id],
        )  # fmt: skip

    def poll(self, num_changed: int) -> list[ReplicaStats]:
        """Return the answers to a poll after the given number of replicas has changed."""
        changed = set(self.rng.sample(self.replica_ids, min(num_changed, self.size.num_replicas)))
        return [self._answer(replica_id, replica_id in changed) for replica_id in self.replica_ids]

    async def delta(self, stream: Stream) -> float:
        """Take in one delta of a stream; return the microseconds."""
        self._prepare(stream, None)
        started_s = time.thread_time()
        await anext(stream.deltas)
        return self._us_since(started_s)

    async def end(self, stream: Stream) -> float:
        """End a stream, whose slot a waiting request gets; return the microseconds."""
        self._prepare(stream, FinishReason.LENGTH)
        await anext(stream.deltas)
        num_queued = len(self.flow.queue)
        started_s = time.thread_time()
        await anext(stream.deltas, None)
        spent_us = self._us_since(started_s)
        self.num_dispatched += num_queued - len(self.flow.queue)
        await asyncio.sleep(0)
        return spent_us

    async def arrive(self) -> float:
        """Let one request arrive; return the microseconds until it waits."""
        [deltas] = self.dispatcher.streams([self._request(Band.STANDARD)])
        num_queued = len(self.flow.queue)
        self.queued.append(asyncio.create_task(anext(deltas)))
        started_s = time.thread_time()
        await asyncio.sleep(0)
        spent_us = self._us_since(started_s)
        assert len(self.flow.queue) == num_queued + 1, "the request does not wait"
        return spent_us

    async def take_poll(self) -> float:
        """Take in the answers to a poll; return the microseconds."""
        self.clock.now_s += 1.0
        return await self._take_poll(self.poll(_NUM_CHANGED))

    def page(self, engines: list[EngineMetrics]) -> tuple[float, int]:
        """Build `/metrics`; return the microseconds and the bytes."""
        started_s = time.thread_time()
        page = exposition(engines, "model", self.http)
        return self._us_since(started_s), len(page)

    def timed(self, call: Callable[[], object]) -> float:
        """Return the microseconds of a call."""
        self.clock.now_s += 0.1
        started_s = time.thread_time()
        call()
        return self._us_since(started_s)

    async def end_all(self) -> None:
        """Cancel what waits."""
        for replica_id in self.replica_ids:
            self.table.forget(replica_id)
        for task in self.queued:
            task.cancel()
        await asyncio.gather(*self.queued, return_exceptions=True)

    async def _take_poll(self, polled: list[ReplicaStats]) -> float:
        self.client.polled = self.gossip.polled = polled
        started_s = time.thread_time()
        await self.dispatcher.refresh()
        return self._us_since(started_s)

    async def _start(self, replica_id: str, tenant: str) -> Stream:
        [deltas] = self.dispatcher.streams([replace(self._request(Band.STANDARD), tenant=tenant)])
        stream = Stream(deltas, replica_id)
        self._prepare(stream, None)
        await anext(deltas)
        assert self.client.ranking[0] == replica_id
        return stream

    async def _fill_queue(self) -> None:
        """Let the waiting requests arrive while no replica is known: no place is looked for, so it is quick."""
        for number in range(self.size.num_queued):
            request = self._request(Band.STANDARD if number % 10 < 7 else Band.BATCH)
            index = self.flow.admit(request, None)
            waiting = self.flow.acquire(request, index, None, SampleGroup(), Timeline(0.0))
            self.queued.append(asyncio.create_task(waiting))
            if number % 1000 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _request(self, band: Band) -> GenerateRequest:
        self.num_requests += 1
        number = self.num_requests
        prompt = (number, *_PROMPT)
        tenant = f"tenant-{number % self.size.num_tenants}"
        return GenerateRequest(f"request-{number}", prompt, SamplingParams(_OUTPUT_TOKENS), band, tenant)

    def _begin(self, replica_id: str, band: Band, tenant: int) -> None:
        in_flight = self.table.begin(replica_id, band, 8, self.rng.randrange(50, 200), f"tenant-{tenant}")
        self.table.progress(in_flight, 1)
        self.own[replica_id].append(in_flight)

    def _know(self, replica_id: str) -> None:
        self.table.record(self.report(replica_id))

    def _answer(self, replica_id: str, has_changed: bool) -> ReplicaStats:
        if has_changed:
            served = self.served[replica_id]
            for tenant in self.rng.sample(list(served), min(_NUM_SERVED_NEWLY, len(served))):
                served[tenant] = served.pop(tenant) + self.rng.randrange(1, 500)
        totals = [TenantTokens(tenant, Band.STANDARD, tokens) for tenant, tokens in self.served[replica_id].items()]
        return replace(self.report(replica_id, has_changed), served_tokens=tuple(totals))

    def _prepare(self, stream: Stream, reason: FinishReason | None) -> None:
        self.clock.now_s += 0.001
        usage = Usage(_PROMPT_TOKENS, stream.num_tokens + 1, 0)
        self.client.delta = TokenDelta(
            "request", stream.num_tokens, (7,), " word", usage, finish_reason=reason,
            stats=self.report(stream.replica_id),
        )  # fmt: skip
        stream.num_tokens += 1

    def _us_since(self, started_s: float) -> float:
        return (time.thread_time() - started_s) * 1e6


_PROMPT = tuple(range(1, _PROMPT_TOKENS))


def engines_metrics(num_replicas: int) -> list[EngineMetrics]:
    """Return the metrics of as many engines: those of one that has served a request, under different ids."""
    world = EngineWorld(engine_config())
    world.add(engine_request())
    world.run()
    return [replace(world.engine.metrics(), replica_id=f"replica-{number:04}") for number in range(num_replicas)]


async def measure(size: Size) -> dict[str, dict[str, float]]:
    """Return the median of each decision's and each other cost at one size."""
    world = ScaleWorld(size)
    streams = await world.fill()
    gc.collect()
    gc.freeze()
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(size.num_samples):
        samples["delta"].append(await world.delta(streams[number % len(streams)]))
        samples["arrival"].append(await world.arrive())
    for _ in range(10):
        samples["poll"].append(await world.take_poll())
        samples["arrival_after_poll"].append(await world.arrive())
        samples["autoscaling_tick_after_poll"].append(world.timed(world.autoscaling.decide))
        samples["autoscaling_tick"].append(world.timed(world.autoscaling.decide))
        samples["largest_tenants"].append(world.timed(lambda: world.flow.queue.largest(Band.STANDARD, 100)))
    for stream in streams:
        samples["end_and_dispatch"].append(await world.end(stream))
    assert world.num_dispatched >= 0.9 * len(streams), "waiting requests were not dispatched"
    engines = engines_metrics(size.num_replicas)
    for _ in range(size.num_pages):
        spent_us, num_bytes = world.page(engines)
        samples["metrics"].append(spent_us)
        samples["metrics_bytes"].append(num_bytes)
    await world.end_all()
    gc.unfreeze()
    names = ("delta", "end_and_dispatch", "arrival", "poll", "metrics")
    medians = {name: round(median(values), 1) for name, values in samples.items()}
    return {"decisions": {name: medians.pop(name) for name in names}, "others": medians}


def by_size(measured: dict[int, dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures by kind, name and number of replicas."""
    figures: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for num_replicas, of_size in measured.items():
        for kind, costs in of_size.items():
            for name, value in costs.items():
                figures[kind][name][str(num_replicas)] = value
    return {kind: dict(costs) for kind, costs in figures.items()}


def main() -> None:
    """Measure each number of replicas, print the medians, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1,10,100,1000", help="numbers of replicas, separated by commas")
    parser.add_argument("--queued", type=int, default=100_000, help="requests that wait")
    parser.add_argument("--tenants", type=int, default=10_000, help="tenants of the waiting requests")
    parser.add_argument("--samples", type=int, default=60, help="samples of each cost")
    parser.add_argument("--json", type=Path, help="file of the figures; without it none is written")
    options = parser.parse_args()
    measured = {}
    for num_replicas in map(int, options.replicas.split(",")):
        size = Size(num_replicas, options.queued, options.tenants, options.samples)
        measured[num_replicas] = asyncio.run(measure(size))
    figures = {"num_queued": options.queued, "num_tenants": options.tenants, **by_size(measured)}
    print(json.dumps(figures, indent=2))
    if options.json is not None:
        write(str(options.json.absolute().with_suffix("")), figures)


if __name__ == "__main__":
    main()
