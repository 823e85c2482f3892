"""The HTTP application, its jobs and a real engine, in one process: all of it but Ray."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from replicas.clock import Clock
from replicas.model_replica import ModelReplica, ReplicaOptions
from replicas.protocol import Band, EngineMetrics, GenerateRequest, ModelCard, ReplicaStats, TokenDelta
from router.dispatch import Dispatcher
from router.flow_control import FlowController, FlowLimits
from router.flow_queue import BandLimits
from router.latency_targets import LatencyTargets
from router.load_table import LoadTable
from router.policy import LeastTokens
from serve_app.ingress import Backends, IngressSettings, create_api
from serve_app.jobs.access import JobsAccess
from serve_app.jobs.backlog import BacklogView
from serve_app.jobs.context import JobsContext
from serve_app.jobs.database import Database
from serve_app.jobs.fsspec_store import FsspecStore
from serve_app.jobs.pace import Pace
from serve_app.jobs.records import JobsService
from serve_app.jobs.room import Room
from serve_app.jobs.runtime import JobsRuntime
from serve_app.jobs.settings import JobsSettings
from serve_app.jobs.webhook_addresses import AllowedHosts
from serve_app.jobs.webhook_guard import SystemResolver, WebhookGuard
from serve_app.metrics import HttpMetrics
from serve_app.openai.chat import PromptTokenizer
from serve_app.openai.dispatcher import KnownModel
from serve_app.openai.service import CompletionService
from serve_app.openai.workers import WorkerThreads
from serve_app.router_metrics import RouterMetrics
from tests.http.conftest import serving

_POLL_PERIOD_S = 0.2


class LocalReplicaClient:
    """Reaches one replica in this process; see `router.types.ReplicaClient`."""

    def __init__(self, replica: ModelReplica) -> None:
        self._replica = replica

    def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        return self._replica.generate(request)

    async def poll_stats(self) -> list[ReplicaStats]:
        return [self._replica.stats()]

    async def poll_metrics(self) -> list[EngineMetrics]:
        return [self._replica.metrics()]

    async def describe(self) -> ModelCard:
        return self._replica.describe()


class LocalRouting:
    """Flow control and dispatcher of one ingress over one replica in this process."""

    def __init__(self, replica: ModelReplica, metrics: HttpMetrics) -> None:
        table = LoadTable(time.monotonic)
        observer = RouterMetrics(metrics.registry, dict.fromkeys(Band, LatencyTargets()))
        limits = FlowLimits({band: BandLimits(5000, 10**9) for band in Band})
        flow = FlowController(limits, table, LeastTokens(random.Random(0)), observer, time.monotonic)
        self.queue = flow.queue
        self.dispatcher = Dispatcher(LocalReplicaClient(replica), flow, table, observer, _POLL_PERIOD_S)


@dataclass(frozen=True)
class LocalService:
    """A running HTTP server, and the replica behind it."""

    url: str
    replica: ModelReplica


@contextlib.asynccontextmanager
async def local_service(
    options: ReplicaOptions, settings: IngressSettings, data_dir: Path | None = None
) -> AsyncIterator[LocalService]:
    """Serve a model; with files, batches and jobs where there is a directory for them."""
    async with contextlib.AsyncExitStack() as stack:
        replica = ModelReplica(options, "replica-0", "node-0")
        await replica.start()
        stack.push_async_callback(replica.stop)
        jobs = None
        if data_dir is not None:
            jobs = await stack.enter_async_context(_jobs(replica, settings, data_dir))
        metrics = HttpMetrics(settings.served_model_name)
        app = create_api(settings, Backends(LocalRouting(replica, metrics).dispatcher, jobs=jobs), metrics=metrics)
        yield LocalService(await stack.enter_async_context(serving(app)), replica)


@contextlib.asynccontextmanager
async def _jobs(replica: ModelReplica, settings: IngressSettings, data_dir: Path) -> AsyncIterator[JobsAccess]:
    """The jobs process's parts, and what an ingress is given of them."""
    name = settings.served_model_name
    routing, files = LocalRouting(replica, HttpMetrics(name)), FsspecStore(f"{data_dir}/files")
    database = await asyncio.to_thread(Database, f"sqlite:///{data_dir}/jobs.sqlite3")
    known = KnownModel(name, routing.dispatcher, time.monotonic)
    tokenizer = PromptTokenizer.load(settings.model, WorkerThreads(1))
    runtime = JobsRuntime(
        JobsContext(database, files, JobsSettings(name)),
        CompletionService(routing.dispatcher, known, tokenizer, settings.limits, random.Random(0)),
        Room(routing.dispatcher.load, routing.queue),
        BacklogView(Pace(Clock())),
        random.Random(0),
    )
    await runtime.start(routing.dispatcher.run(), files.keep_clean())
    try:
        guard = WebhookGuard(AllowedHosts.parse([]), SystemResolver())
        yield JobsAccess(cast(JobsService, runtime.service), files, guard)
    finally:
        await runtime.stop()
