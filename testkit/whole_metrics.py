"""Every metric of the application: an ingress, an engine and the jobs process that have each had every event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from replicas.protocol import Band, EngineMetrics
from replicas.text.grammar import GrammarCompiler
from replicas.text.tokenizer_files import load_tokenizer
from router.balancing.load_table import LoadTable
from router.flow.flow_queue import BandLimits, FlowQueue, QueuedRequest
from router.scaling.autoscaling import Autoscaler, AutoscalingSettings, ReplicaBounds
from router.scaling.autoscaling_loop import AutoscalingLoop, IngressLoad
from router.scaling.ingress_reports import IngressGossip
from router.types import LatencyTargets, Outcome
from serve_app.config import DEMO_MODEL_NAME, HeadwayConfig
from serve_app.jobs.api.records import JobsCounts
from serve_app.jobs.api.responses import StoredSize, StoredSums
from serve_app.jobs.metrics import jobs_metrics, storage_metric, stored_metrics
from serve_app.jobs.webhooks.sender import AttemptOutcome
from serve_app.monitoring.families import CountsCollector, plain_families
from serve_app.monitoring.http import HttpMetrics
from serve_app.monitoring.page import exposition
from serve_app.monitoring.router import RouterCollector, RouterMetrics
from serve_app.openai.structured.output_grammar import GrammarChecker
from testkit.engine.shadow_runner import World, config, request
from testkit.limits import LIMIT_S

MODEL = "m"


@dataclass(frozen=True)
class WholeMetrics:
    """Metrics of each part of the application."""

    engine: EngineMetrics
    http: HttpMetrics
    jobs: JobsCounts

    def page(self) -> str:
        """Return the page of an ingress."""
        return exposition([self.engine], MODEL, self.http, plain_families(self.jobs.own), self.jobs.router).decode()


async def whole_metrics() -> WholeMetrics:
    """Return the metrics after an event of each kind."""
    world = World(config())
    world.add(request())
    world.run()
    compiler = GrammarCompiler(load_tokenizer(HeadwayConfig(model=DEMO_MODEL_NAME).model_path))
    engine = world.engine.metrics()
    engine = EngineMetrics(engine.replica_id, (*engine.metrics, *compiler.metrics()), engine.histograms)
    http, table = HttpMetrics(MODEL), LoadTable(time.monotonic)
    http.registry.register(CountsCollector(GrammarChecker(compiler).metrics))
    http.observe(handler="/load", method="GET", status=200, duration_s=0.1, request_bytes=0, response_bytes=9)
    table.record(world.engine.stats())
    queue = FlowQueue({band: BandLimits(10, 10_000) for band in Band}, 30.0)
    queue.add(QueuedRequest(request(), 7, None, 1), 0.0)
    metrics = RouterMetrics(http.registry, dict.fromkeys(Band, LatencyTargets()))
    metrics.waited(Band.STANDARD, Outcome.DISPATCHED, 0.1)
    http.registry.register(RouterCollector(queue, table, await _autoscaling(queue, table)))
    counts = jobs_metrics({}, {}, 0.0, dict.fromkeys(AttemptOutcome, 0))
    of_stored = stored_metrics(StoredSums(StoredSize(0, 0, 0, None), 0, {}), 0.0)
    jobs = JobsCounts((*counts, *of_stored, storage_metric(is_up=True)))
    return WholeMetrics(engine, http, jobs)


async def _autoscaling(queue: FlowQueue, table: LoadTable) -> AutoscalingLoop:
    """Return an autoscaling loop that has decided."""
    settings = AutoscalingSettings()
    gossip = IngressGossip("ingress")
    load = IngressLoad(queue, table, gossip)
    autoscaling = AutoscalingLoop(
        Autoscaler(settings, ReplicaBounds(1, 2, 1), time.monotonic), load, gossip, lambda: asyncio.sleep(0)
    )
    running = asyncio.create_task(autoscaling.run(lambda: asyncio.sleep(0)))
    async with asyncio.timeout(LIMIT_S):
        while autoscaling.decision is None:
            await asyncio.sleep(0)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return autoscaling
