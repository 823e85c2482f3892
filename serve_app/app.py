"""The wiring: which deployments there are, and what each is given.

No `from __future__ import annotations` here: Serve reads the annotation of `build` at run time.
"""

import asyncio
import time
import warnings
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from replicas.errors import ReplicaLost
from replicas.protocol import EngineMetrics, GenerateRequest, ModelCard, TokenDelta
from router.held_work import MAX_REPORT_AGE_S, HeldWork, HeldWorkBoard, IngressWatch, PollAnswer
from router.serve_router import RankedRouter, obey_model_replicas
from serve_app.cluster_gpus import num_cluster_gpus
from serve_app.config import HeadwayConfig
from serve_app.jobs.access import JobsAccess
from serve_app.jobs.fsspec_store import FsspecStore
from serve_app.jobs.serve_client import ServeJobs
from serve_app.jobs.webhook_guard import SystemResolver, WebhookGuard
from serve_app.jobs_deployment import Jobs
from serve_app.metrics import HttpMetrics
from serve_app.process_setup import freeze_heap, log_through_serve
from serve_app.router_metrics import RouterCollector, RouterMetrics
from serve_app.routing import MakeFlow, Routing, late_binding_flow

if TYPE_CHECKING:
    from replicas.model_replica import LoadBackend


def build(config: HeadwayConfig) -> serve.Application:
    """The application, for `serve run serve_app.app:build key=value` and for `args:` in a config file."""
    return build_with(config)


def build_with(
    config: HeadwayConfig, load_backend: "LoadBackend | None" = None, make_flow: MakeFlow = late_binding_flow
) -> serve.Application:
    """The application over engines that run on what `load_backend` gives; None: on the model, in torch.

    `make_flow` makes the flow control of each ingress, the jobs process included.
    """
    config = _with_gpus(config)
    model = serve.deployment(
        Model,
        name="Model",
        max_ongoing_requests=config.max_ongoing_requests_per_replica,
        ray_actor_options={"num_cpus": config.cpus_per_replica, "num_gpus": config.num_gpus_per_replica},
        # A freed slot is refilled at once: Serve's own back-off of up to 0.5 s would leave it idle.
        request_router_config=RequestRouterConfig(
            request_router_class=f"{RankedRouter.__module__}.{RankedRouter.__name__}",
            initial_backoff_s=0.005,
            max_backoff_s=0.02,
        ),
        **_num_model_replicas(config),
        **_lifecycle(config),
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        max_ongoing_requests=config.max_ongoing_requests_per_ingress,
        ray_actor_options={"num_cpus": config.cpus_per_ingress},
        **_num_fixed_replicas(config, config.num_ingress_replicas),
        **_lifecycle(config),
    )
    jobs = serve.deployment(
        Jobs,
        name="Jobs",
        max_ongoing_requests=config.max_ongoing_requests_for_jobs,
        ray_actor_options={"num_cpus": config.cpus_per_jobs},
        **_num_fixed_replicas(config, 1),
        **_lifecycle(config),
    )
    served = model.bind(config, load_backend)
    return ingress.bind(config, served, jobs.bind(config, served, make_flow), make_flow)


