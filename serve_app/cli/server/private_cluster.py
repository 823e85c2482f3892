"""Private Ray cluster: one process tree on this machine, which ends with the process that started it.

Only its owner can use it: its ports are on loopback, and Ray requires a token, which is in a file of the owner.
docs/security.md lists every port.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import tenacity

from replicas.child_processes import Stalled, start_timeout_s
from replicas.timing.cpu_scheduling import use_batch_scheduling
from serve_app.cli.server.haproxy import haproxy_environment
from serve_app.cli.server.ports import LOOPBACK, Address, PortBlock, port_block
from serve_app.config import STREAM_DRAIN_S
from serve_app.http.edge import CONNECTIONS_VARIABLE, MIDDLEWARE_PATH

_PROXY_ANSWER_S = 5
_OBJECT_STORE_BYTES = 256 * 2**20
_STARTS = 3
_NODE_PERIOD_S = 0.25
_KILL_LIMIT_S = 5.0
MAX_CONNECTIONS_PER_ADDRESS = 1024
SERVE_ENVIRONMENT = {
    # A model that cannot be loaded is a mistake of the user: report it at once instead of after three attempts.
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
    # At their default of ten times a second these two loops take 5 % of a core, which the model can use.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_raylet_report_resources_period_milliseconds": "500",
    # Threads share two of glibc's heaps. By default there are eight for each processor, and each keeps the pages in
    # which any block is left.
    "MALLOC_ARENA_MAX": "2",
    # Ray passes the metrics of Serve on every 10 s. By default each process sets them ten times a second.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARE_PATH,
    # The controller replaces a proxy that has failed three health checks. It begins one in a turn of its loop and sees
    # the result in a later one. At Serve's default of 10 s between two, a killed proxy would leave the port closed for
    # half a minute.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.25",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(_PROXY_ANSWER_S),
    # One event loop in each process, and calls between processes by gRPC: a chunk of a stream passes two threads and a
    # task of Ray less on its way.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # Serve joins all parts of an answer that wait for a slow client into one message. By default a message of more than
    # 4 MiB ends the request. This is the most that gRPC allows.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
    # A replica that has failed three health checks is killed. By default it first has `graceful_shutdown_timeout_s` to
    # end its streams; one that hangs cannot, and its replacement waits for its CPUs and GPU.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
"""Environment in which Serve repairs itself within seconds, and has Headway's edge."""
_OWN_VARIABLES = re.compile("RAY_(?:[a-z]|PROMETHEUS_|GRAFANA_|METRICS_|DEDUP_LOGS)")
"""Variables of the surrounding shell that count: Ray's own configuration, and where metrics and lines go."""
_LONGEST_TEMPORARY_PATH = 64
"""Most characters of the folder for temporary files: Ray's dashboard keeps sockets below it."""
_DAEMONS = ("gcs_server", "raylet")
_PR_SET_CHILD_SUBREAPER = 36
_NUM_LAST_LINES = 20


class DaemonEnded(Exception):
    """End of a daemon of Ray during a start."""


@dataclass(frozen=True, slots=True)
class StartLimits:
    """Limits of a start, seconds, which are as many times longer as this machine has shown itself to be slower."""

    slowness: float = 1.0

    @property
    def stall_s(self) -> float:
        """Longest time without progress."""
        return start_timeout_s() * self.slowness

    def environment(self) -> dict[str, str]:
        """Return Ray's and Serve's own limits of a start."""
        stall_s = str(math.ceil(self.stall_s))
        return {
            "RAY_DASHBOARD_STARTUP_TIMEOUT_S": stall_s,
            "RAY_gcs_server_request_timeout_seconds": stall_s,
            "RAY_worker_register_timeout_seconds": stall_s,
            "RAY_agent_register_timeout_ms": f"{stall_s}000",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": stall_s,
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(math.ceil(_PROXY_ANSWER_S * self.slowness)),
        }


@dataclass(frozen=True, slots=True)
class PrivateCluster:
    """Addresses and files with which the owner reaches a running private cluster."""

    folder: Path
    """Folder of the owner alone, deleted at the end; the sockets and secrets of the application are in it."""
    address: str
    dashboard_url: str
    token_path: Path
    """File with the token that the cluster requires."""
    environment_path: Path
    """Shell script that sets the environment with which Ray's commands reach the cluster."""
    daemons: tuple[tuple[str, psutil.Process], ...]
    """Names and processes of the daemons without which the cluster cannot work."""

    def ended_daemon(self) -> str | None:
        """Return the name and the process id of a daemon that has ended; None: every daemon runs."""
        return _ended(self.daemons)


