"""Endpoints for operators and orchestrators: the probes below /health, /metrics, /load, and replicas that leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from replicas.errors import NoReplicaAvailable, ServingError
from replicas.protocol import Band, EngineMetrics
from router.dispatch import Dispatcher
from router.scaling.autoscaling_loop import AutoscalingLoop
from router.types import LatencyTargets, ReplicaView
from serve_app.endpoints.operators.load_objects import autoscaling_of, load_of
from serve_app.errors import replica_not_found
from serve_app.http.exchange import json_response
from serve_app.jobs.access import JobsAccess
from serve_app.jobs.api.records import JobsCounts, JobsService
from serve_app.jobs.response_client import StoredResponses
from serve_app.keys.rate_limits import KeyLimiter
from serve_app.monitoring.engines import engine_parts, engines_shown
from serve_app.monitoring.families import plain_families
from serve_app.monitoring.http import HttpMetrics
from serve_app.monitoring.load_history import LoadHistory
from serve_app.monitoring.page import CONTENT_TYPE, page_parts
from serve_app.openai.request.job_schema import EngineQuery
from serve_app.openai.request.parsing import parse_body
from serve_app.openai.service import KnownModel, Meter
from serve_app.reference.answers import DrainReply, HealthReply, LiveReply, LoadReply, ReadyReply
from serve_app.reference.operations import LOOKUP_FAILURES, Access, Operation

_JOBS_LIMIT_S = 2.0
"""Longest wait of a scrape or of `/health` for the jobs deployment, seconds."""


@dataclass(frozen=True, slots=True)
class Backends:
    """Bundle of the services that the endpoints use."""

    dispatcher: Dispatcher
    autoscaling: AutoscalingLoop | None = None
    """Autoscaling loop, whose decision `/load` shows; None: `/load` shows none."""
    jobs: JobsAccess | None = None
    """Access to the jobs service; None: there are no endpoints for files, batches and jobs."""
    targets: Mapping[Band, LatencyTargets] = field(default_factory=dict)
    """Latency targets of the bands, which the dashboard shows."""
    meter: Meter | None = None
    """Meter of the work for completions; None: nothing is metered."""
    key_limiter: KeyLimiter | None = None
    """Limiter of API keys that other ingresses' use reaches; None: this ingress counts for itself."""
    history: LoadHistory | None = None
    """Load over the last hour, which the dashboard shows; None: it shows none."""
    responses: StoredResponses | None = None
    """Store of responses; None: responses are not stored, and there are no conversations."""


