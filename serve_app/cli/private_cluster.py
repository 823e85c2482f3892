"""A Ray cluster of one process tree on this machine, which ends with the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil
import tenacity

from replicas.cpu_sharing import do_not_interrupt_others

_OBJECT_STORE_BYTES = 256 * 2**20
_STARTS = 3
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray runs its workers at nice 15: whatever else this machine does would go before requests.
    "RAY_worker_niceness": "0",
}
"""For any cluster of Ray's that is private to one machine."""
_ENVIRONMENT = {
    **RAY_ENVIRONMENT,
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
    """Where a running private cluster is reached."""

    address: str
    dashboard_url: str


@contextlib.contextmanager
def private_cluster(num_cpus: int, throughput_profile: bool) -> Iterator[PrivateCluster]:
    """Start Ray for this process alone: own ports, own folder, nothing shared with other clusters.

    On leaving, every process that descends from this one is gone, and so is the folder. Ray's
    daemons also end when this process is killed outright.
    """
    _adopt_orphans()
    # Short: Ray and HAProxy keep sockets below it (HAProxy's in a folder with a name of 64 characters),
    # and HAProxy takes no socket path longer than 97.
    folder = tempfile.mkdtemp(prefix="hw-", dir="/tmp" if os.path.isdir("/tmp") else None)
    os.environ.update(_ENVIRONMENT)
    if throughput_profile:
        os.environ.update(_throughput_environment(folder))
    for variable in ("RAY_ADDRESS", "RAY_DASHBOARD_ADDRESS"):
        os.environ.pop(variable, None)
    do_not_interrupt_others()
    try:
        yield _start_ray(num_cpus, folder)
    finally:
        _stop_ray()
        shutil.rmtree(folder, ignore_errors=True)


@tenacity.retry(stop=tenacity.stop_after_attempt(_STARTS), before_sleep=lambda _: _stop_ray(), reraise=True)
def _start_ray(num_cpus: int, folder: str) -> PrivateCluster:
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
        _temp_dir=folder,
    )
    return PrivateCluster(context.address_info["gcs_address"], f"http://{context.dashboard_url}")


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


def _adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can be lost."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _haproxy_connections() -> int:
    """As many connections as the limit on open files allows HAProxy, which needs 2.5 for each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 16384 if hard == resource.RLIM_INFINITY else min(16384, hard // 3)


def _throughput_environment(folder: str) -> Mapping[str, str]:
    """HAProxy in front and one event loop per replica; HAProxy's fixed ports and files made our own."""
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Lines of log that are written at once. With 1,000, as it would be, an ingress stands still for a tenth of a
        # second every few hundred requests, and whoever kills it loses them.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "10",
        # How long a replica that stops goes on listening; HAProxy has forgotten it within a second (default 30 s).
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        "RAY_SERVE_HAPROXY_MAXCONN": str(_haproxy_connections()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port("")),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port("")),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": os.path.join(folder, "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": os.path.join(folder, "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": os.path.join(folder, "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": os.path.join(folder, "server-state"),
    }
