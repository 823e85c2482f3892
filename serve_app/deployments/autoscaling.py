"""Number of replicas: autoscaling policies for Serve, each deployment's options, and the GPUs of the cluster."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

import click
import ray
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from router.scaling.ingress_load import INGRESS_LOAD
from router.scaling.ingress_reports import DESIRED_REPLICAS, MAX_REPORT_AGE_S
from serve_app.config import HeadwayConfig

_MODEL_DEPLOYMENT, _INGRESS_DEPLOYMENT = "Model", "Ingress"
_REPORT_PERIOD_S = 0.2
"""Seconds between two reports of the desired number of replicas to Serve's controller."""
_INGRESS_UPSCALE_DELAY_S = 3.0
_INGRESS_DOWNSCALE_DELAY_S = 120.0
"""Time for which fewer ingresses must be enough before one is stopped: it takes its open connections with it."""
_CURRENT_CLUSTER_FILE = Path("/tmp/ray/ray_current_cluster")
"""File with the address of the cluster that `ray start` started; a driver without an address connects to it."""


def deployment_autoscaling_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of model replicas that the ingresses ask for: the policy of the model's own deployment.

    The model replicas report what the ingresses tell them in polls. Without a recent report, as with zero replicas, the
    number stays. From zero, a waiting handle call starts the first replica.
    """
    asked = _desired_replicas([context])
    return context.target_num_replicas if asked is None else asked, {}


def application_autoscaling_policy(contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, Any]]:
    """Return the number of model replicas that the ingresses ask for, and of ingresses: the whole application's policy.

    The jobs workers keep their number. So does the model without a recent report.
    """
    asked = _desired_replicas(contexts.values())
    decisions = {}
    for key, context in contexts.items():
        if context.deployment_name == _MODEL_DEPLOYMENT and asked is not None:
            decisions[key] = asked
        elif context.deployment_name == _INGRESS_DEPLOYMENT:
            decisions[key], _ = ingress_autoscaling_policy(context)
    return decisions, {}


def ingress_autoscaling_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of ingresses whose mean load is at most 1: the policy of the ingresses' own deployment.

    An ingress that does not report, as while it starts, has the mean load of the others. Without any recent report the
    number stays.
    """
    loads = _recent(context, INGRESS_LOAD)
    if not loads:
        return context.target_num_replicas, {}
    mean = sum(loads) / len(loads)
    return max(1, ceil(mean * context.current_num_replicas)), {}


def _desired_replicas(contexts: Iterable[AutoscalingContext]) -> int | None:
    """Return the highest recent report of any replica of these deployments; None: there is no recent report."""
    return max((int(value) for context in contexts for value in _recent(context, DESIRED_REPLICAS)), default=None)


def _recent(context: AutoscalingContext, metric: str) -> list[float]:
    """Return the newest value of a metric that each replica of a deployment has reported, without old ones."""
    newest = (series[-1] for series in context.raw_metrics.get(metric, {}).values() if series)
    return [each.value for each in newest if context.current_time - each.timestamp <= MAX_REPORT_AGE_S]


def num_model_replicas(config: HeadwayConfig) -> dict[str, Any]:
    """Return the model deployment's options for its number of replicas, which is fixed or autoscaled."""
    if not config.is_autoscaled:
        return {"num_replicas": config.num_replicas}
    policy = AutoscalingPolicy(
        policy_function=f"{deployment_autoscaling_policy.__module__}:{deployment_autoscaling_policy.__name__}"
    )
    return {
        "autoscaling_config": _autoscaling_config(
            config,
            min_replicas=config.effective_min_replicas,
            max_replicas=config.effective_max_replicas,
            initial_replicas=config.num_replicas,
            policy=policy,
        )
    }