class Model:
    """The Serve deployment around one model's engine."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: HeadwayConfig, load_backend: "LoadBackend | None" = None
    ) -> None:
        from replicas import model_replica  # brings torch: seconds that only a replica should spend

        log_through_serve()
        self._board = HeldWorkBoard(time.monotonic)
        self._ingresses = IngressWatch(max(MAX_REPORT_AGE_S, 3 * config.load_poll_period_s), time.monotonic)
        context = serve.get_replica_context()
        replica = await asyncio.to_thread(
            model_replica.ModelReplica,
            config.replica_options(),
            context.replica_id.unique_id,
            ray.get_runtime_context().get_node_id(),
            load_backend or model_replica.load_torch_backend,
        )
        self._card = replica.card
        self._engine = replica.start()
        freeze_heap()

    async def generate(
        self, request: GenerateRequest, ranking: list[str], ingress_id: str
    ) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of one request; `ranking` is for `RankedRouter`, which has obeyed it by now.

        Raises:
            ReplicaLost: the ingress is lost; should it be there after all, the request goes on elsewhere.
        """
        self._ingresses.heard_of(ingress_id)
        async with aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                if self._ingresses.is_lost(ingress_id):
                    raise ReplicaLost(f"ingress {ingress_id} is not heard of any more", has_died=False)
                yield delta

    async def exchange(self, told: HeldWork | None, ranking: Sequence[str] = ()) -> PollAnswer:
        """The present load, and what other ingresses hold; `told` is what the one that asks does.

        `ranking` is for `RankedRouter`.
        """
        if told is not None:
            self._ingresses.heard_of(told.ingress_id)
        return PollAnswer(self._engine.stats(), self._board.exchange(told))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: what `obey_model_replicas` obeys."""
        return self._board.autoscaling_stats()

    async def metrics(self) -> EngineMetrics:
        """Everything the engine counts."""
        return self._engine.metrics()

    async def describe(self) -> ModelCard:
        """What is served."""
        return self._card

    async def check_health(self) -> None:
        """Raise where the engine is dead, so that Serve replaces the replica."""
        self._engine.check_alive()

    async def __del__(self) -> None:
        """Called by Serve once no request is left or the graceful shut-down is over."""
        if hasattr(self, "_engine"):
            await self._engine.drain()
            await self._engine.stop()


class Ingress:
    """The Serve deployment around the HTTP application, which is made in the replica's own process."""

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
        """Called by Serve when the replica stops."""
        if hasattr(self, "_loops"):
            self._loops.cancel()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: what `obey_ingresses` obeys."""
        return self._routing.autoscaling_stats()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        from serve_app.ingress import Backends, create_api  # brings transformers: a second

        backends = Backends(self._routing.dispatcher, self._routing.autoscaling, self._jobs)
        api = create_api(self._config.ingress_settings(), backends, metrics=self._metrics)
        freeze_heap()
        return api


def _num_model_replicas(config: HeadwayConfig) -> dict[str, Any]:
    """How many model replicas: a number, or one that the ingresses decide."""
    if not config.is_autoscaled:
        return {"num_replicas": config.num_replicas}
    policy = AutoscalingPolicy(policy_function=f"{obey_model_replicas.__module__}:{obey_model_replicas.__name__}")
    return {
        "autoscaling_config": _autoscaling_config(
            config,
            min_replicas=config.effective_min_replicas,
            max_replicas=config.effective_max_replicas,
            initial_replicas=config.num_replicas,
            policy=policy,
        )
    }


def _num_fixed_replicas(config: HeadwayConfig, number: int) -> dict[str, Any]:
    """How many of what is not scaled: the application's policy sees only what has such a config nonetheless."""
    if not config.is_autoscaled:
        return {"num_replicas": number}
    return {"autoscaling_config": _autoscaling_config(config, min_replicas=number, max_replicas=number)}


def _autoscaling_config(config: HeadwayConfig, **fields: Any) -> AutoscalingConfig:
    """Serve obeys at once: all patience is in the decision."""
    with warnings.catch_warnings():
        # Serve announces that environment variables, which are for all applications, will replace this field.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            metrics_interval_s=config.autoscale_interval_s,
            look_back_period_s=2 * config.autoscale_interval_s,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            downscale_to_zero_delay_s=0.0,
            **fields,
        )


def _lifecycle(config: HeadwayConfig) -> dict[str, Any]:
    """Deployment options that both kinds of replica share."""
    return {
        "health_check_period_s": config.health_check_period_s,
        "health_check_timeout_s": config.health_check_timeout_s,
        "graceful_shutdown_timeout_s": config.graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": min(0.2, config.graceful_shutdown_timeout_s),
        # Each request is logged once by the ingress; Serve's access log would add a line for every poll.
        "logging_config": LoggingConfig(encoding="JSON", enable_access_log=False),
    }


def _with_gpus(config: HeadwayConfig) -> HeadwayConfig:
    """The configuration, complete in what depends on the GPUs that the cluster has now."""
    is_complete = config.num_gpus_per_replica is not None and config.max_replicas is not None
    num_gpus = 0.0 if is_complete or config.replica_options().model.device == "cpu" else num_cluster_gpus()
    each = config.num_gpus_per_replica if config.num_gpus_per_replica is not None else float(num_gpus >= 1)
    found: dict[str, object] = {"num_gpus_per_replica": each}
    if config.max_replicas is None and each > 0:
        found["max_replicas"] = max(config.num_replicas, int(num_gpus / each))
    return config.model_copy(update=found)
