"""Serve deployment of the HTTP ingress.

No `from __future__ import annotations` here: Serve inspects the classes of deployments.
"""

import asyncio
import time
from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from replicas.timing.clock import Clock
from router.scaling.autoscaling import ReplicaBounds
from router.scaling.ingress_load import INGRESS_LOAD, IngressLoadMeter
from serve_app.deployments.process import (
    MakeFlow,
    Routing,
    log_through_serve,
    this_replica_id,
)
from serve_app.deployments.serve_hooks import free_cancelled_streams, listen_on_loopback, on_removal
from serve_app.http.gate import Gate
from serve_app.jobs.access import JobsAccess
from serve_app.jobs.api.records import JobsService
from serve_app.jobs.client import ServeJobs
from serve_app.jobs.files.store import FsspecStore
from serve_app.jobs.response_client import StoredResponses
from serve_app.jobs.usage import UsageLedger, UsageReporter
from serve_app.jobs.webhooks.addresses import AllowedHosts
from serve_app.jobs.webhooks.guard import SystemResolver, WebhookGuard
from serve_app.keys.rate_limits import KeyLimiter
from serve_app.models.local_models import local_checkpoint
from serve_app.monitoring.http import HttpMetrics
from serve_app.monitoring.load_history import LoadHistory
from serve_app.process import return_freed_memory, share_gil, trim_heaps, without_collection
from serve_app.settings.processes import IngressProcess
from serve_app.tracing.tracer import Tracer

_TARGET_STREAMS = 200
"""Requests that one ingress should answer at once; more ingresses start above it, if their number follows their load.
"""
_FIRST_REPLICA_LIMIT_S = 30.0
"""Longest wait of a new ingress for the first replica that it hears of, seconds. It is shorter than a model takes to
load: at the first start, when there is none, the ingress answers that the model loads."""


class Ingress:
    """Serve deployment around the HTTP application, which is created in the replica's process."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: IngressProcess, model: DeploymentHandle[Any], jobs: DeploymentHandle[Any], make_flow: MakeFlow
    ) -> None:
        log_through_serve()
        listen_on_loopback()
        free_cancelled_streams()
        return_freed_memory()
        trim_heaps()
        settings = settings.with_model(await asyncio.to_thread(local_checkpoint, settings.model_path))
        self._settings = settings
        self._gate = Gate()
        self._tracer = Tracer(settings.http.tracing, "headway-ingress", this_replica_id())
        self._metrics = HttpMetrics(settings.http.served_model_name)
        self._routing = Routing(settings.routing, model, self._metrics.registry, make_flow)
        self._jobs = JobsAccess(
            ServeJobs(jobs),
            FsspecStore(settings.files_url),
            WebhookGuard(AllowedHosts.parse(settings.webhook_allowed_hosts), SystemResolver()),
            settings.jobs,
        )
        clock = Clock()
        self._load = IngressLoadMeter(
            _TARGET_STREAMS, lambda: self._gate.num_inside, clock.monotonic, time.process_time
        )
        self._ledger = UsageLedger(clock)
        client = self._jobs.client
        self._responses = StoredResponses(client, settings.jobs.heartbeat_s)
        self._reporter = UsageReporter(self._ledger, lambda report: client.call(JobsService.report_usage, report))
        self._limiter = KeyLimiter(clock.monotonic, self._routing.gossip.keys_of_peers)
        self._routing.gossip.keys_in_use = self._limiter.keys_in_use
        self._history = LoadHistory(self._routing.dispatcher, clock.unix)
        self._loops = asyncio.create_task(self._run())
        self._stream_drain_s = 0.0
        self._loop = asyncio.get_running_loop()
        on_removal(self._begin_removal)

    async def __del__(self) -> None:
        """Stop the loops; Serve calls it when the replica stops."""
        if hasattr(self, "_loops"):
            self._loops.cancel()
            self._routing.close()
            await self._reporter.close()
            await asyncio.to_thread(self._tracer.close)

    def _begin_removal(self) -> None:
        """Give the running requests their time; Serve calls it on any thread."""
        self._loop.call_soon_threadsafe(lambda: self._gate.remove(self._stream_drain_s))

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._routing.run())
            tasks.create_task(self._reporter.run())
            tasks.create_task(self._history.run())
            tasks.create_task(self._responses.run())

    async def reconfigure(self, changeable: dict[str, Any]) -> None:
        """Set what may change: the bounds on the number of model replicas, and the time of streams after a removal.

        Serve calls it at the start and after each change. The ingress is not ready before it ends: at the start it
        waits for the first replica that it hears of.
        """
        bounds = ReplicaBounds(**changeable["bounds"])
        self._stream_drain_s = changeable["stream_drain_s"]
        self._routing.change_bounds(bounds)
        if bounds.min_replicas > 0:
            await self._routing.await_replica(_FIRST_REPLICA_LIMIT_S)

    async def drain(self, limit_s: float) -> int:
        """Admit no further request, wait at most `limit_s` for the running ones, and return the number of those left.

        `headway serve` calls it before it stops the application.
        """
        return await self._gate.close(limit_s)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this ingress's report for the autoscaling policies; Serve calls it."""
        return {**self._routing.autoscaling_stats(), INGRESS_LOAD: self._load.load()}

    async def check_health(self) -> None:
        """Raise if the loops have ended, so that Serve replaces the process."""
        if self._loops.done():
            raise RuntimeError("the loops of the ingress have ended")

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Create the HTTP application; Serve calls it after the constructor."""
        with without_collection():
            from serve_app.http_app import Backends, create_api  # imports transformers, which takes a second

            api = create_api(
                self._settings.http,
                Backends(
                    self._routing.dispatcher,
                    self._routing.autoscaling,
                    self._jobs,
                    self._settings.routing.targets,
                    self._ledger,
                    self._limiter,
                    self._history,
                    self._responses,
                ),
                metrics=self._metrics,
                gate=self._gate,
                tracer=self._tracer,
            )
        share_gil()
        return api
