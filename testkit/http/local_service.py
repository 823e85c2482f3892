"""The HTTP application, its jobs and a real engine, in one process: all of it but Ray."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from replicas.engine.async_engine import AsyncEngine
from replicas.model_replica import ModelReplica
from replicas.options import ReplicaOptions
from replicas.protocol import Band, EngineMetrics, GenerateRequest, ModelCard, ReplicaStats, TokenDelta
from replicas.timing.clock import Clock
from router.balancing.load_table import LoadTable
from router.balancing.policy import LeastTokens
from router.dispatch import Dispatcher
from router.flow.flow_control import FlowController, FlowLimits
from router.flow.flow_queue import BandLimits
from router.types import LatencyTargets, ReplicaClient
from router.watch import WatchSettings
from serve_app.http_app import Backends, IngressSettings, create_api
from serve_app.jobs.access import JobsAccess
from serve_app.jobs.api.records import JobsCounts, JobsService, JobsSettings
from serve_app.jobs.api.responses import ResponsesService
from serve_app.jobs.execution.line_runner import LineRunner
from serve_app.jobs.execution.planning import LineCapacity
from serve_app.jobs.execution.throughput import BacklogView
from serve_app.jobs.files.store import FsspecStore
from serve_app.jobs.response_client import StoredResponses
from serve_app.jobs.runtime import JobsRuntime
from serve_app.jobs.storage.schema.database import Database, JobsContext
from serve_app.jobs.usage import UsageLedger, UsageReporter
from serve_app.jobs.webhooks.addresses import AllowedHosts
from serve_app.jobs.webhooks.guard import SystemResolver, WebhookGuard
from serve_app.jobs.webhooks.signing import content_key, load_or_create_secret
from serve_app.monitoring.families import CountsCollector, families_of_process
from serve_app.monitoring.http import HttpMetrics
from serve_app.monitoring.load_history import LoadHistory
from serve_app.monitoring.router import RouterMetrics
from serve_app.openai.request.sampling_defaults import SamplingDefaults
from serve_app.openai.service import CompletionService, KnownModel, ModelText
from serve_app.openai.tokenize.worker_threads import WorkerThreads
from serve_app.tracing.tracer import Tracer
from testkit.engine.single_stream import generate
from testkit.http.api import serving
from testkit.http.memory_jobs import LocalJobsClient

_POLL_PERIOD_S = 0.2
_USAGE_PERIOD_S = 0.2


class LocalReplicaClient:
    """Client of one replica in this process; see `router.types.ReplicaClient`."""

    def __init__(self, engine: AsyncEngine, card: ModelCard) -> None:
        self._engine, self._card = engine, card

    def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        return generate(self._engine, request)

    async def poll_stats(self) -> list[ReplicaStats]:
        return [self._engine.stats()]

    async def poll_metrics(self) -> list[EngineMetrics]:
        return [self._engine.metrics()]

    async def drain(self, replica_id: str) -> bool:
        return False

    async def describe(self) -> ModelCard:
        return self._card


class LocalRouting:
    """Flow control and dispatcher of one ingress over one replica in this process."""

    def __init__(self, client: ReplicaClient, metrics: HttpMetrics) -> None:
        table = LoadTable(time.monotonic)
        observer = RouterMetrics(metrics.registry, dict.fromkeys(Band, LatencyTargets()))
        limits = FlowLimits({band: BandLimits(5000, 10**9) for band in Band}, promote_after_s=30.0)
        flow = FlowController(limits, table, LeastTokens(random.Random(0)), observer)
        self.queue = flow.queue
        self.dispatcher = Dispatcher(client, flow, observer, WatchSettings(_POLL_PERIOD_S))


class LocalJobs:
    """The jobs services of this process, with the one method that a deployment adds."""

    def __init__(self, runtime: JobsRuntime, registry: CollectorRegistry) -> None:
        self._runtime = runtime
        self._registry = registry

    def __getattr__(self, name: str) -> Any:
        runtime = self._runtime
        return getattr(runtime.responses if hasattr(ResponsesService, name) else runtime.service, name)

    async def metrics(self) -> JobsCounts:
        families = families_of_process(self._registry, "jobs")
        return JobsCounts(await self._runtime.metrics({}), families, stored=await self._runtime.stored())


@dataclass(frozen=True)
class LocalService:
    """A running HTTP server, and the engine behind it."""

    url: str
    engine: AsyncEngine


@contextlib.asynccontextmanager
async def local_service(
    options: ReplicaOptions, settings: IngressSettings, data_dir: Path | None = None, job_lease_s: float = 10.0,
    database_url: str | None = None,
) -> AsyncIterator[LocalService]:  # fmt: skip
    """Serve a model; with files, batches, jobs and stored responses where there is a directory for them.

    `database_url` is of the jobs' database; None: a file of SQLite in the directory.
    """
    async with contextlib.AsyncExitStack() as stack:
        replica = ModelReplica(options, "replica-0", "node-0")
        engine = replica.start()
        stack.push_async_callback(engine.stop)
        client = LocalReplicaClient(engine, replica.card)
        jobs = None
        if data_dir is not None:
            job_settings = JobsSettings(settings.served_model_name, job_lease_s=job_lease_s)
            url = database_url or f"sqlite:///{data_dir}/jobs.sqlite3"
            jobs = await stack.enter_async_context(_jobs(client, settings, job_settings, data_dir, url))
        metrics = HttpMetrics(settings.served_model_name)
        dispatcher = LocalRouting(client, metrics).dispatcher
        polling = asyncio.create_task(dispatcher.run())
        stack.callback(polling.cancel)
        history = LoadHistory(dispatcher, Clock().unix)
        sampling = asyncio.create_task(history.run())
        stack.callback(sampling.cancel)
        ledger = UsageLedger(Clock())
        responses = None
        if jobs is not None:
            responses = StoredResponses(jobs.client, jobs.settings.heartbeat_s)
            holding = asyncio.create_task(responses.run())
            stack.callback(holding.cancel)
            call = jobs.client.call
            reporter = UsageReporter(ledger, lambda report: call(JobsService.report_usage, report), _USAGE_PERIOD_S)
            reporting = asyncio.create_task(reporter.run())
            stack.callback(reporting.cancel)
        tracer = Tracer(settings.tracing, "headway-ingress", "0")
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        backends = Backends(dispatcher, jobs=jobs, meter=ledger, history=history, responses=responses)
        app = create_api(settings, backends, metrics=metrics, tracer=tracer)
        yield LocalService(await stack.enter_async_context(serving(app)), engine)


@contextlib.asynccontextmanager
async def _jobs(
    client: LocalReplicaClient, settings: IngressSettings, job_settings: JobsSettings, data_dir: Path, database_url: str
) -> AsyncIterator[JobsAccess]:
    """Run the jobs process's parts; yield an ingress's access to them."""
    name = settings.served_model_name
    metrics = HttpMetrics(name)
    routing, files = LocalRouting(client, metrics), FsspecStore(f"{data_dir}/files")
    secret = load_or_create_secret(data_dir / "webhook_secret")
    database = await asyncio.to_thread(Database, database_url)
    defaults = SamplingDefaults.load(settings.model)
    known = KnownModel((name,), routing.dispatcher, time.monotonic, defaults)
    text = ModelText.load(settings.model, WorkerThreads(1), settings.tool_call_parser, settings.chat_template)
    metrics.registry.register(CountsCollector(text.grammars.metrics))
    ledger, tracer = UsageLedger(Clock()), Tracer(settings.tracing, "headway-jobs", "0")
    service = CompletionService(routing.dispatcher, known, text, settings.limits, random.Random(0), ledger)
    context = JobsContext(database, files, job_settings, content_key(secret))
    runtime = JobsRuntime(
        context,
        LineRunner(service, metrics.outputs, random.Random(0), context, tracer),
        LineCapacity(routing.dispatcher.load, routing.queue),
        BacklogView(Clock()),
    )
    reporter = UsageReporter(ledger, runtime.service.report_usage, _USAGE_PERIOD_S)
    await runtime.start(routing.dispatcher.run(), files.keep_clean(), reporter.run())
    try:
        guard = WebhookGuard(AllowedHosts.parse(""), SystemResolver())
        jobs = LocalJobsClient(LocalJobs(runtime, metrics.registry))
        yield JobsAccess(jobs, files, guard, job_settings)
    finally:
        await runtime.stop()
        await asyncio.to_thread(tracer.close)
