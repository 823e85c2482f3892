"""Number of ingresses: the deployment's options, the load that an ingress reports, and the policies."""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from router.scaling.ingress_load import INGRESS_LOAD, IngressLoadMeter
from router.scaling.ingress_reports import DESIRED_REPLICAS
from serve_app.app import build_with
from serve_app.config import HeadwayConfig
from serve_app.deployments.autoscaling import application_autoscaling_policy, ingress_autoscaling_policy

RANGE: dict[str, Any] = {"num_ingress_replicas": 2, "max_ingress_replicas": 4}


def ingress_options(**fields: Any) -> Any:
    config = HeadwayConfig.model_validate({"num_gpus_per_replica": 0.0, "max_replicas": 1, **fields})
    return build_with(config)._bound_deployment._deployment_config


def context(loads: list[float], number: int = 2, name: str = "Ingress", age_s: float = 0.0, asked: float = 0.0) -> Any:
    """Return what Serve gives a policy: one series of reports for each replica."""
    reports = {INGRESS_LOAD: dict(enumerate(loads)), DESIRED_REPLICAS: {0: asked} if asked else {}}
    raw = {
        metric: {replica: [SimpleNamespace(timestamp=100.0 - age_s, value=value)] for replica, value in each.items()}
        for metric, each in reports.items()
    }
    return SimpleNamespace(
        deployment_name=name, current_time=100.0, raw_metrics=raw, target_num_replicas=number,
        current_num_replicas=number,
    )  # fmt: skip


def test_the_number_of_ingresses_is_fixed_without_a_range():
    options = ingress_options(num_ingress_replicas=2)
    assert (options.num_replicas, options.autoscaling_config) == (2, None)


def test_a_range_of_ingresses_has_its_policy_whether_models_are_autoscaled_or_not():
    for fields in ({}, {"min_replicas": 1, "max_replicas": 3}):
        scaling = ingress_options(**RANGE, **fields).autoscaling_config
        assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (2, 2, 4)
        assert scaling.policy.policy_function.endswith(ingress_autoscaling_policy.__name__)
        assert 0 < scaling.upscale_delay_s < scaling.downscale_delay_s


def test_a_start_outside_the_range_is_refused():
    for fields in ({"num_ingress_replicas": 5, "max_ingress_replicas": 4}, {"min_ingress_replicas": 2}):
        with pytest.raises(ValidationError, match="must be from min_ingress_replicas"):
            HeadwayConfig.model_validate(fields)


@pytest.mark.parametrize(("num_streams", "cores", "load"), [(100, 0.1, 0.5), (10, 1.4, 2.0), (0, 0.0, 0.0)])
def test_the_load_is_that_of_the_scarcer_of_streams_and_processor_time(num_streams: int, cores: float, load: float):
    now = {"s": 0.0}
    meter = IngressLoadMeter(200, lambda: num_streams, lambda: now["s"], lambda: now["s"] * cores)
    for _ in range(40):
        now["s"] += 1.0
        reported = meter.load()
    assert reported == pytest.approx(load)


@pytest.mark.parametrize(("loads", "number"), [([0.5, 1.4], 2), ([1.5, 1.4], 3), ([0.2, 0.3], 1), ([1.5], 3), ([], 2)])
def test_as_many_ingresses_as_bring_the_mean_load_to_one(loads: list[float], number: int):
    assert ingress_autoscaling_policy(context(loads)) == (number, {})


def test_old_reports_do_not_count():
    assert ingress_autoscaling_policy(context([3.0, 3.0], age_s=11.0)) == (2, {})


def test_the_policy_of_the_application_decides_on_models_and_ingresses():
    contexts = {
        "ingress": context([1.5, 1.5], asked=7.0),
        "model": context([], 1, "Model"),
        "jobs": context([], 1, "Jobs"),
    }
    assert application_autoscaling_policy(contexts) == ({"ingress": 3, "model": 7}, {})
