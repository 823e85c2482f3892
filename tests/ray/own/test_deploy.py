"""Deploying as operators do: config files, `serve deploy`, and the cluster launcher's file."""

import threading
import time
from typing import Any

import httpx
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from testkit.limits import LIMIT_S, START_LIMIT_S
from testkit.serving.served import ROOT, wait_for
from tests.ray.conftest import MODEL_NAME
from tests.ray.own.conftest import local_config


class LongStream(threading.Thread):
    """A client that reads a stream of 9,000 tokens."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.started_s = time.monotonic()
        self._url = url
        self.start()

    def run(self) -> None:
        body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 9000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=START_LIMIT_S) as response:
            self.lines.extend(response.iter_lines())


def test_redeploying_a_config_file_lets_streams_finish(cluster, checkpoint, tmp_path):
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

    streams = [LongStream(cluster.served.url)]
    wait_for(lambda: streams[0].lines, "the stream begins", LIMIT_S)
    deploying = threading.Thread(
        target=cluster.run, args=(f"serve deploy {local_config(tmp_path, **arguments, max_num_seqs=8)}",)
    )
    deploying.start()

    def is_stopping() -> bool:
        # A fast machine ends a stream in seconds. A new one every two seconds leaves one open at any time.
        if time.monotonic() - streams[-1].started_s > 2:
            streams.append(LongStream(cluster.served.url))
        states = cluster.model_replicas()
        return bool(states) and states.get(first) != "RUNNING"

    wait_for(is_stopping, "the old replica is stopping", START_LIMIT_S)
    assert any(stream.is_alive() for stream in streams)
    second = wait_for(lambda: _serving_replica(cluster), "a new replica serves", START_LIMIT_S)
    assert second != first
    for stream in streams:
        stream.join(START_LIMIT_S)
        assert not stream.is_alive()
        assert stream.lines[-2:] == ["data: [DONE]", ""]
        assert not any('"error"' in line for line in stream.lines)
    deploying.join(LIMIT_S)


def _serving_replica(cluster) -> str | None:
    """Return the replica that answers; None while the new ingress knows of none and answers 503."""
    try:
        return str(cluster.complete(model=MODEL_NAME).headers["x-model-replica"])
    except httpx.HTTPStatusError as error:
        if error.response.json()["error"]["code"] not in ("model_loading", "no_ready_replica"):
            raise
        return None


@pytest.fixture
def cluster_file() -> dict[str, Any]:
    config: dict[str, Any] = prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text()))
    return config


def test_the_cluster_file_is_valid(cluster_file):
    validate_config(cluster_file)
    assert cluster_file["available_node_types"]["gpu_worker"]["min_workers"] == 0
    assert cluster_file["available_node_types"]["gpu_worker"]["max_workers"] >= 1


@pytest.mark.deep
def test_the_command_of_the_cluster_file_deploys(cluster, cluster_file):
    if not (ROOT / "replicas" / "demo" / "config.json").exists():
        pytest.skip("the demo model is not there")
    cluster.run(cluster_file["head_start_ray_commands"][-1])
    wait_for(
        lambda: cluster.application().get("deployed_app_config", {}).get("args", {}).get("max_num_seqs") == 128,
        "the command's configuration has arrived",
    )
    cluster.wait_until_running()
    models_url = f"{cluster.served.url}/v1/models"
    wait_for(lambda: httpx.get(models_url).json()["data"][0]["id"] == "headway-demo", "the demo is served")
    reply = cluster.complete(model="headway-demo", prompt="Return the", max_tokens=5)
    assert reply.json()["usage"]["completion_tokens"] >= 1
