"""Server process of `headway serve`: from the start of Ray to its end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from replicas.child_processes import Stalled
from serve_app.cli.server import application
from serve_app.cli.server.access_lines import AccessLines, LogFormat
from serve_app.cli.server.disk_space import DiskWatch
from serve_app.cli.server.memory_report import memory_line
from serve_app.cli.server.ports import LOOPBACK, Address
from serve_app.cli.server.private_cluster import DaemonEnded, PrivateCluster, StartLimits, private_cluster
from serve_app.cli.server.profile import Front, Profile
from serve_app.cli.server.serve_log import Terminal, output_to
from serve_app.cli.server.start_report import Report, Steps
from serve_app.config import HeadwayConfig
from serve_app.keys.key_file import digest_of

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TENANT = "default"
"""Tenant of the key on the command line."""
_POLL_PERIOD_S = 0.25
_REASON_LENGTH = 300
_WRITABLE = "name a folder that can be written with data_dir=FOLDER, kernel_cache_dir=FOLDER or TMPDIR"
_REMEDIES = {
    "No space left on device": "make room on the disk, or name other folders with data_dir=FOLDER and TMPDIR",
    "Read-only file system": _WRITABLE,
    "Permission denied": _WRITABLE,
    "Address already in use": "choose another port with --port",
    "No module named": "install the libraries again: `make venv`, or `pip install --force-reinstall headway-serve`",
    "cannot open shared object file": "install the system's package that has the library",
}
"""Map from a part of an error's message to what an operator can do about it."""


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Place at which a server listens, the key that it asks for, and its lines on the terminal."""

    address: Address
    max_connections_per_address: int
    front: Front
    api_key: str | None
    log_format: LogFormat
    has_access_lines: bool

    @property
    def url(self) -> str:
        """URL at which this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address.host, self.address.host)
        return f"http://{Address(host, self.address.port)}"

    @property
    def haproxy_address(self) -> Address | None:
        """Address at which HAProxy listens; None: there is no HAProxy."""
        return self.address if self._has_haproxy else None

    @property
    def serve_address(self) -> Address:
        """Address of Serve's own HTTP proxies, which nobody but HAProxy calls where it is in front."""
        return Address(LOOPBACK, self.address.port) if self._has_haproxy else self.address

    @property
    def _has_haproxy(self) -> bool:
        return self.front.profile is Profile.THROUGHPUT


class _Stopped(BaseException):
    """Signal that SIGTERM or SIGINT has arrived, or that the parent process has ended."""