def private_ray_environment(folder: Path) -> dict[str, str]:
    """Write a new token into `folder` and return the environment of a Ray cluster that requires it.

    The environment must be set before `ray` is imported, in every process that starts or joins the cluster.
    """
    path = folder / "token"
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secrets.token_hex(32))
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(path),
        # Ray uses loopback addresses on systems where it does not support clusters. 0 makes it treat this one as such.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray runs its workers at nice 15: every other process of the machine would come before requests.
        "RAY_worker_niceness": "0",
    }


@contextlib.contextmanager
def private_cluster(
    num_cpus: int,
    haproxy_address: Address | None = None,
    max_connections_per_address: int = MAX_CONNECTIONS_PER_ADDRESS,
    limits: StartLimits | None = None,
    stream_drain_s: float = STREAM_DRAIN_S,
) -> Iterator[PrivateCluster]:
    """Start Ray for this process alone, with its own ports and folder, and share nothing with other clusters.

    With `haproxy_address` HAProxy listens there, and Serve must be started with the same port on loopback.
    `max_connections_per_address` is a limit of the HTTP proxies; `stream_drain_s` is for streams through HAProxy.

    On leaving the context, all descendants of this process are killed and the folder is deleted: an application must
    have been stopped before. Ray's daemons also end when this process is killed.

    Raises:
        Stalled: Ray did not start within the limits.
        DaemonEnded: one of Ray's daemons ended, in each of several attempts.
    """
    limits = limits or StartLimits()
    _become_subreaper()
    use_batch_scheduling()
    excepthook = sys.excepthook
    with port_block(random.SystemRandom()) as ports:
        # The path must be short. Ray and HAProxy keep sockets below it, HAProxy's in a folder with a name of 64
        # characters, and HAProxy accepts socket paths of at most 97 characters.
        folder = Path(tempfile.mkdtemp(prefix="hw-", dir="/tmp" if os.access("/tmp", os.W_OK) else None))
        try:
            _set_environment(folder, max_connections_per_address, limits)
            if haproxy_address is not None:
                limit = max_connections_per_address
                os.environ.update(haproxy_environment(folder, haproxy_address, ports, limit, stream_drain_s))
            with _given_agent_ports(ports), _waiting_for_node(limits.stall_s, folder):
                cluster = _start_ray(num_cpus, folder, ports.dashboard)
            yield cluster
        finally:
            # Ray's own hook tells Ray of an error that nobody catches. It would wait for a minute for daemons that have
            # ended, and then end this process without a word about the error.
            sys.excepthook = excepthook
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, signal.SIG_IGN)  # they must not interrupt what follows; its time is bounded
            _stop_ray()
            shutil.rmtree(folder, ignore_errors=True)


def _set_environment(folder: Path, max_connections_per_address: int, limits: StartLimits) -> None:
    """Set the environment of the cluster; Ray's variables of the surrounding shell may tell of another cluster."""
    for variable in [name for name in os.environ if name.startswith("RAY_") and not _OWN_VARIABLES.match(name)]:
        del os.environ[variable]
    os.environ.update(private_ray_environment(folder) | SERVE_ENVIRONMENT | limits.environment())
    os.environ[CONNECTIONS_VARIABLE] = str(max_connections_per_address)
    if len(tempfile.gettempdir()) > _LONGEST_TEMPORARY_PATH:
        os.environ["TMPDIR"] = str(folder.parent)


@contextlib.contextmanager
def _given_agent_ports(ports: PortBlock) -> Iterator[None]:
    """Within the context have Ray's start give the agents of its node ports of the block.

    A raylet waits for ports that agents choose for 30 s, a constant of its code, and then ends: a slow machine takes
    longer to start an agent.
    """
    from ray._private import services

    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    agent_ports = dict(zip(names, ports.agents, strict=True))
    start_raylet = services.start_raylet
    services.start_raylet = lambda *arguments, **options: start_raylet(*arguments, **options | agent_ports)
    try:
        yield
    finally:
        services.start_raylet = start_raylet


