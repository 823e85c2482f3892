"""A private Ray cluster of several raylets that serves a model: `python -m testkit.serving.raylets key=value`.

The head has the CPUs for the ingresses and the jobs process. Each worker has a fake GPU and no CPUs. So every model
replica gets its own worker, and everything else runs on the head. Arguments are `port` and the fields of
`HeadwayConfig`. The process prints one line of JSON with its addresses. It then reads commands: `add` starts a worker,
`remove NODE_ID` kills one. Each command is answered by one line. The process ends when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from serve_app.cli.private_cluster import end_processes, free_port, private_ray_environment
from serve_app.config import HeadwayConfig

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

    from replicas.model_replica import Backend
    from replicas.options import ReplicaOptions

_OBJECT_STORE_BYTES = 100 * 2**20
_PLACES = {
    "num_gpus_per_replica": 1, "cpus_per_replica": 0, "num_threads": 1, "cpus_per_ingress": 1, "cpus_per_jobs": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadOnCpu:
    """Backend loader for the real model on CPU, even on a raylet with a fake GPU."""

    def __call__(self, options: ReplicaOptions) -> Backend:
        from replicas.model_replica import load_torch_backend

        return load_torch_backend(replace(options, model=replace(options.model, device="cpu")))


def main() -> None:
    fields = dict(argument.split("=", 1) for argument in sys.argv[1:])
    port = int(fields.pop("port"))
    config = HeadwayConfig.model_validate({**_PLACES, **fields})
    # Ray prints to stdout too; answers go to the real stdout.
    with contextlib.redirect_stdout(sys.stderr), _folder() as folder, _cluster(config) as cluster:
        _serve(config, port)
        logs = folder / "t" / "ray" / "session_latest" / "logs" / "serve"
        _say({"dashboard_url": f"http://{cluster.webui_url}", "token_path": str(folder / "token"), "logs": str(logs)})
        for line in sys.stdin:
            match line.split():
                case ["add"]:
                    _say({"node_id": _add_worker(cluster)})
                case ["remove", node_id]:
                    [node] = [node for node in cluster.worker_nodes if node.node_id == node_id]
                    cluster.remove_node(node, allow_graceful=False)
                    _say({"node_id": node_id})


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Yield a folder for all files of Ray, including the one with the newest cluster's address."""
    folder = Path(tempfile.mkdtemp(prefix="hwc-", dir="/tmp"))  # short: Ray puts sockets below it
    os.environ.update(private_ray_environment(folder), RAY_TMPDIR=str(folder / "t"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _cluster(config: HeadwayConfig) -> Iterator[Cluster]:
    """Run a head and one worker per model replica; end all their processes afterwards."""
    import ray
    from ray.cluster_utils import Cluster  # reads the environment when imported

    head = {
        "num_cpus": config.num_ingress_replicas * config.cpus_per_ingress + config.cpus_per_jobs,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": True,
        "dashboard_port": free_port("127.0.0.1"),
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(config.num_replicas):
            _add_worker(cluster, wait=False)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
        yield cluster
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
        end_processes(psutil.Process().children(recursive=True))


def _add_worker(cluster: Cluster, wait: bool = True) -> str:
    node = cluster.add_node(wait=wait, num_cpus=0, num_gpus=1, object_store_memory=_OBJECT_STORE_BYTES)
    node_id: str = node.node_id
    return node_id


def _serve(config: HeadwayConfig, port: int) -> None:
    from ray import serve

    from serve_app.app import build_with

    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_with(config, LoadOnCpu()), name="headway")


def _say(answer: dict[str, str]) -> None:
    print(json.dumps(answer), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
