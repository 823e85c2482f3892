"""Serve deployment of asynchronous work: files, batches, jobs and webhooks.

No `from __future__ import annotations` here: Serve inspects the classes of deployments. Functions import the modules
that need SQLAlchemy, alembic or transformers, since the process that builds the application imports this module, too.
"""

import asyncio
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from ray.serve.handle import DeploymentHandle

from replicas.protocol import Metric
from replicas.timing.clock import Clock
from router.scaling.autoscaling import ReplicaBounds
from serve_app.deployments.process import (
    MakeFlow,
    Routing,
    log_through_serve,
    this_replica_id,
)
from serve_app.deployments.serve_hooks import free_cancelled_streams, listen_on_loopback
from serve_app.jobs.api.records import JobsCounts
from serve_app.jobs.api.responses import ResponsesService
from serve_app.jobs.client import answer
from serve_app.jobs.webhooks.addresses import AllowedHosts
from serve_app.models.local_models import local_checkpoint
from serve_app.monitoring.ray_metrics import Instruments, export_forever, jobs_exporter
from serve_app.process import return_freed_memory, trim_heaps, without_collection
from serve_app.settings.processes import JobsProcess
from serve_app.tracing.tracer import Tracer

if TYPE_CHECKING:
    from serve_app.jobs.execution.line_runner import LineRunner
    from serve_app.jobs.storage.schema.database import JobsContext
    from serve_app.jobs.usage import UsageLedger
    from serve_app.jobs.webhooks.sender import Outbox, WebhookSender
    from serve_app.jobs.webhooks.signing import WebhookSigner