@contextlib.contextmanager
def _waiting_for_node(limit_s: float, folder: Path) -> Iterator[None]:
    """Within the context have Ray's start wait for its node up to `limit_s`, while the daemons live.

    Ray itself asks for the node again and again for 30 s, a constant of its code. Here each question waits.
    """
    from ray._private import services

    def give_up(state: tenacity.RetryCallState) -> None:
        if has_stalled(state):
            raise Stalled.without_progress("Ray", limit_s)
        _print_last_lines(folder / "ray" / "session_latest" / "logs")
        raise DaemonEnded(f"Ray's {_ended(_daemons())} ended while Ray started; its last lines are in the log")

    def has_lost_a_daemon(_: tenacity.RetryCallState) -> bool:
        return _ended(_daemons()) is not None

    has_stalled = tenacity.stop_after_delay(limit_s)
    get_node = services.get_node
    services.get_node = tenacity.retry(
        retry=tenacity.retry_if_exception_type(RuntimeError),
        stop=lambda state: has_stalled(state) or has_lost_a_daemon(state),
        wait=tenacity.wait_fixed(_NODE_PERIOD_S),
        retry_error_callback=give_up,
    )(get_node)
    try:
        yield
    finally:
        services.get_node = get_node


@tenacity.retry(
    retry=tenacity.retry_if_exception(lambda error: isinstance(error, Exception) and not isinstance(error, Stalled)),
    stop=tenacity.stop_after_attempt(_STARTS),
    before_sleep=lambda _: _forget_ray(),
    reraise=True,
)
def _start_ray(num_cpus: int, folder: Path, dashboard_port: int) -> PrivateCluster:
    """Start Ray, in several attempts: a port may be taken between its choice and its use."""
    import ray  # here, since the import reads the environment

    context = ray.init(
        address="local",
        num_cpus=num_cpus,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=True,
        dashboard_host=LOOPBACK,
        dashboard_port=dashboard_port,
        namespace="serve",
        log_to_driver=True,
        _temp_dir=str(folder / "ray"),  # Ray makes this folder accessible to all users; its parent is not
    )
    # For this process alone, whose handles have no event loop to share. It imports `ray.serve` after this.
    os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"
    address: str = context.address_info["gcs_address"]
    dashboard_url = f"http://{context.dashboard_url}"
    environment_path = _write_environment(folder, address, dashboard_url)
    return PrivateCluster(
        folder, address, dashboard_url, Path(os.environ["RAY_AUTH_TOKEN_PATH"]), environment_path, _daemons()
    )


def _daemons() -> tuple[tuple[str, psutil.Process], ...]:
    return tuple((child.name(), child) for child in psutil.Process().children() if child.name() in _DAEMONS)


def _ended(daemons: tuple[tuple[str, psutil.Process], ...]) -> str | None:
    return next((f"{name} (process {process.pid})" for name, process in daemons if _has_ended(process)), None)


def _print_last_lines(logs: Path) -> None:
    """Print the end of what each daemon has written; the folder of the cluster is deleted."""
    for path in (logs / f"{name}.out" for name in _DAEMONS):
        if path.exists():
            lines = path.read_text(errors="replace").splitlines()[-_NUM_LAST_LINES:]
            print(f"The last lines of {path.name}:", *lines, sep="\n", file=sys.stderr, flush=True)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _write_environment(folder: Path, address: str, dashboard_url: str) -> Path:
    """Write a shell script that sets the environment for `ray status`, `ray job list`, `serve status` and the like."""
    inherited = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    variables = {name: os.environ[name] for name in inherited} | {
        "RAY_ADDRESS": address,  # for `ray status` and the like
        "RAY_API_SERVER_ADDRESS": dashboard_url,  # for `ray job`
        "RAY_DASHBOARD_ADDRESS": dashboard_url,  # for `serve`
    }
    path = folder / "environment"
    path.write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()))
    return path


def _stop_ray() -> None:
    """Kill Ray's processes, which have nothing to save. Ray's own shutdown would wait for each of them in turn."""
    while children := psutil.Process().children(recursive=True):  # again, for those that were being started
        kill_processes(children)


def _forget_ray() -> None:
    """End what a failed start has left."""
    import ray

    _stop_ray()
    with contextlib.suppress(Exception):
        ray.shutdown()


def kill_processes(processes: list[psutil.Process]) -> None:
    """Kill processes, and wait until they have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_KILL_LIMIT_S)


def _become_subreaper() -> None:
    """Become the parent of every descendant whose parent ends, so that all descendants can be found and ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
