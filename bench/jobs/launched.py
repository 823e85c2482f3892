"""A `make serve` that can be killed and started again over the same data."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import httpx
import psutil

from bench.serving import ROOT, CannotServe
from serve_app.cli.private_cluster import end_processes, free_port

_START_LIMIT_S = 180.0
_STOP_LIMIT_S = 60.0
_PERIOD_S = 0.2


class Kind(Enum):
    """Processes that can be killed; the value is the beginning of the process's command line."""

    MODEL = "ray::ServeReplica:default:Model"
    JOBS = "ray::ServeReplica:default:Jobs"
    INGRESS = "ray::ServeReplica:default:Ingress"
    CONTROLLER = "ray::ServeController"
    PROXY = "ray::ProxyActor"
    WHOLE = "make serve"
    """Every process of `make serve`, which is then started again."""


class Launched:
    """One `make serve` after another, with the same port, home and configuration."""

    def __init__(self, home: Path, settings: Mapping[str, object]) -> None:
        self._home = home
        self._settings = settings
        self._port = free_port("127.0.0.1")
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0

    @property
    def url(self) -> str:
        """Base URL of the application."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start `make serve`; return when it is ready.

        Raises:
            CannotServe: it ended, or was not ready in time.
        """
        self._num_starts += 1
        log = self._home / f"serve-{self._num_starts}.log"
        arguments = " ".join(f"{name}={value}" for name, value in self._settings.items())
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MAKE"))}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["make", "--no-print-directory", "serve", f"PORT={self._port}", f"ARGS={arguments}"],
                cwd=ROOT, env={**environment, "HOME": str(self._home)}, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        deadline_s = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health/ready", timeout=5.0, trust_env=False).is_success:
                    return
            time.sleep(_PERIOD_S)
        raise CannotServe(f"not ready; the log ends:\n{log.read_text(errors='replace')[-3000:]}")

    def kill(self, kind: Kind) -> int | None:
        """Kill a process of this kind, or all; return its pid, or None if there is none now."""
        assert self._process is not None
        if kind is Kind.WHOLE:
            self._kill_all()
            return int(self._process.pid)
        for process in self._descendants():
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(kind.value):
                    os.kill(process.pid, signal.SIGKILL)
                    return int(process.pid)
        return None

    def stop(self) -> None:
        """Stop `make serve` gracefully if it runs, then end all its processes."""
        if self._process is None or self._process.poll() is not None:
            return
        descendants = self._descendants()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_LIMIT_S)
        end_processes(descendants)

    def _kill_all(self) -> None:
        assert self._process is not None
        descendants = self._descendants()
        # The process of `make serve` first, so that it cannot stop the others gracefully.
        self._process.kill()
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(_STOP_LIMIT_S)
        psutil.wait_procs(descendants, timeout=_STOP_LIMIT_S)

    def _descendants(self) -> list[psutil.Process]:
        assert self._process is not None
        children: list[psutil.Process] = psutil.Process(self._process.pid).children(recursive=True)
        return children
