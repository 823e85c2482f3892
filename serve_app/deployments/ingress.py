"""Serve deployment of the HTTP ingress.

No `from __future__ import annotations` here: Serve inspects the classes of deployments.
"""

import asyncio
from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from serve_app.config import HeadwayConfig
from serve_app.deployments.process_setup import freeze_heap, log_through_serve
from serve_app.deployments.routing import MakeFlow, Routing
from serve_app.jobs.access import JobsAccess
from serve_app.jobs.client import ServeJobs
from serve_app.jobs.files.fsspec import FsspecStore
from serve_app.jobs.webhooks.guard import SystemResolver, WebhookGuard
from serve_app.metrics import HttpMetrics
from serve_app.router_metrics import RouterCollector, RouterMetrics


class Ingress:
    """Serve deployment around the HTTP application, which is created in the replica's process."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: HeadwayConfig, model: DeploymentHandle[Any], jobs: DeploymentHandle[Any], make_flow: MakeFlow
    ) -> None:
        log_through_serve()
        self._config = config
        self._metrics = HttpMetrics(config.model_name)
        observer = RouterMetrics(self._metrics.registry, config.latency_targets())
        self._routing = Routing(config, model, observer, make_flow)
        self._metrics.registry.register(
            RouterCollector(self._routing.queue, self._routing.table, self._routing.autoscaling)
        )
        self._jobs = JobsAccess(
            ServeJobs(jobs),
            FsspecStore(config.jobs_files_url),
            WebhookGuard(config.allowed_webhook_hosts(), SystemResolver()),
            config.jobs_settings(),
        )
        self._loops = asyncio.create_task(self._routing.run())

    async def __del__(self) -> None:
        """Stop the loops; Serve calls it when the replica stops."""
        if hasattr(self, "_loops"):
            self._loops.cancel()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this ingress's report for `application_autoscaling_policy`; Serve calls it."""
        return self._routing.autoscaling_stats()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Create the HTTP application; Serve calls it after the constructor."""
        from serve_app.ingress import Backends, create_api  # imports transformers, which takes a second

        backends = Backends(self._routing.dispatcher, self._routing.autoscaling, self._jobs)
        api = create_api(self._config.ingress_settings(), backends, metrics=self._metrics)
        freeze_heap()
        return api
