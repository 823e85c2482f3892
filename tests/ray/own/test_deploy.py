"""Deploying as operators do: config files, `serve deploy`, and the cluster launcher's file."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from testkit.limits import LIMIT_S, START_LIMIT_S
from testkit.model.broken_checkpoints import DAMAGES
from testkit.model.tiny_checkpoints import write_checkpoint
from testkit.serving.served import ROOT, end_processes, wait_for
from tests.ray.conftest import MODEL_NAME
from tests.ray.own.conftest import Load, local_config

pytestmark = pytest.mark.rotated


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


@pytest.fixture(scope="module")
def fields(checkpoint, tmp_path_factory) -> dict[str, Any]:
    """Arguments of the application. To deploy them again, after another test, takes no time."""
    return {
        "model": str(checkpoint), "served_model_name": MODEL_NAME, "dtype": "float32", "kv_cache_bytes": "64MiB",
        "num_replicas": 2, "data_dir": str(tmp_path_factory.mktemp("data")), "cpus_per_replica": 1,
        "graceful_shutdown_timeout_s": START_LIMIT_S,
    }  # fmt: skip


def test_redeploying_a_config_file_lets_streams_finish(cluster, fields, tmp_path):
    cluster.run(f"serve deploy {local_config(tmp_path, **{**fields, 'num_replicas': 1, 'max_num_seqs': 8})}")
    cluster.wait_until_running()
    first = cluster.complete(model=MODEL_NAME).headers["x-model-replica"]
    assert cluster.model_replicas() == {first: "RUNNING"}

    streams = [LongStream(cluster.served.url)]
    wait_for(lambda: streams[0].lines, "the stream begins", LIMIT_S)
    deploying = threading.Thread(target=cluster.run, args=(f"serve deploy {local_config(tmp_path, **fields)}",))
    deploying.start()

    def is_stopping() -> bool:
        # A fast machine ends a stream in seconds. Two that did not begin together leave one open at any time.
        if time.monotonic() - streams[-1].started_s > 2 and sum(stream.is_alive() for stream in streams) < 2:
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


REFUSED_MODELS = {
    "missing shard": "there is no model-00002-of-00002.safetensors",
    "truncated weights": "is truncated or damaged",
    "unknown architecture": "`nonesuch`",
    "too little memory": "GiB of memory are free",
}
"""Damages of a checkpoint, and a part of the refusal."""


@pytest.mark.parametrize("is_every", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["two", "every one"])
def test_a_refused_file_changes_nothing(cluster, fields, tmp_path, is_every):
    """No request fails, the reason is in Serve's record in one line, and a replica killed afterwards is replaced."""
    assert cluster.deploy(local_config(tmp_path, **fields))["status"] == "RUNNING"
    replicas = wait_for(lambda: _all_replicas(cluster), "both replicas are known", START_LIMIT_S)
    unreadable, not_a_folder = tmp_path / "keys.yaml", tmp_path / "file"
    unreadable.write_text("not: [a mapping")
    not_a_folder.touch()
    refused: list[tuple[dict[str, Any], list[str]]] = [
        ({"max_num_sequences": 4}, ["there is no field max_num_sequences; did you mean max_num_seqs?"]),
        ({"max_model_len": 99999}, ["model: max_model_len is 99999; the model serves at most 32768 tokens"]),
        ({"update": "surge", "cpus_per_replica": 7}, ["update: surge starts replicas beside the running ones"]),
        (
            {"model": "/no/model", "api_key_file": str(unreadable), "data_dir": str(not_a_folder)},
            [
                "model: there is no directory /no/model; ",
                f"api_key_file: {unreadable} is not YAML",
                f"data_dir: {not_a_folder} is a file, not a folder",
            ],
        ),
    ]
    for damage, reason in REFUSED_MODELS.items():
        model = write_checkpoint(tmp_path / damage)
        DAMAGES[damage].apply(model)
        refused.append(({"model": str(model)}, [reason]))
    with Load(cluster.served.url, 1) as load:
        load.wait_until_running()
        for changes, reasons in refused if is_every else refused[3:5]:
            application = cluster.deploy(local_config(tmp_path, **{**fields, **changes}))
            _, *lines = application["message"].splitlines()  # The first one is Serve's: that the application failed.
            assert application["status"] == "DEPLOY_FAILED" and len(lines) == 1, application["message"]
            assert all(reason in lines[0] for reason in reasons), lines
            assert _all_replicas(cluster) == replicas
        os.kill(cluster.served.replicas()[0]["pid"], signal.SIGKILL)
        wait_for(lambda: _all_replicas(cluster) not in (None, replicas), "the killed one is replaced", START_LIMIT_S)
        assert cluster.deploy(local_config(tmp_path, **fields))["status"] == "RUNNING"
    assert not load.failures, load.failures[:3]


