"""A served application for an experiment: a private Ray cluster and the application on free ports.

As a program, `python -m bench.serving --app bench.timed_app:build key=value`, it serves in the foreground. It prints
its addresses in one line of JSON. It stops everything on SIGTERM or when its parent has ended. `serving` runs that
program.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, get_type_hints

import httpx
import psutil

from serve_app.cli.private_cluster import end_processes, free_port, private_cluster

ROOT = Path(__file__).resolve().parents[1]
TIMED = "bench.timed_app:build"
REAL = "serve_app.app:build"
_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 90.0
_POLL_PERIOD_S = 0.2


class CannotServe(Exception):
    """Application that did not start; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Served:
    """Running application."""

    url: str
    dashboard_url: str
    token_path: str | None
    """File with the token that the dashboard asks for; None: it asks for none, as in older checkouts."""
    process: subprocess.Popen[bytes]
    log: Path
    http: httpx.Client
    """Client for all requests: making one takes 50 ms of CPU time, which would disturb a measurement."""

    def load(self) -> list[dict[str, Any]]:
        """Return the replicas in `/load`."""
        replicas: list[dict[str, Any]] = self._get(f"{self.url}/load")["replicas"]
        return replicas

    def model_deployment(self) -> dict[str, Any]:
        """Return Serve's record of the model deployment: its target and its replicas' states."""
        headers = {"authorization": f"Bearer {Path(self.token_path).read_text()}"} if self.token_path else {}
        applications = self._get(f"{self.dashboard_url}/api/serve/applications/", headers)["applications"]
        [application] = applications.values()
        deployment: dict[str, Any] = application["deployments"]["Model"]
        return deployment

    def metric(self, name: str) -> float:
        """Return a metric of `/metrics`, summed over its labels."""
        text = self.http.get(f"{self.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def owns(self, pid: int) -> bool:
        """Return True if a process descends from this application's."""
        return pid in {process.pid for process in psutil.Process(self.process.pid).children(recursive=True)}

    def _get(self, url: str, headers: Mapping[str, str] | None = None) -> Any:
        response = self.http.get(url, headers=headers)
        response.raise_for_status()
        return response.json()


@contextlib.contextmanager
def serving(
    app: str, arguments: Mapping[str, object], throughput_profile: bool = False, checkout: str | None = None
) -> Iterator[Served]:
    """Serve within the context; end all processes afterwards.

    `app` is `TIMED` or `REAL`, or any other `module:builder`; `arguments` are the fields of its config. `checkout` is
    the directory of the code that runs; None: this code.

    Raises:
        CannotServe: it ended or was not ready within five minutes.
    """
    command = [sys.executable, "-m", "bench.serving", "--app", app]
    command += ["--throughput"] * throughput_profile
    command += [f"{name}={value}" for name, value in arguments.items()]
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as home:
        log = Path(home) / "log"
        process = _start(command, home, log, checkout or str(ROOT))
        descendants: list[psutil.Process] = []
        try:
            places = _first_line(process, log)
            descendants = psutil.Process(process.pid).children(recursive=True)
            with httpx.Client(timeout=30.0, trust_env=False) as http:
                yield Served(places["url"], places["dashboard_url"], places.get("token_path"), process, log, http)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                descendants += psutil.Process(process.pid).children(recursive=True)
                process.kill()
            end_processes(descendants)


def _start(command: list[str], home: str, log: Path, checkout: str) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": home, "PYTHONPATH": checkout}
    with log.open("wb") as errors:
        return subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True,
        )  # fmt: skip


def _first_line(process: subprocess.Popen[bytes], log: Path) -> dict[str, str]:
    """Return the addresses in the program's first line of JSON; skip lines that libraries print."""
    assert process.stdout is not None
    deadline_s = time.monotonic() + _START_LIMIT_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline_s - time.monotonic())):
            line = process.stdout.readline()
            if line.startswith(b'{"url"'):
                places: dict[str, str] = json.loads(line)
                return places
            if not line:
                break
    raise CannotServe(f"no answer from the application; its log ends:\n{log.read_text(errors='replace')[-3000:]}")


class _Stopped(Exception):
    pass


def main() -> None:
    """Serve in the foreground until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--app", default=TIMED, help="module:builder")
    parser.add_argument("--port", type=int, default=0, help="port of the application; 0: a free one")
    parser.add_argument("--throughput", action="store_true", help="HAProxy in front and Serve's throughput flags")
    parser.add_argument("arguments", nargs="*", metavar="key=value")
    options = parser.parse_args()
    parent_pid = os.getppid()
    port = options.port or free_port("127.0.0.1")
    fields = dict(argument.split("=", 1) for argument in options.arguments)
    with contextlib.suppress(_Stopped), private_cluster(os.cpu_count() or 1, options.throughput) as cluster:
        _catch_signals()
        _run(options.app, fields, port)
        places = {"url": f"http://127.0.0.1:{port}", "dashboard_url": cluster.dashboard_url}
        print(json.dumps({**places, "token_path": str(cluster.token_path)}), flush=True)
        try:
            # Stop with the parent: a killed experiment leaves no process behind.
            while os.getppid() == parent_pid:
                time.sleep(_POLL_PERIOD_S)
        finally:
            from ray import serve

            serve.shutdown()


def _run(app: str, fields: dict[str, str], port: int) -> None:
    """Start the application; return when the ingress is ready."""
    from ray import serve

    module, name = app.split(":")
    builder = getattr(importlib.import_module(module), name)
    config = get_type_hints(builder)["config"].model_validate(fields)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(builder(config), name="default", route_prefix="/")
    deadline_s = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=5.0, trust_env=False).is_success:
                return
        time.sleep(_POLL_PERIOD_S)
    raise CannotServe(f"not ready within {_START_LIMIT_S:.0f} s")


def _catch_signals() -> None:
    """Install signal handlers; must come after ray.init, which installs its own."""

    def stop(signum: int, frame: FrameType | None) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise _Stopped

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


if __name__ == "__main__":
    main()
