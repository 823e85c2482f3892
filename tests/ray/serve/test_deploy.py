"""Deploying as operators do: config files, `serve deploy`, and the cluster launcher's file."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from serve_app.cli.private_cluster import end_processes, free_port, private_ray_environment
from testkit.limits import LIMIT_S, START_LIMIT_S
from testkit.serving.make_serve import ROOT, clean_environment, get_from_dashboard, wait_for
from tests.ray.serve.conftest import MODEL_NAME

CONFIGS = ROOT / "serve_app" / "configs"


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster with Serve started and no application."""

    url: str
    dashboard_url: str
    environment: dict[str, str]

    def run(self, command: str) -> None:
        """Run a shell command as on the head node."""
        done = subprocess.run(
            ["bash", "-c", command], env=self.environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def application(self) -> dict[str, Any]:
        token_path = self.environment["RAY_AUTH_TOKEN_PATH"]
        page = get_from_dashboard(self.dashboard_url, token_path, "/api/serve/applications/")
        application: dict[str, Any] = page["applications"].get("headway", {})
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
            f"{self.url}/v1/completions", json={"prompt": "x", "max_tokens": 2, **fields}, timeout=START_LIMIT_S
        )
        response.raise_for_status()
        return response


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("head")
    (home / "headway").symlink_to(ROOT)
    environment = clean_environment(home) | private_ray_environment(home)
    port = free_port("127.0.0.1")
    with open(home / "ray.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "testkit.serving.gpu_cluster", str(port)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdin is not None and process.stdout is not None
    descendants: list[psutil.Process] = []
    try:
        line = process.stdout.readline().decode().split()
        assert len(line) == 2, (home / "ray.log").read_text()
        address, dashboard_url = line
        descendants = psutil.Process(process.pid).children(recursive=True)
        environment.update(
            RAY_ADDRESS=address,
            RAY_DASHBOARD_ADDRESS=dashboard_url,
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        )
        yield Cluster(f"http://127.0.0.1:{port}", dashboard_url, environment)
    finally:
        process.stdin.close()
        process.wait(LIMIT_S)
        end_processes(descendants)


def local_config(tmp_path: Path, **args: Any) -> Path:
    """The repository's local.yaml with other arguments, in a file."""
    config = yaml.safe_load((CONFIGS / "local.yaml").read_text())
    config["applications"][0]["args"].update(args)
    path = tmp_path / "local.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_config_file_deploys_and_a_redeployment_lets_streams_finish(cluster, checkpoint, tmp_path):
    arguments = {
        "model": str(checkpoint),
        "dtype": "float32",
        "kv_cache_bytes": "64MiB",
        "graceful_shutdown_timeout_s": START_LIMIT_S,
    }
    cluster.run(f"serve deploy {local_config(tmp_path, **arguments)}")
    cluster.wait_until_running()
    first = cluster.complete(model=MODEL_NAME).headers["x-model-replica"]
    assert cluster.model_replicas() == {first: "RUNNING"}

    lines: list[str] = []
    started = threading.Event()

    def read_a_long_stream() -> None:
        body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 6000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=START_LIMIT_S) as response:
            for line in response.iter_lines():
                lines.append(line)
                started.set()

    reader = threading.Thread(target=read_a_long_stream)
    reader.start()
    assert started.wait(LIMIT_S)
    cluster.run(f"serve deploy {local_config(tmp_path, **arguments, max_num_seqs=8)}")
    wait_for(
        lambda: (states := cluster.model_replicas()) and states.get(first) != "RUNNING",
        "the old replica is told to stop",
    )
    assert reader.is_alive()
    second = wait_for(lambda: _serving_replica(cluster), "a new replica serves", START_LIMIT_S)
    assert second != first
    reader.join(START_LIMIT_S)
    assert not reader.is_alive()
    assert lines[-2:] == ["data: [DONE]", ""]
    assert not any('"error"' in line for line in lines)


def _serving_replica(cluster) -> str | None:
    """Which replica answers; None while the new ingress knows of none yet, and says so (503)."""
    try:
        return str(cluster.complete(model=MODEL_NAME).headers["x-model-replica"])
    except httpx.HTTPStatusError as error:
        if error.response.json()["error"]["code"] not in ("model_loading", "no_ready_replica"):
            raise
        return None


def test_the_cluster_file_is_valid_and_its_command_deploys(cluster):
    config = prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text()))
    validate_config(config)
    assert config["available_node_types"]["gpu_worker"]["min_workers"] == 0
    assert config["available_node_types"]["gpu_worker"]["max_workers"] >= 1
    if not (ROOT / "replicas" / "demo" / "config.json").exists():
        pytest.skip("the demo model is not there")
    cluster.run(config["head_start_ray_commands"][-1])
    wait_for(
        lambda: cluster.application().get("deployed_app_config", {}).get("args", {}).get("max_num_seqs") == 128,
        "the command's configuration has arrived",
    )
    cluster.wait_until_running()
    served = wait_for(
        lambda: httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"] == "headway-demo", "the demo is served"
    )
    assert served
    reply = cluster.complete(model="headway-demo", prompt="Return the", max_tokens=5)
    assert reply.json()["usage"]["completion_tokens"] >= 1
