"""The files that operators deploy with are what Ray and Headway take, and ask for Ray's token."""

from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from serve_app.config import HeadwayConfig
from serve_app.http.edge import MIDDLEWARE_PATH

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())
RAY_SERVICE = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text())


def serve_config(name: str) -> str:
    if name == "kuberay":
        return str(RAY_SERVICE["spec"]["serveConfigV2"])
    return (ROOT / "serve_app" / "configs" / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", ["local", "gpu", "kuberay"])
def test_serve_configs_are_valid(name: str) -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(serve_config(name)))
    [application] = schema.applications
    HeadwayConfig.model_validate(application.args)


EDGE = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARE_PATH,
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
"""Environment of every node of a cluster: its proxies have the edge of `headway serve` and are replaced as soon."""


@pytest.mark.parametrize("name", ["gpu", "kuberay"])
def test_production_has_two_ingresses_with_a_cpu_each(name: str) -> None:
    [application] = yaml.safe_load(serve_config(name))["applications"]
    config = HeadwayConfig.model_validate(application["args"])
    assert config.num_ingress_replicas >= 2 and config.cpus_per_ingress >= 1


def test_every_node_has_the_edge() -> None:
    cluster = RAY_SERVICE["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            assert {entry["name"]: entry["value"] for entry in container["env"]} == EDGE
    for command in (*CLUSTER["head_start_ray_commands"], *CLUSTER["worker_start_ray_commands"]):
        if "ray start" in command:
            assert EDGE.items() <= dict(word.split("=", 1) for word in command.split() if "=" in word).items()
    by_hand = (ROOT / "docs" / "cluster.md").read_text().partition("export ")[2].partition("```")[0]
    assert dict(word.split("=", 1) for word in by_hand.split() if "=" in word) == EDGE | {"RAY_AUTH_MODE": "token"}
    function = import_module(MIDDLEWARE_PATH.partition(":")[0])
    assert callable(getattr(function, MIDDLEWARE_PATH.partition(":")[2]))


def test_kubernetes_draws_a_token() -> None:
    cluster = RAY_SERVICE["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == version("ray")


def test_the_cluster_launcher_gives_every_node_the_token() -> None:
    assert CLUSTER["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    starts = [*CLUSTER["head_start_ray_commands"], *CLUSTER["worker_start_ray_commands"]]
    assert sum("ray start" in command for command in starts) == 2
    for command in starts:
        if "ray start" in command or "serve deploy" in command:
            assert "RAY_AUTH_MODE=token" in command