def num_ingresses(config: HeadwayConfig) -> dict[str, Any]:
    """Return the ingress deployment's options for its number of replicas, which is fixed or autoscaled."""
    if config.fewest_ingresses == config.most_ingresses:
        return num_fixed_replicas(config, config.num_ingress_replicas)
    policy = AutoscalingPolicy(
        policy_function=f"{ingress_autoscaling_policy.__module__}:{ingress_autoscaling_policy.__name__}"
    )
    autoscaling = _autoscaling_config(
        config,
        min_replicas=config.fewest_ingresses,
        max_replicas=config.most_ingresses,
        initial_replicas=config.num_ingress_replicas,
        policy=policy,
        upscale_delay_s=_INGRESS_UPSCALE_DELAY_S,
        downscale_delay_s=_INGRESS_DOWNSCALE_DELAY_S,
    )
    return {"autoscaling_config": autoscaling}


def num_fixed_replicas(config: HeadwayConfig, number: int) -> dict[str, Any]:
    """Return a fixed deployment's options; the application's policy needs an autoscaling config even for those."""
    if not config.is_autoscaled:
        return {"num_replicas": number}
    return {"autoscaling_config": _autoscaling_config(config, min_replicas=number, max_replicas=number)}


def _autoscaling_config(config: HeadwayConfig, **fields: Any) -> AutoscalingConfig:
    """Return a config, without delays unless they are given: those of the model are in the autoscaler's decision."""
    fields = {"upscale_delay_s": 0.0, "downscale_delay_s": 0.0, **fields}
    with warnings.catch_warnings():
        # Serve warns that environment variables, which apply to all applications, will replace `metrics_interval_s`.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            metrics_interval_s=_REPORT_PERIOD_S,
            look_back_period_s=2 * _REPORT_PERIOD_S,
            downscale_to_zero_delay_s=0.0,
            **fields,
        )


def with_gpus(config: HeadwayConfig) -> HeadwayConfig:
    """Return the configuration with the fields that depend on the GPUs that the cluster has now."""
    is_complete = config.num_gpus_per_replica == 0 or None not in (config.num_gpus_per_replica, config.max_replicas)
    num_gpus = 0.0 if is_complete or config.replica_options().model.device == "cpu" else _num_cluster_gpus()
    gpus_per_replica = config.num_gpus_per_replica
    if gpus_per_replica is None:
        gpus_per_replica = float(config.replica_options().model.tensor_parallel_size) if num_gpus >= 1 else 0.0
    changes: dict[str, object] = {"num_gpus_per_replica": gpus_per_replica}
    if config.max_replicas is None and gpus_per_replica > 0:
        changes["max_replicas"] = max(config.num_replicas, int(num_gpus / gpus_per_replica))
    return config.model_copy(update=changes)


def _num_cluster_gpus() -> float:
    """Return the number of GPUs in the cluster now; without one, of this machine."""
    with joined_cluster() as has_cluster:
        return ray.cluster_resources().get("GPU", 0.0) if has_cluster else _num_gpus_of_this_machine()


@contextlib.contextmanager
def joined_cluster() -> Iterator[bool]:
    """Connect to the cluster on which the application will run, within the context; yield whether there is one.

    `serve deploy` builds inside the cluster. `serve run` builds before it connects: in that case this is the cluster
    that it will use. If there is none yet, it will start one on this machine.
    """
    if ray.is_initialized():
        yield True
        return
    command = click.get_current_context(silent=True)
    address = command.params.get("address") if command is not None else None
    if address is None and not (os.environ.get("RAY_ADDRESS") or _CURRENT_CLUSTER_FILE.exists()):
        yield False
        return
    ray.init(address=address or "auto", log_to_driver=False)
    try:
        yield True
    finally:
        ray.shutdown()


def most_gpus_of_a_node() -> float:
    """Return the number of GPUs of the node that has most; without a cluster, of this machine."""
    if not ray.is_initialized():
        return _num_gpus_of_this_machine()
    return max((node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)


def _num_gpus_of_this_machine() -> float:
    import torch  # here, since the import takes seconds and is rarely needed

    return float(torch.cuda.device_count())
