"""The deployment of everything asynchronous.

No `from __future__ import annotations` here: Serve inspects the classes of deployments. Modules that bring SQLAlchemy,
alembic or transformers are imported by the functions that use them: every process of the application reads this one.
"""

import asyncio
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from ray.serve.handle import DeploymentHandle

from replicas.clock import Clock
from serve_app.config import HeadwayConfig
from serve_app.jobs.serve_client import answers_service_calls
from serve_app.metrics import JobsCounts
from serve_app.process_setup import freeze_heap, log_through_serve
from serve_app.router_metrics import RouterCollector, RouterMetrics
from serve_app.routing import MakeFlow, Routing

if TYPE_CHECKING:
    from router.dispatch import Dispatcher
    from serve_app.jobs.database import Database
    from serve_app.jobs.webhooks import Outbox, WebhookSender
    from serve_app.openai.service import CompletionService


@answers_service_calls
class Jobs:
    """The Serve deployment around one `JobsRuntime`: the database's owner, and one more ingress for the router.

    `ServeJobs` calls it.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: HeadwayConfig, model: DeploymentHandle[Any], make_flow: MakeFlow
    ) -> None:
        log_through_serve()
        # Threads that check files and write to the database hold the interpreter's lock for long: with Python's own
        # 5 ms each of their steps would keep whoever submits a job waiting so long.
        sys.setswitchinterval(0.0005)
        from serve_app.jobs.backlog import BacklogView
        from serve_app.jobs.context import JobsContext
        from serve_app.jobs.fsspec_store import FsspecStore
        from serve_app.jobs.jobs_metrics import JobsMetrics
        from serve_app.jobs.pace import Pace
        from serve_app.jobs.room import Room
        from serve_app.jobs.runtime import JobsRuntime

        self._registry = CollectorRegistry()
        observer = RouterMetrics(self._registry, config.latency_targets())
        clock = Clock()
        backlog = BacklogView(Pace(clock))
        self._routing = Routing(config, model, observer, make_flow, backlog)
        self._registry.register(RouterCollector(self._routing.queue, self._routing.table, self._routing.autoscaling))
        database = await asyncio.to_thread(_open_database, config)
        files = FsspecStore(config.jobs_files_url)
        context = JobsContext(database, files, config.jobs_settings(), clock)
        completions = await _completions(config, self._routing.dispatcher, clock)
        room = Room(self._routing.dispatcher.load, self._routing.queue)
        self._runtime = JobsRuntime(context, completions, room, backlog, random.Random())
        self.service = self._runtime.service
        webhooks = await asyncio.to_thread(_webhook_sender, config, self._runtime.outbox, clock)
        self._metrics = JobsMetrics(database, self._runtime.line_counts, backlog.eta_s, lambda: webhooks.outcomes)
        await self._runtime.start(self._routing.run(), webhooks.run(), files.keep_clean())
        freeze_heap()

    async def metrics(self) -> JobsCounts:
        """What is counted of all tenants' work."""
        return JobsCounts(await self._metrics.read(), tuple(self._registry.collect()))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: what `obey_ingresses` obeys."""
        return self._routing.autoscaling_stats()

    async def check_health(self) -> None:
        """Raise where the loops have ended, so that Serve replaces the process."""
        self._runtime.check_health()

    async def __del__(self) -> None:
        """Called by Serve once no call is left or the graceful shut-down is over."""
        if hasattr(self, "_runtime"):
            await self._runtime.stop()


async def _completions(config: HeadwayConfig, dispatcher: "Dispatcher", clock: Clock) -> "CompletionService":
    from serve_app.openai.chat import PromptTokenizer
    from serve_app.openai.dispatcher import KnownModel
    from serve_app.openai.service import CompletionService
    from serve_app.openai.workers import WorkerThreads

    settings = config.ingress_settings()
    workers = WorkerThreads(settings.num_tokenizer_threads)
    tokenizer = await asyncio.to_thread(PromptTokenizer.load, config.model_path, workers)
    known = KnownModel(config.model_name, dispatcher, clock.monotonic)
    return CompletionService(dispatcher, known, tokenizer, settings.limits, random.Random())


def _open_database(config: HeadwayConfig) -> "Database":
    from serve_app.jobs.database import Database
    from serve_app.jobs.durable_disk import make_directory

    make_directory(Path(config.data_dir))
    return Database(config.jobs_database_url)


def _webhook_sender(config: HeadwayConfig, outbox: "Outbox", clock: Clock) -> "WebhookSender":
    from serve_app.jobs.webhook_client import WebhookClient
    from serve_app.jobs.webhook_guard import SystemResolver, WebhookGuard
    from serve_app.jobs.webhook_signing import WebhookSigner, kept_secret
    from serve_app.jobs.webhooks import WebhookSender

    secret = config.webhook_secret or kept_secret(Path(config.data_dir) / "webhook_secret")
    guard = WebhookGuard(config.allowed_webhook_hosts(), SystemResolver())
    return WebhookSender(outbox, WebhookClient(WebhookSigner(secret), guard), random.Random(), clock)
