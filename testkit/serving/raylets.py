"""Headway on several raylets of a private Ray cluster, and a test process's view of it.

`python -m testkit.serving.raylets key=value` runs the cluster. The head has the CPUs for the ingresses and the jobs
process. Each worker has a fake GPU and no CPUs. So every model replica gets its own worker, and everything else runs
on the head. Arguments are `port` and the fields of `HeadwayConfig`. The process prints one line of JSON with its
addresses. It then reads commands: `add` starts a worker, `remove NODE_ID` kills one, `gcs SECONDS` kills Ray's gcs and
starts it again after that time, with the state that it has kept in Redis (`RAY_REDIS_ADDRESS`). Each command is
answered by one line. `serving` runs this program.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from serve_app.cli.server.private_cluster import SERVE_ENVIRONMENT, kill_processes, private_ray_environment
from serve_app.config import HeadwayConfig
from testkit.engine.faulty_runner import FaultyRunner
from testkit.free_port import free_port
from testkit.serving.served import Served, running, wait_for
from testkit.serving.streams import Clients, Stream

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

    from replicas.model_replica import Backend
    from replicas.options import ReplicaOptions

_OBJECT_STORE_BYTES = 100 * 2**20
_PLACES = {
    "num_gpus_per_replica": 1, "cpus_per_replica": 0, "num_threads": 1, "cpus_per_ingress": 1, "cpus_per_jobs": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Raylets:
    """Running application, and its raylets."""

    app: Served

    def replicas(self) -> list[dict[str, Any]]:
        """Return an ingress's view of the model replicas; none if no ingress answers at the moment."""
        with contextlib.suppress(httpx.HTTPError):
            return self.app.replicas()
        return []

    def num_running(self) -> dict[str, int]:
        """Return the number of running sequences by replica."""
        return {replica["replica_id"]: replica["num_running"] for replica in self.replicas()}

    def node_of(self, replica_id: str) -> str:
        """Return the raylet of a model replica."""
        replicas = self.app.deployment("Model")["replicas"]
        [node_id] = [replica["node_id"] for replica in replicas if replica["replica_id"] == replica_id]
        return str(node_id)

    def ingress_pids(self) -> dict[str, int]:
        """Return the process id of every running ingress, by replica id."""
        return {
            replica["replica_id"]: replica["pid"]
            for replica in self.app.deployment("Ingress")["replicas"]
            if replica["state"] == "RUNNING"
        }

    def ingress_of(self, stream: Stream) -> str:
        """Return the ingress that received a request, according to its log."""
        return wait_for(lambda: self._find_started(stream.request_id), f"{stream.request_id} has come to an ingress")

    def open_in_turn(self, clients: Clients, bodies: Iterable[dict[str, Any]]) -> list[Stream]:
        """Open requests one by one, each after an ingress has received the one before: the proxy then spreads them."""
        streams: list[Stream] = []
        for body in bodies:
            streams.append(clients.open(body))
            self.ingress_of(streams[-1])
        return streams

    def open_at(self, clients: Clients, ingress_id: str, body: dict[str, Any]) -> tuple[Stream, list[Stream]]:
        """Open requests until one reaches this ingress; return it and the earlier ones, at other ingresses.

        The proxy prefers the ingress with fewer open requests. So use a long body, unless another ingress already
        has an open request. The proxy hears of a new ingress some time after it runs: tries go on for a while.
        """
        others: list[Stream] = []

        def open_one() -> Stream | None:
            stream = clients.open(body)
            if self.ingress_of(stream) == ingress_id:
                return stream
            others.append(stream)
            return None

        return wait_for(open_one, f"a request comes to ingress {ingress_id}", period_s=0.1), others

    def wait_until_idle(self) -> None:
        """Return when nothing runs and every block is free."""

        def is_idle() -> bool:
            replicas = self.replicas()
            return bool(replicas) and all(
                replica["num_running"] + replica["num_waiting"] + replica["num_in_flight"] == 0
                and replica["num_free_blocks"] == replica["num_blocks"]
                for replica in replicas
            )

        wait_for(is_idle, "every replica is idle")

    def add_worker(self) -> str:
        """Add a raylet with room for one model replica; return its id."""
        return self.app.ask("add")["node_id"]

    def kill_worker(self, node_id: str) -> None:
        """Kill a raylet with all its processes."""
        self.app.ask(f"remove {node_id}")

    def kill_gcs(self, down_s: float) -> None:
        """Kill Ray's gcs, and start it again after this time."""
        self.app.ask(f"gcs {down_s}")

    def _find_started(self, request_id: str) -> str | None:
        for log in Path(self.app.places["logs"]).glob("replica_*_Ingress_*.log"):
            for line in log.read_text().splitlines():
                if request_id in line and (entry := json.loads(line))["message"] == "request started":
                    return str(entry["replica"])
        return None


@contextlib.contextmanager
def serving(home: Path, environment: Mapping[str, str] | None = None, **fields: object) -> Iterator[Raylets]:
    """Serve the application with these fields of its configuration; end all its processes afterwards.

    `environment` is that of all its processes, on top of a clean one.
    """
    arguments = [f"{name}={value}" for name, value in {"port": free_port("127.0.0.1"), **fields}.items()]
    with running("testkit.serving.raylets", arguments, home, environment=environment) as app:
        yield Raylets(app)


@dataclass(frozen=True, slots=True)
class LoadOnCpu:
    """Backend loader for the real model on CPU, even on a raylet with a fake GPU. Its device may fail."""

    def __call__(self, options: ReplicaOptions) -> Backend:
        from replicas.model_replica import load_torch_backend

        backend = load_torch_backend(replace(options, model=replace(options.model, device="cpu")))
        return replace(backend, runner=FaultyRunner(backend.runner))


def main() -> None:
    fields = dict(argument.split("=", 1) for argument in sys.argv[1:])
    port = int(fields.pop("port"))
    config = HeadwayConfig.model_validate({**_PLACES, **fields})
    # Ray prints to stdout too; answers go to the real stdout.
    with contextlib.redirect_stdout(sys.stderr), _folder() as folder, _cluster(config) as cluster:
        _serve(config, port)
        logs = folder / "t" / "ray" / "session_latest" / "logs" / "serve"
        addresses = {"url": f"http://127.0.0.1:{port}", "dashboard_url": f"http://{cluster.webui_url}"}
        _say({**addresses, "token_path": str(folder / "token"), "logs": str(logs)})
        for line in sys.stdin:
            match line.split():
                case ["add"]:
                    _say({"node_id": _add_worker(cluster)})
                case ["remove", node_id]:
                    [node] = [node for node in cluster.worker_nodes if node.node_id == node_id]
                    cluster.remove_node(node, allow_graceful=False)
                    _say({"node_id": node_id})
                case ["gcs", down_s]:
                    cluster.head_node.kill_gcs_server()
                    time.sleep(float(down_s))
                    cluster.head_node.start_gcs_server()
                    _say({"down_s": down_s})


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Yield a folder for all files of Ray, including the one with the newest cluster's address."""
    folder = Path(tempfile.mkdtemp(prefix="hwc-", dir="/tmp"))  # short: Ray puts sockets below it
    os.environ.update(private_ray_environment(folder) | SERVE_ENVIRONMENT, RAY_TMPDIR=str(folder / "t"))
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
        "num_cpus": config.most_ingresses * config.cpus_per_ingress + config.num_jobs_workers * config.cpus_per_jobs,
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
        kill_processes(psutil.Process().children(recursive=True))  # Ray's own shutdown waits for each of them in turn.


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