def _all_replicas(cluster) -> set[str] | None:
    """Return the ids of both replicas; None while the ingress does not know two."""
    replicas = {replica["replica_id"] for replica in cluster.served.replicas()}
    return replicas if len(replicas) == 2 else None


JOIN = """
import sys
from ray._private.node import Node
from ray._private.parameter import RayParams
options = RayParams(gcs_address=sys.argv[1], node_ip_address="127.0.0.1", num_cpus=1, object_store_memory=2**27)
node = Node(options, head=False)
sys.stdin.read()
"""
"""Program of a second node. `ray start` joins no cluster that is on loopback alone."""


@pytest.mark.deep
def test_a_path_that_one_node_lacks_is_refused_with_the_node(cluster, checkpoint, tmp_path):
    own_mounts = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*own_mounts, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this system does not let a process have mounts of its own")
    fields: dict[str, Any] = {"num_replicas": 1, "data_dir": str(tmp_path / "data")}
    assert cluster.deploy(local_config(tmp_path, **fields))["status"] == "RUNNING"
    hidden = tmp_path / "hidden"
    model = write_checkpoint(hidden / "model")
    command = f"mount -t tmpfs none {hidden} && exec {sys.executable} -c '{JOIN}' $RAY_ADDRESS"
    raylet = subprocess.Popen([*own_mounts, command], env=cluster.environment, stdin=subprocess.PIPE)
    processes = [psutil.Process(raylet.pid)]
    try:
        wait_for(lambda: _num_nodes(cluster) == 2, "the second node is there", START_LIMIT_S)
        processes += processes[0].children(recursive=True)
        message = cluster.deploy(local_config(tmp_path, **fields, model=str(model)))["message"]
        assert re.search(rf"model: there is no directory {model} \(on node \w{{8}} at [\d.]+\)$", message), message
        assert cluster.complete(model="headway-demo").is_success
    finally:
        end_processes(processes)
        raylet.wait(LIMIT_S)
    assert cluster.deploy(local_config(tmp_path, **fields))["status"] == "RUNNING"


def _num_nodes(cluster) -> int:
    token = Path(cluster.served.places["token_path"]).read_text()
    page = httpx.get(f"{cluster.served.dashboard_url}/nodes?view=summary", headers={"authorization": f"Bearer {token}"})
    return sum(node["raylet"]["state"] == "ALIVE" for node in page.json()["data"]["summary"])


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
def test_the_command_of_the_cluster_file_deploys(cluster, cluster_file, tmp_path):
    command, file = cluster_file["head_start_ray_commands"][-1], "serve_app/configs/gpu.yaml"
    assert file in command
    # The file's own model is on the hub, which cannot be reached here.
    own = yaml.safe_load((ROOT / file).read_text())["applications"][0]["args"]["model"]
    (tmp_path / "gpu.yaml").write_text((ROOT / file).read_text().replace(own, "headway-demo"))
    cluster.run(command.replace(file, str(tmp_path / "gpu.yaml")))
    wait_for(
        lambda: cluster.application().get("deployed_app_config", {}).get("args", {}).get("max_num_seqs") == 128,
        "the command's configuration has arrived",
    )
    cluster.wait_until_running()
    models_url = f"{cluster.served.url}/v1/models"
    wait_for(lambda: httpx.get(models_url).json()["data"][0]["id"] == "headway-demo", "the demo is served")
    reply = cluster.complete(model="headway-demo", prompt="Return the", max_tokens=5)
    assert reply.json()["usage"]["completion_tokens"] >= 1
