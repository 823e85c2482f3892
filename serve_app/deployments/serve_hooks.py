"""Hooks into Serve 2.60, for what it has no setting: versions of single deployments, and its gRPC servers.

The last functions read what Serve and Ray know and tell through no public function.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from pydantic_core import to_json
from ray import serve
from ray.serve._private import replica as serve_replica
from ray.serve.context import _get_global_client

from replicas.errors import is_cancelled
from serve_app.settings.processes import IngressProcess, JobsProcess, ModelProcess

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("serve_app", "router", "replicas")


@dataclass(frozen=True, slots=True)
class Deployed:
    """Deployment that runs now."""

    version: str | None
    resources: Mapping[str, float]
    """Amounts of CPUs and GPUs that Ray reserves for each replica."""
    processes: tuple[tuple[str, int], ...]
    """Running replicas: node's id and process id of each."""


def own_version(settings: ModelProcess | IngressProcess | JobsProcess) -> str:
    """Return a version that changes with the settings of a process, the code and the runtime environment."""
    digest = hashlib.blake2b(digest_size=16)
    for package in _PACKAGES:
        for source in sorted((_ROOT / package).rglob("*.py")):
            digest.update(source.read_bytes())
    if ray.is_initialized():
        digest.update(repr(sorted(ray.get_runtime_context().runtime_env.items(), key=str)).encode())
    digest.update(to_json(settings))
    return digest.hexdigest()


def keep_version(deployment: serve.Deployment, version: str) -> serve.Deployment:
    """Have Serve compare this version of the deployment with the running one; return the deployment.

    `serve deploy` of Serve 2.60 gives all deployments of an application one version: a digest of all its arguments. So
    a change of any argument would replace every process. There is no public setting for it. Serve assigns its version
    to the deployment's configuration, which here keeps its own.
    """
    config: Any = deployment._deployment_config

    class OwnVersion(type(config)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, version if name == "version" else value)

    config.__class__ = OwnVersion
    return deployment


def listen_on_loopback() -> None:
    """Have Serve open the gRPC server of this process on the node's address, if that is a loopback address.

    Serve opens it on all addresses, for calls from other deployments. On a private cluster every node is on loopback,
    and nobody else has to reach it. Call it in the constructor of a deployment: Serve opens the server after it.

    Raises:
        AttributeError: Serve no longer opens its server through the function that is replaced here.
    """
    address = ray.util.get_node_ip_address()
    if ipaddress.ip_address(address).is_loopback:
        serve_replica.add_port_to_grpc_server = on_address(address, serve_replica.add_port_to_grpc_server)


def on_removal(notice: Callable[[], None]) -> None:
    """Have Serve call `notice` when it begins to stop this process gracefully, on an event loop of its own.

    Serve tells a process of its end by `__del__`, which it calls after the last request.

    Raises:
        AttributeError: Serve no longer stops its processes through the method that is replaced here.
    """
    stop = serve_replica.Replica.perform_graceful_shutdown

    async def stop_noticed(replica: serve_replica.Replica) -> None:
        notice()
        await stop(replica)

    serve_replica.Replica.perform_graceful_shutdown = stop_noticed


def free_cancelled_streams() -> None:
    """Have Serve end a streamed call that is cancelled without a message.

    Serve sends the cancellation as a last message, which nobody reads. gRPC (1.85) never frees a message that is sent
    in a call that was cancelled: 272 bytes, which also keep a page of the heap. Call it in the constructor of a
    deployment: Serve makes its gRPC server after it.

    Raises:
        AttributeError: Serve no longer serves streams through the methods that are replaced here.
    """
    for name in ("HandleRequestStreaming", "HandleRequestWithRejectionStreaming"):
        setattr(serve_replica.Replica, name, until_cancelled(getattr(serve_replica.Replica, name)))


def until_cancelled(stream: Callable[..., AsyncGenerator[Any]]) -> Callable[..., AsyncGenerator[Any]]:
    """Return a handler of streamed calls that sends what `stream` sends, but no error of a call that was cancelled."""

    async def messages(*args: Any) -> AsyncGenerator[Any]:
        async with aclosing(stream(*args)) as sent:
            async for message in sent:
                if message.is_error and is_cancelled():
                    raise asyncio.CancelledError
                yield message

    return messages


def on_address(address: str, add_port: Any) -> Any:
    """Return Serve's function that gives a server a port, for this address in place of all."""
    host = f"[{address}]" if ":" in address else address

    def add_port_on_address(server: Any, everywhere: str) -> int:
        port: int = add_port(server, f"{host}:{everywhere.rpartition(':')[2]}")
        return port

    return add_port_on_address


def applications() -> dict[str, dict[str, Any]]:
    """Return Serve's records of the applications on the cluster, by name; none if Serve does not run."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {}
    records: dict[str, dict[str, Any]] = client.get_serve_details()["applications"]
    return {name: record for name, record in records.items() if record["status"] != "DELETING"}


def deployed(deployment: str) -> dict[str, Deployed]:
    """Return what runs of the deployments with this name, by application.

    Serve's records of applications lack it from the moment at which it begins to build one.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {}
    controller = client._controller
    found = {}
    for deployment_id, (info, _) in ray.get(controller.list_deployments_internal.remote()).items():
        if deployment_id.name == deployment:
            name = deployment_id.app_name
            replicas = ray.get(controller._get_running_replica_details_for_deployment.remote(name, deployment))
            options = info.replica_config.ray_actor_options
            reserved = {"CPU": options.get("num_cpus") or 0.0, "GPU": options.get("num_gpus") or 0.0}
            processes = tuple((replica.node_id, replica.pid) for replica in replicas if replica.pid is not None)
            found[name] = Deployed(info.version, reserved, processes)
    return found


def free_resources() -> dict[str, dict[str, float]]:
    """Return the resources of each node that nothing has reserved now, by the node's id."""
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return free


def has_node_autoscaler() -> bool:
    """Return True if Ray's autoscaler can add nodes to the cluster."""
    cluster = ray._private.state.state.get_cluster_config()
    return cluster is not None and any(group.max_count > 0 for group in cluster.node_group_configs)
