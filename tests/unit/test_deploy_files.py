"""The files that operators deploy with are what Ray and Headway take, and ask for Ray's token."""

from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from serve_app.config import HeadwayConfig

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
