"""A Ray cluster to which a module deploys applications."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.cli.server.private_cluster import private_ray_environment
from testkit.free_port import free_port
from testkit.limits import LIMIT_S, START_LIMIT_S
from testkit.serving.served import ROOT, Served, clean_environment, running, wait_for

CONFIGS = ROOT / "serve_app" / "configs"


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster with Serve started and no application."""

    served: Served
    environment: dict[str, str]

    def run(self, command: str) -> None:
        """Run a shell command as on the head node."""
        done = subprocess.run(
            ["bash", "-c", command], env=self.environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def application(self) -> dict[str, Any]:
        application: dict[str, Any] = self.served.applications().get("headway", {})
        return application

    def model_replicas(self) -> dict[str, str]:
        """State of each model replica, by id."""
        model = self.application()["deployments"].get("Model", {})  # not there while the application is built
        return {replica["replica_id"]: replica["state"] for replica in model.get("replicas", [])}

    def wait_until_running(self) -> dict[str, Any]:
        def running() -> dict[str, Any] | None:
            application = self.application()
            assert application.get("status") != "DEPLOY_FAILED", application["message"]
            return application if application.get("status") == "RUNNING" else None

        return wait_for(running, "the application runs", START_LIMIT_S, 0.2)

    def complete(self, **fields: Any) -> httpx.Response:
        response = httpx.post(
            f"{self.served.url}/v1/completions", json={"prompt": "x", "max_tokens": 2, **fields}, timeout=START_LIMIT_S
        )
        response.raise_for_status()
        return response


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("head")
    (home / "headway").symlink_to(ROOT)
    ray_environment = private_ray_environment(home)
    with running(
        "testkit.serving.gpu_cluster", [str(free_port("127.0.0.1"))], home, environment=ray_environment
    ) as served:
        path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        yield Cluster(served, {**clean_environment(home), **ray_environment, **served.ray_environment, **path})


def local_config(tmp_path: Path, **args: Any) -> Path:
    """The repository's local.yaml with other arguments, in a file."""
    config = yaml.safe_load((CONFIGS / "local.yaml").read_text())
    config["applications"][0]["args"].update(args)
    path = tmp_path / "local.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
