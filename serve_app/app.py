"""Wiring of the application: its deployments, their options and their arguments."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from serve_app.one_root import check_one_root

check_one_root()  # Before the imports below: with a foreign `router` they fail, and do not say why.

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from router.serve_router import RankedRouter
from serve_app.config import HeadwayConfig
from serve_app.deployments.autoscaling import (
    joined_cluster,
    num_fixed_replicas,
    num_ingresses,
    num_model_replicas,
    with_gpus,
)
from serve_app.deployments.ingress import Ingress
from serve_app.deployments.jobs import Jobs
from serve_app.deployments.model import Model
from serve_app.deployments.process import MakeFlow, late_binding_flow
from serve_app.deployments.rollout import RolloutRefused, check_rollout, refuse_spanning
from serve_app.deployments.serve_hooks import keep_version, own_version
from serve_app.preflight.fields import ConfigError, read_fields

if TYPE_CHECKING:
    from replicas.model_replica import LoadBackend

_HEALTH_CHECK_PERIOD_S = 1.0
_LAST_EVENTS_S = 5.0
"""Time of a removed ingress for the errors of the requests that have not ended in `stream_drain_s`."""


def build(args: dict[str, Any]) -> serve.Application:
    """Build the application, for `serve run headway:build key=value` and for `args:` in a config file.

    It takes the fields as they are: Serve would report a mistake in them with a traceback of pydantic.

    Raises:
        RolloutRefused: a field is wrong, or the processes could not start with a field; nothing has changed then.
    """
    try:
        config = read_fields(args)
    except ConfigError as error:
        raise RolloutRefused(str(error)) from None
    with joined_cluster() as has_cluster:
        config = with_gpus(config)
        refuse_spanning(config)
        check_rollout(config, args, has_cluster)
    return build_with(config)


def build_with(
    config: HeadwayConfig,
    load_backend: LoadBackend | None = None,
    make_flow: MakeFlow = late_binding_flow,
    access_log_socket: str | None = None,
    ray_dashboard_url: str | None = None,
) -> serve.Application:
    """Build the application with another engine backend or flow control, or for a server in the foreground.

    `load_backend` loads the backend of each engine; None: the model in torch. `make_flow` creates the flow control of
    each ingress and of each jobs worker. `access_log_socket` is the Unix socket that the ingresses of this machine send
    access lines to; None: there is none. Their pages link to `ray_dashboard_url`; None: they do not.
    """
    config = with_gpus(config)
    refuse_spanning(config)
    model = serve.deployment(
        Model,
        name="Model",
        max_ongoing_requests=config.max_ongoing_requests_per_replica,
        ray_actor_options={"num_cpus": config.cpus_per_replica, "num_gpus": config.num_gpus_per_replica},
        # Short back-off, so that a freed slot is refilled at once: Serve's default of up to 0.5 s would leave it idle.
        request_router_config=RequestRouterConfig(
            request_router_class=f"{RankedRouter.__module__}.{RankedRouter.__name__}",
            initial_backoff_s=0.005,
            max_backoff_s=0.02,
        ),
        max_surge_percent=100 if config.update == "surge" else 0,
        **num_model_replicas(config),
        **_lifecycle(config),
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        max_ongoing_requests=config.max_ongoing_requests_per_ingress,
        ray_actor_options={"num_cpus": config.cpus_per_ingress},
        user_config={"bounds": asdict(config.replica_bounds()), "stream_drain_s": config.stream_drain_s},
        # A new ingress starts beside the old one, unless Ray has to reserve CPUs for it, which may not be free.
        max_surge_percent=0 if config.cpus_per_ingress else 100,
        **num_ingresses(config),
        **_lifecycle(config) | {"graceful_shutdown_timeout_s": config.stream_drain_s + _LAST_EVENTS_S},
    )
    jobs = serve.deployment(
        Jobs,
        name="Jobs",
        max_ongoing_requests=config.max_ongoing_requests_for_jobs,
        ray_actor_options={"num_cpus": config.cpus_per_jobs},
        user_config={**asdict(config.replica_bounds()), "num_jobs_workers": config.num_jobs_workers},
        **num_fixed_replicas(config, config.num_jobs_workers),
        **_lifecycle(config),
    )
    # Each is bound to the settings that it reads, so that a change of others does not replace its processes.
    of_model, of_jobs = config.model_process(), config.jobs_process()
    of_ingress = config.ingress_process(access_log_socket, ray_dashboard_url)
    model = keep_version(model, own_version(of_model))
    jobs = keep_version(jobs, own_version(of_jobs))
    ingress = keep_version(ingress, own_version(of_ingress))
    served = model.bind(of_model, load_backend)
    return ingress.bind(of_ingress, served, jobs.bind(of_jobs, served, make_flow), make_flow)


def _lifecycle(config: HeadwayConfig) -> dict[str, Any]:
    """Return the options that all deployments share."""
    return {
        "health_check_period_s": _HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": config.health_check_timeout_s,
        "graceful_shutdown_timeout_s": config.graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": min(0.2, config.graceful_shutdown_timeout_s),
        # The ingress logs each request itself; Serve's access log would add a line for every poll.
        "logging_config": LoggingConfig(encoding="JSON", enable_access_log=False),
    }