class Server:
    """Server in this process, with a Ray cluster of its own.

    A signal raises `_Stopped` in the main thread. Libraries may swallow that or turn it into another exception, so the
    signal also sets a flag, which the server checks between its steps.
    """

    def __init__(self, config: HeadwayConfig, options: ListenOptions, limits: StartLimits, log_path: Path) -> None:
        self._config = config
        self._options = options
        self._limits = limits
        self._log_path = log_path
        self._parent_id = os.getppid()
        self._must_stop = False
        self._ended_daemon: str | None = None

    def run(self) -> int:
        """Serve until a signal arrives; return the exit status: 0, or 1 if the application or Ray has failed."""
        with output_to(self._log_path) as terminal:
            try:
                self._serve(terminal)
                reason = ""
            except (SystemExit, KeyboardInterrupt):  # reactions of Ray's own to a signal
                self._must_stop = True
            except BaseException as error:
                with contextlib.suppress(OSError):  # the disk of the log may be full
                    traceback.print_exc()  # into the log
                reason = _reason_of(error)
            if self._ended_daemon is not None:
                reason = f"Ray's {self._ended_daemon} has ended; accepted jobs continue at the next start"
            elif self._must_stop:
                print("Stopped.", file=self._lines(terminal), flush=True)
                return 0
            print(f"error: {reason}\nThe log is {self._log_path}", file=terminal.err, flush=True)
            return 1

    def _lines(self, terminal: Terminal) -> TextIO:
        """Return the stream for lines that are not access lines: those of JSON have standard output for themselves."""
        return terminal.out if self._options.log_format is LogFormat.TEXT else terminal.err

    def _serve(self, terminal: Terminal) -> None:
        options, lines = self._options, self._lines(terminal)
        num_cpus = max(os.cpu_count() or 1, math.ceil(_cpus_needed(self._config)))
        with contextlib.closing(Steps(lines)) as steps, contextlib.ExitStack() as stack:
            self._heed_signals()
            steps.begin(f"Starting {self._config.model_name}: Ray ...")
            cluster = stack.enter_context(
                private_cluster(
                    num_cpus,
                    options.haproxy_address,
                    options.max_connections_per_address,
                    self._limits,
                    self._config.stream_drain_s,
                )
            )
            self._heed_signals()  # ray.init has replaced the handlers
            self._check_for_stop()
            stack.enter_context(self._watching(cluster))
            config = _with_key_file(self._config, self._options.api_key, cluster.folder)
            access_log_socket = None
            if self._options.has_access_lines:
                access_log_socket = str(cluster.folder / "access")
                access = AccessLines(Path(access_log_socket), self._options.log_format, terminal.out.write)
                stack.enter_context(contextlib.closing(access))
            steps.begin(f"Starting {config.model_name}: replicas ...")
            application.deploy(config, options.serve_address, access_log_socket, cluster.dashboard_url)
            application.wait_until_ready(self._options.url, self._limits.stall_s, self._pause)
            steps.close()
            print(*self._report(config, cluster).lines(), sep="\n", file=lines, flush=True)
            disks = DiskWatch({"data_dir": Path(self._config.data_dir), None: cluster.folder.parent})
            self._wait_for_signal(lines, disks)

    def _wait_for_signal(self, lines: TextIO, disks: DiskWatch) -> None:
        """Report full disks, wait for a signal and let the requests end; return at once if Ray has ended."""
        limit_s = self._config.graceful_shutdown_timeout_s
        try:
            while True:
                self._pause()
                for line in disks.news():
                    print(line, file=lines, flush=True)
        except _Stopped:
            if self._ended_daemon is not None:
                return
            print(f"Stopping; requests have {limit_s:g} s to end, or until a second signal.", file=lines, flush=True)
            self._heed_signals()
            with contextlib.suppress(_Stopped, KeyboardInterrupt):  # Ray may turn the one into the other
                application.drain(limit_s)
                application.stop()

    @contextlib.contextmanager
    def _watching(self, cluster: PrivateCluster) -> Iterator[None]:
        """Watch Ray's daemons in a thread within the context; when one ends, note it and stop this server.

        Calls of Ray's own library, in which the main thread may be, would wait for an ended daemon for a minute.
        """
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(_POLL_PERIOD_S):
                self._ended_daemon = cluster.ended_daemon()
                if self._ended_daemon is not None:
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

        thread = threading.Thread(target=watch, name="watching", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _report(self, config: HeadwayConfig, cluster: PrivateCluster) -> Report:
        has_keys = config.ingress_settings().api_key_file is not None
        jobs_state = application.jobs_state(self._options.url)
        return Report(
            config,
            application.model_card(self._limits.stall_s),
            cluster,
            self._options.url,
            self._log_path,
            has_keys,
            jobs_state,
            str(self._options.front),
            memory_line(),
        )

    def _pause(self) -> None:
        """Wait for one poll period, or raise `_Stopped`."""
        if os.getppid() != self._parent_id:
            self._must_stop = True
        self._check_for_stop()
        time.sleep(_POLL_PERIOD_S)

    def _check_for_stop(self) -> None:
        if self._must_stop:
            raise _Stopped

    def _heed_signals(self) -> None:
        for signum in _SIGNALS:
            signal.signal(signum, self._stop)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        """Set the flag and raise `_Stopped`; ignore further signals until `_heed_signals`."""
        self._must_stop = True
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped


def _reason_of(error: BaseException) -> str:
    """Return one line for an error, with a remedy. Ray's messages are tracebacks, whose last line has the cause."""
    remedy = next((f"; {remedy}" for sign, remedy in _REMEDIES.items() if sign in str(error)), "")
    if isinstance(error, application.ApplicationFailed | DaemonEnded | Stalled):
        return f"{error}{remedy}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
    return (cause if len(cause) <= _REASON_LENGTH else f"{cause[:_REASON_LENGTH]} ...") + remedy


def _with_key_file(config: HeadwayConfig, api_key: str | None, folder: Path) -> HeadwayConfig:
    """Return the configuration with a key file that has the hash of the command line's key."""
    if api_key is None:
        return config
    path = folder / "keys.yaml"
    path.touch(mode=0o600)
    owner = {"tenant": _TENANT, "ceiling": "interactive", "operator": True}
    path.write_text(json.dumps({digest_of(api_key): owner}))
    return config.model_copy(update={"api_key_file": str(path)})


def _cpus_needed(config: HeadwayConfig) -> float:
    ingresses = config.cpus_per_ingress * config.most_ingresses
    workers = config.cpus_per_jobs * config.num_jobs_workers
    return config.cpus_per_replica * config.effective_max_replicas + ingresses + workers