@dataclass(frozen=True, slots=True)
class OperationsEndpoints:
    """Endpoints that show the health, metrics and load of this ingress and the processes behind it."""

    backends: Backends
    model: KnownModel
    http_metrics: HttpMetrics
    stall_timeout_s: float

    @Operation("GET", "/health/live", "Server", LiveReply, access=Access.OPEN, failures=frozenset({503}))
    async def live(self, request: Request) -> Response:
        """Answer 200 if this process runs and no engine has stalled.

        An engine has stalled if it has running or waiting sequences and neither a delta nor a poll has reported a step
        of it for `stall_timeout_s`. Before a 503 all engines are polled once more.
        """
        if self._stalled():
            with contextlib.suppress(ServingError):
                await self.backends.dispatcher.refresh()
        stalled = self._stalled()
        if stalled:
            listed = ", ".join(f"{view.stats.replica_id} ({view.age_s:.0f} s)" for view in stalled)
            raise NoReplicaAvailable(f"replicas with running sequences are silent: {listed}", code="engine_stalled")
        return json_response({"status": "live"})

    @Operation("GET", "/health/ready", "Server", ReadyReply, access=Access.OPEN, failures=frozenset({503}))
    async def ready(self, request: Request) -> Response:
        """Answer 200 if a request would be served now.

        It would if a replica answers and not all replicas are draining. With `min_replicas` 0 no replica has to run, if
        the model's card is known: a request starts a replica.
        """
        try:
            await self.model.refresh()
        except NoReplicaAvailable:
            if self.backends.autoscaling is None or self.backends.autoscaling.bounds.min_replicas > 0:
                raise
            await self.model.card()
        views = self.backends.dispatcher.load()
        if views and all(view.stats.is_draining for view in views):
            raise NoReplicaAvailable("every replica is draining", code="draining")
        return json_response({"status": "ready"})

    @Operation("GET", "/health", "Server", HealthReply, access=Access.OPEN, failures=frozenset({503}))
    async def health(self, request: Request) -> Response:
        """Answer 200 if a request would be served now, with the state of the jobs.

        Interactive requests do not need the jobs' storage.
        """
        await self.ready(request)
        return json_response({"status": "ready", "jobs": await self._jobs_state()})

    @Operation(
        "GET",
        "/metrics",
        "Server",
        other_answers={"text/plain": ()},
        access=Access.OPERATOR,
        failures=frozenset({400}),
        query=EngineQuery,
    )
    async def metrics(self, request: Request) -> Response:
        """Return the metrics, in Prometheus's text format.

        They are those of this ingress, of the engines that answer, and of the jobs deployment. More than 32 engines are
        summed; `?engine=` shows one engine alone. Streams go on while the page is made.
        """
        number = parse_body(EngineQuery, request.query_params, {}).engine
        engines: list[EngineMetrics] = []
        # Without an answer from the engines, the page still has this ingress's own metrics.
        with contextlib.suppress(ServingError):
            engines = await self.backends.dispatcher.metrics()
        shown = engines_shown(engines, number)
        if number is not None:
            parts = engine_parts(shown, self.model.name)
        else:
            jobs = await self._jobs_metrics()
            parts = page_parts(shown, self.model.name, self.http_metrics, plain_families(jobs.own), jobs.router)
        page = []
        for part in parts:
            page.append(part)
            await asyncio.sleep(0)
        return Response(b"".join(page), media_type=CONTENT_TYPE)

    @Operation("GET", "/load", "Server", LoadReply, access=Access.OPERATOR)
    async def load(self, request: Request) -> Response:
        """Show the load of every replica.

        Each load is the last known one, with its age. This ingress's autoscaling decision is shown too.
        """
        replicas = [load_of(view) for view in self.backends.dispatcher.load()]
        autoscaling = None if self.backends.autoscaling is None else autoscaling_of(self.backends.autoscaling)
        return json_response({"replicas": replicas, "autoscaling": autoscaling})

    async def _jobs_state(self) -> str | None:
        """Return `ok`, or the code of what is wrong with the jobs process; None: there is none."""
        if self.backends.jobs is None:
            return None
        try:
            async with asyncio.timeout(_JOBS_LIMIT_S):
                return await self.backends.jobs.client.call(JobsService.storage_fault) or "ok"
        except (ServingError, TimeoutError):
            return "unavailable"

    @Operation(
        "POST",
        "/v1/replicas/{replica_id}/drain",
        "Server",
        DrainReply,
        access=Access.OPERATOR,
        failures=LOOKUP_FAILURES,
    )
    async def drain(self, request: Request) -> Response:
        """Have a replica take no more requests, hand its streams over, and be replaced.

        Streams that last longer than 5 s go on elsewhere. Serve then replaces the replica.
        """
        replica_id = request.path_params["replica_id"]
        if not await self.backends.dispatcher.drain(replica_id):
            raise replica_not_found(replica_id)
        return json_response({"replica_id": replica_id, "status": "draining"})

    async def _jobs_metrics(self) -> JobsCounts:
        if self.backends.jobs is None:
            return JobsCounts()
        try:
            async with asyncio.timeout(_JOBS_LIMIT_S):
                return await self.backends.jobs.client.call(JobsService.metrics)
        except (ServingError, TimeoutError):
            return JobsCounts()

    def _stalled(self) -> list[ReplicaView]:
        return [
            view
            for view in self.backends.dispatcher.load()
            if view.stats.num_running + view.stats.num_waiting > 0
            and view.age_s + view.stats.stalled_s > self.stall_timeout_s
        ]
