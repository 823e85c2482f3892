"""Autoscaling as Serve performs it: its policies, and each deployment's number of replicas."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from router.scaling.ingress_reports import DESIRED_REPLICAS, MAX_REPORT_AGE_S
from serve_app.config import HeadwayConfig

_MODEL_DEPLOYMENT = "Model"


def deployment_autoscaling_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Autoscaling policy of the model's deployment: as many replicas as the ingresses have told its replicas.

    Where nothing is known, as while there is no replica, the number stays as it is; from zero, a call that waits for
    a replica starts the first one.
    """
    asked = _desired_replicas([context])
    return context.target_num_replicas if asked is None else asked, {}


def application_autoscaling_policy(contexts: Mapping[Any, AutoscalingContext]) -> tuple[dict[Any, int], dict[Any, Any]]:
    """Autoscaling policy of the application: as many model replicas as the ingresses ask for.

    The other deployments stay as they are, and so does the model where no ingress has reported lately.
    """
    asked = _desired_replicas(contexts.values())
    models = [key for key, context in contexts.items() if context.deployment_name == _MODEL_DEPLOYMENT]
    return {} if asked is None else dict.fromkeys(models, asked), {}


def _desired_replicas(contexts: Iterable[AutoscalingContext]) -> int | None:
    """The most that any replica of any of these deployments has lately reported."""
    newest = [
        (context.current_time - series[-1].timestamp, int(series[-1].value))
        for context in contexts
        for series in context.raw_metrics.get(DESIRED_REPLICAS, {}).values()
        if series
    ]
    return max((number for age_s, number in newest if age_s <= MAX_REPORT_AGE_S), default=None)


def num_model_replicas(config: HeadwayConfig) -> dict[str, Any]:
    """How many model replicas: a number, or one that the ingresses decide."""
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


def num_fixed_replicas(config: HeadwayConfig, number: int) -> dict[str, Any]:
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
