"""A Ray cluster to which a module deploys applications, and the load of clients."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.cli.server.private_cluster import private_ray_environment
from serve_app.config import DEMO_MODEL_NAME
from testkit.free_port import free_port
from testkit.limits import LIMIT_S, START_LIMIT_S
from testkit.serving.served import ROOT, Served, clean_environment, running, wait_for
from tests.ray.conftest import MODEL_NAME

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

    def deploy(self, config: Path) -> dict[str, Any]:
        """Deploy a config file; return Serve's record of the application once it runs or is refused."""
        before_s = self.application().get("last_deployed_time_s", 0.0)
        self.run(f"serve deploy {config}")

        def decided() -> dict[str, Any] | None:
            application = self.application()
            is_new = application["last_deployed_time_s"] > before_s
            return application if is_new and application["status"] in ("RUNNING", "DEPLOY_FAILED") else None

        return wait_for(decided, "the file is deployed or refused", START_LIMIT_S, 0.2)

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


class Load:
    """Clients that each read one short stream after another, until the load is stopped."""

    def __init__(self, url: str, num_clients: int) -> None:
        self.num_whole = 0
        self.failures: list[str] = []
        self.longest_s = 0.0
        self.texts: list[str] = []
        """Texts of the whole streams, in order of their ends."""
        self._url = url
        self._is_over = threading.Event()
        self._clients = [threading.Thread(target=self._read_all) for _ in range(num_clients)]

    def __enter__(self) -> "Load":
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for client in self._clients:
            client.join(START_LIMIT_S)

    def wait_until_running(self) -> None:
        wait_for(lambda: self.num_whole > 4, "the load runs", LIMIT_S)

    def _read_all(self) -> None:
        body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
        body["temperature"] = 0
        while not self._is_over.is_set():
            started_s = time.monotonic()
            try:
                with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=START_LIMIT_S) as response:
                    text = "".join(response.iter_text())
                if response.status_code != 200 or "data: [DONE]" not in text or '"error"' in text:
                    self.failures.append(f"{response.status_code} {text[-300:]}")
                else:
                    self.texts.append(_text_of(text))
            except httpx.TransportError as error:
                self.failures.append(repr(error))
            self.num_whole += 1
            self.longest_s = max(self.longest_s, time.monotonic() - started_s)
            time.sleep(0.1)


def _text_of(events: str) -> str:
    """Return the text of a stream."""
    chunks = [json.loads(part.removeprefix("data: ")) for part in events.split("\n\n") if part.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def local_config(tmp_path: Path, **args: Any) -> Path:
    """The repository's local.yaml with other arguments, in a file."""
    config = yaml.safe_load((CONFIGS / "local.yaml").read_text())
    config["applications"][0]["args"].update({"model": DEMO_MODEL_NAME, **args})
    path = tmp_path / "local.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