class Jobs:
    """Serve deployment around one `JobsRuntime`: a jobs worker, which routes requests like an ingress.

    Any worker can answer a call of `ServeJobs`: the state is in the database.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: JobsProcess, model: DeploymentHandle[Any], make_flow: MakeFlow
    ) -> None:
        log_through_serve()
        listen_on_loopback()
        free_cancelled_streams()
        settings = settings.with_model(await asyncio.to_thread(local_checkpoint, settings.model_path))
        # The threads that check files and write to the database compute for long stretches. With Python's default of
        # 5 ms the event loop, which answers submissions, would wait that long for the GIL each time.
        sys.setswitchinterval(0.0005)
        with without_collection():
            await self._start(settings, model, make_flow)
        return_freed_memory()
        trim_heaps()

    async def _start(self, settings: JobsProcess, model: DeploymentHandle[Any], make_flow: MakeFlow) -> None:
        from serve_app.jobs.execution.planning import LineCapacity
        from serve_app.jobs.execution.throughput import BacklogView
        from serve_app.jobs.files.store import FsspecStore, make_directory
        from serve_app.jobs.runtime import JobsRuntime
        from serve_app.jobs.storage.schema.database import Database, JobsContext
        from serve_app.jobs.usage import UsageLedger, UsageReporter
        from serve_app.jobs.webhooks.signing import WebhookSigner, content_key

        self._registry = CollectorRegistry()
        self._tracer = Tracer(settings.tracing, "headway-jobs", this_replica_id())
        clock = Clock()
        backlog = BacklogView(clock)
        self._routing = Routing(settings.routing, model, self._registry, make_flow, backlog)
        await asyncio.to_thread(make_directory, Path(settings.data_dir))
        database = Database(settings.database_url)
        files = FsspecStore(settings.files_url)
        secret = await asyncio.to_thread(_webhook_secret, settings)
        context = JobsContext(database, files, settings.jobs, content_key(secret), clock)
        ledger = UsageLedger(clock)
        self._runtime = JobsRuntime(
            context,
            await self._line_runner(settings, context, ledger),
            LineCapacity(self._routing.dispatcher.load, self._routing.queue),
            backlog,
        )
        self.service = self._runtime.service
        signer = WebhookSigner(secret)
        self._webhooks = _webhook_sender(settings, signer, self._runtime.outbox, self._tracer)
        self._reporter = UsageReporter(ledger, self.service.report_usage)
        export = jobs_exporter(settings.jobs.model_name, self._own_metrics, Instruments.of_serve())
        exporting = export_forever(export)
        loops = (self._routing.run(), self._webhooks.run(), files.keep_clean(), self._reporter.run(), exporting)
        await self._runtime.start(*loops)

    async def _line_runner(self, settings: JobsProcess, context: "JobsContext", ledger: "UsageLedger") -> "LineRunner":
        from serve_app.jobs.execution.line_runner import LineRunner
        from serve_app.monitoring.families import CountsCollector
        from serve_app.monitoring.http import OutputMetrics
        from serve_app.openai.request.sampling_defaults import SamplingDefaults
        from serve_app.openai.service import CompletionService, KnownModel, ModelText
        from serve_app.openai.tokenize.worker_threads import WorkerThreads

        lines, dispatcher = settings.lines, self._routing.dispatcher
        workers = WorkerThreads(lines.num_tokenizer_threads, limits=lines.work_limits)
        forms = (lines.tool_call_parser, lines.chat_template)
        text = await asyncio.to_thread(ModelText.load, lines.model, workers, *forms)
        defaults = await asyncio.to_thread(SamplingDefaults.load, lines.model, lines.limits.generation_config)
        known = KnownModel(settings.jobs.model_names, dispatcher, context.clock.monotonic, defaults)
        self._registry.register(CountsCollector(text.grammars.metrics))
        service = CompletionService(dispatcher, known, text, lines.limits, random.Random(), ledger)
        metrics = OutputMetrics(self._registry, known.name)
        return LineRunner(service, metrics, random.Random(), context, self._tracer)

    async def call(self, name: str, arguments: dict[str, Any]) -> object:
        """Call a method of `JobsService` or `ResponsesService` for `ServeJobs`.

        It returns the answer, or the ServingError that the method raised.
        """
        if hasattr(ResponsesService, name):
            return await answer(self._runtime.responses, name, arguments)
        return await answer(self if name == "metrics" else self.service, name, arguments)

    async def metrics(self) -> JobsCounts:
        """Return the counts of all tenants' work, and this worker's router metrics."""
        from serve_app.monitoring.families import families_of_process

        process = "jobs" if self._num_workers == 1 else f"jobs-{this_replica_id()}"
        families = families_of_process(self._registry, process)
        runtime = self._runtime
        return JobsCounts(await self._own_metrics(), families, await runtime.running(), await runtime.stored())

    async def _own_metrics(self) -> tuple[Metric, ...]:
        return await self._runtime.metrics(self._webhooks.outcomes)

    async def reconfigure(self, numbers: dict[str, int]) -> None:
        """Set the number of workers, and the bounds on that of model replicas.

        Serve calls it at the start and after each change.
        """
        bounds = dict(numbers)
        self._num_workers = bounds.pop("num_jobs_workers")
        self._routing.change_bounds(ReplicaBounds(**bounds))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this process's report for `application_autoscaling_policy`; Serve calls it."""
        return self._routing.autoscaling_stats()

    async def check_health(self) -> None:
        """Raise if a loop has ended, so that Serve replaces the process."""
        self._runtime.check_health()

    async def __del__(self) -> None:
        """Stop the runtime; Serve calls it when no call is left or the time for graceful shutdown is over."""
        if hasattr(self, "_runtime"):
            await self._reporter.close()
            await self._runtime.stop()
            self._routing.close()
            await asyncio.to_thread(self._tracer.close)


def _webhook_secret(settings: JobsProcess) -> str:
    from serve_app.jobs.webhooks.signing import load_or_create_secret

    return settings.webhook_secret or load_or_create_secret(Path(settings.data_dir) / "webhook_secret")


def _webhook_sender(
    settings: JobsProcess, signer: "WebhookSigner", outbox: "Outbox", tracer: Tracer
) -> "WebhookSender":
    from serve_app.jobs.webhooks.client import WebhookClient
    from serve_app.jobs.webhooks.guard import SystemResolver, WebhookGuard
    from serve_app.jobs.webhooks.sender import WebhookSender

    guard = WebhookGuard(AllowedHosts.parse(settings.webhook_allowed_hosts), SystemResolver())
    client = WebhookClient(signer, guard, tracer=tracer)
    return WebhookSender(outbox, client.post, random.Random(), Clock())
