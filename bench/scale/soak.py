"""Memory of an ingress with a long queue of many tenants: `python -m bench.scale.soak --seconds 900`.

The real dispatcher, flow control, load table, autoscaling loop and metrics of one ingress, in this process and in real
time, over replicas that compute nothing: each running stream gets one token a step. 100,000 requests wait. A new one
comes for each that ends, is cancelled while it waits or stream is left, or whose deadline passes. There are 10,000
tenants at any time; new ones take the places of old ones, so that memory per tenant ever seen would show.

Every 15 seconds a line has the process's memory and the sizes of what is kept. The slope of memory is fitted to the
lines after `--warm-up` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from bench.record import write
from replicas.engine.stats import TenantUsage
from replicas.errors import ServingError
from replicas.protocol import (
    Band,
    EngineMetrics,
    FinishReason,
    GenerateRequest,
    IngressShare,
    ModelCard,
    ReplicaStats,
    SamplingParams,
    TokenDelta,
    Usage,
)
from router.balancing.load_table import LoadTable
from router.balancing.policy import LeastTokens
from router.dispatch import Dispatcher
from router.flow.flow_control import FlowController, FlowLimits
from router.flow.flow_queue import BandLimits
from router.scaling.autoscaling import Autoscaler, AutoscalingSettings, ReplicaBounds
from router.scaling.autoscaling_loop import AutoscalingLoop, IngressLoad
from router.scaling.ingress_reports import IngressGossip
from router.types import LatencyTargets
from serve_app.monitoring.http import HttpMetrics
from serve_app.monitoring.page import exposition
from serve_app.monitoring.router import RouterCollector, RouterMetrics

_NUM_SLOTS, _PROMPT_TOKENS, _MAX_OUTPUT_TOKENS, _STEP_S = 16, 64, 16, 0.5
_SATURATED_TOKENS_PER_S = 1e5
"""Speed that a replica reports. It is far from the real one, so that requests are accepted whose deadlines pass."""
_SHARES = {Band.INTERACTIVE: 0.02, Band.STANDARD: 0.6, Band.BATCH: 0.38}
_CANCELLED, _LEFT, _WITH_DEADLINE = 0.1, 0.1, 0.3
"""Shares of the requests that are cancelled while they wait, that are left while they run, and that have a deadline."""
_REPORT_S = 15.0


@dataclass
class SoakReplica:
    """Replica that gives each running stream one token a step."""

    replica_id: str
    streams: dict[str, asyncio.Queue[None]] = field(default_factory=dict)
    bands: Counter[Band] = field(default_factory=Counter)
    usage: TenantUsage = field(default_factory=TenantUsage)
    version: int = 1

    def step(self) -> None:
        """Let each running stream go on by one token."""
        self.version += 1
        for stream in self.streams.values():
            stream.put_nowait(None)

    def stats(self, is_polled: bool = False) -> ReplicaStats:
        """Return the present load."""
        by_band = tuple(self.bands[band] for band in Band)
        outstanding_tokens = len(self.streams) * _MAX_OUTPUT_TOKENS
        return ReplicaStats(
            self.replica_id, "node", 1, time.time(), _NUM_SLOTS, 10_000, 5_000,
            num_running_by_band=by_band, num_waiting_by_band=(0, 0, 0),
            waiting_tokens=0, generated_tokens_per_s=_NUM_SLOTS / _STEP_S, is_draining=False,
            outstanding_tokens=outstanding_tokens, saturated_tokens_per_s=_SATURATED_TOKENS_PER_S,
            by_ingress=(IngressShare("", by_band, outstanding_tokens),),
            served_tokens=self.usage.snapshot() if is_polled else (), version=self.version,
        )  # fmt: skip


class SoakClient:
    """Client of the replicas."""

    def __init__(self, num_replicas: int) -> None:
        self.replicas = {name: SoakReplica(name) for name in (f"replica-{each:03}" for each in range(num_replicas))}

    async def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """Yield one token a step."""
        replica, ticks = self.replicas[ranking[0]], asyncio.Queue[None]()
        replica.streams[request.request_id] = ticks
        replica.bands[request.band] += 1
        replica.usage.add(request.tenant, request.band, len(request.prompt_token_ids))
        num_tokens = request.params.max_tokens
        try:
            for index in range(num_tokens):
                await ticks.get()
                replica.usage.add(request.tenant, request.band, 1)
                reason = FinishReason.LENGTH if index == num_tokens - 1 else None
                usage = Usage(_PROMPT_TOKENS, index + 1, 0)
                yield TokenDelta(
                    request.request_id, index, (7,), " word", usage, finish_reason=reason, stats=replica.stats()
                )
        finally:
            del replica.streams[request.request_id]
            replica.bands[request.band] -= 1

    async def poll_stats(self) -> list[ReplicaStats]:
        """Return the load of all replicas."""
        return [replica.stats(is_polled=True) for replica in self.replicas.values()]

    async def poll_metrics(self) -> list[EngineMetrics]:
        """Return none: there are no engines."""
        return []

    async def drain(self, replica_id: str) -> bool:
        """Refuse."""
        return False

    async def describe(self) -> ModelCard:
        """Refuse: there is no model."""
        raise NotImplementedError


class Soak:
    """Ingress with its load; made inside an event loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rng = random.Random(1)
        self._client = SoakClient(options.replicas)
        self._http = HttpMetrics("model")
        table = LoadTable(time.monotonic)
        observer = RouterMetrics(self._http.registry, dict.fromkeys(Band, LatencyTargets()))
        limits = FlowLimits({band: BandLimits(10**6, 10**12) for band in Band}, 30.0, max_queue_wait_s=10**6)
        self._flow = FlowController(limits, table, LeastTokens(random.Random(0)), observer)
        self._dispatcher = Dispatcher(self._client, self._flow, observer)
        gossip = IngressGossip("ingress")
        load = IngressLoad(self._flow.queue, table, gossip)
        settings = AutoscalingSettings()
        self._autoscaling = AutoscalingLoop(
            Autoscaler(settings, ReplicaBounds(1, 4096, 1), time.monotonic), load, gossip, lambda: asyncio.sleep(0)
        )
        self._http.registry.register(RouterCollector(self._flow.queue, table, self._autoscaling))
        self._started_s = time.monotonic()
        self._requests: set[asyncio.Task[None]] = set()
        self._num_requests = 0
        self._is_over = False
        self.outcomes: Counter[str] = Counter()
        self.lines: list[dict[str, float]] = []

    async def run(self) -> None:
        """Serve for as long as the options say."""
        await self._dispatcher.refresh()
        loops = (self._dispatcher.run(), self._autoscaling.run(self._dispatcher.refresh), self._step(), self._watch())
        tasks = [asyncio.create_task(each) for each in loops]
        while len(self._requests) < self._options.queued:
            for _ in range(500):
                self._arrive()
            await asyncio.sleep(0.05)
        gc.collect()
        self._started_s = time.monotonic()
        self.lines.clear()
        while (left_s := self._options.seconds - (time.monotonic() - self._started_s)) > 0:
            done, _ = await asyncio.wait(tasks, timeout=min(left_s, _REPORT_S), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                raise RuntimeError("a loop has ended") from task.exception()
        self._is_over = True
        for task in (*tasks, *self._requests):
            task.cancel()
        await asyncio.gather(*tasks, *self._requests, return_exceptions=True)

    def _arrive(self) -> None:
        rng, self._num_requests = self._rng, self._num_requests + 1
        band = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
        first_tenant = int(self._options.new_tenants * (time.monotonic() - self._started_s))
        prompt = (self._num_requests, *(rng.randrange(1000) for _ in range(_PROMPT_TOKENS - 1)))
        request = GenerateRequest(
            f"request-{self._num_requests}", prompt, SamplingParams(rng.randrange(1, _MAX_OUTPUT_TOKENS)), band,
            f"tenant-{first_tenant + rng.randrange(self._options.tenants)}",
            deadline_unix_s=time.time() + rng.uniform(60, 6000) if rng.random() < _WITH_DEADLINE else None,
        )  # fmt: skip
        task = asyncio.create_task(self._read(request))
        self._requests.add(task)
        if rng.random() < _CANCELLED:
            asyncio.get_running_loop().call_later(rng.uniform(1, 300), task.cancel)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        if not task.cancelled() and task.exception() is not None:
            raise RuntimeError("a request failed") from task.exception()
        if not self._is_over and len(self._requests) < self._options.queued + len(self._client.replicas) * _NUM_SLOTS:
            self._arrive()

    async def _read(self, request: GenerateRequest) -> None:
        [deltas] = self._dispatcher.streams([request])
        is_left = self._rng.random() < _LEFT
        try:
            async for _ in deltas:
                if is_left:
                    await deltas.aclose()
                    self.outcomes["left"] += 1
                    return
            self.outcomes["finished"] += 1
        except asyncio.CancelledError:
            self.outcomes["cancelled"] += 1
        except ServingError as error:
            self.outcomes[type(error).__name__] += 1

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(_STEP_S)
            for replica in self._client.replicas.values():
                replica.step()

    async def _watch(self) -> None:
        process = psutil.Process()
        while True:
            await asyncio.sleep(_REPORT_S)
            page = exposition([], "model", self._http)
            gc.collect()
            line = {
                "seconds": round(time.monotonic() - self._started_s, 1),
                "rss_mb": round(process.memory_info().rss / 1e6, 1),
                "python_blocks": sys.getallocatedblocks(),
                "num_queued": len(self._flow.queue),
                "num_tenants": sum(self._flow.queue.num_tenants(band) for band in Band),
                "num_requests": self._num_requests,
                "page_bytes": len(page),
                "processor_s": round(time.process_time(), 1),
            }
            self.lines.append(line)
            print(line, dict(self.outcomes), flush=True)


def slope(lines: list[dict[str, float]], name: str) -> float:
    """Return the growth of a figure in a minute, fitted to the lines."""
    return float(np.polyfit([line["seconds"] / 60 for line in lines], [line[name] for line in lines], 1)[0])


def main() -> None:
    """Run, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=900.0, help="time with a full queue")
    parser.add_argument("--warm-up", type=float, default=180.0, help="seconds that the slope leaves out")
    parser.add_argument("--queued", type=int, default=100_000, help="requests that wait")
    parser.add_argument("--tenants", type=int, default=10_000, help="tenants at any time")
    parser.add_argument("--new-tenants", type=float, default=10.0, help="tenants that are replaced in a second")
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--name", default="scale_soak", help="file in bench/results")
    options = parser.parse_args()
    soak = Soak(options)
    asyncio.run(soak.run())
    lines = [line for line in soak.lines if line["seconds"] >= options.warm_up]
    figures: dict[str, Any] = {
        "num_queued": options.queued,
        "num_tenants": options.tenants,
        "num_replicas": options.replicas,
        "rss_mb_a_minute": round(slope(lines, "rss_mb"), 3),
        "python_blocks_a_minute": round(slope(lines, "python_blocks")),
        "outcomes": dict(soak.outcomes),
        "lines": soak.lines,
    }
    print(write(options.name, figures))


if __name__ == "__main__":
    main()
