"""Served application: starts a program that serves it in processes of its own, and reads its state.

`serving` starts an application like a user does, by `make serve`. `running` starts a module of Python. When it is
ready, the module prints one line of JSON with `url`, `dashboard_url` and `token_path`. It ends on SIGTERM, or when its
input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import psutil

from testkit.free_port import free_port
from testkit.limits import LIMIT_S, START_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
LOG = "log"
"""File, in the program's home, of its errors; its output is in the file `OUTPUT`."""
OUTPUT = "output"
_DASHBOARD = re.compile(r"^  dashboard  \S+; Ray's is (\S+), .*\n  ray        \. (\S+), ", re.MULTILINE)

T = TypeVar("T")


class CannotStart(Exception):
    """Program that ended before it was ready; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Served:
    """Application, or a cluster for one, that runs."""

    places: Mapping[str, str]
    """Addresses and files that the program has named."""
    process: subprocess.Popen[bytes]
    home: Path
    http: httpx.Client
    """Client for all requests: making one takes 50 ms of CPU time, which would disturb a measurement."""

    @property
    def url(self) -> str:
        """Base URL of the application."""
        return self.places["url"]

    @property
    def dashboard_url(self) -> str:
        """URL of Ray's dashboard."""
        return self.places["dashboard_url"]

    @property
    def ray_environment(self) -> dict[str, str]:
        """Variables that Ray's commands need to reach the cluster of `make serve`."""
        return {name: value for name, value in self.places.items() if name.startswith("RAY_")}

    def get(self, path: str) -> Any:
        """Return the JSON of a page of the application."""
        return self._json(self.url + path)

    def replicas(self) -> list[dict[str, Any]]:
        """Return the replicas in `/load`."""
        replicas: list[dict[str, Any]] = self.get("/load")["replicas"]
        return replicas

    def metric(self, name: str) -> float:
        """Return a metric of `/metrics`, summed over its labels."""
        text = self.http.get(f"{self.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def applications(self) -> dict[str, Any]:
        """Return Serve's record of its applications, by name."""
        # The dashboard of an older checkout asks for no token.
        token_path = self.places.get("token_path")
        headers = {"authorization": f"Bearer {Path(token_path).read_text()}"} if token_path else {}
        applications: dict[str, Any] = self._json(f"{self.dashboard_url}/api/serve/applications/", headers)[
            "applications"
        ]
        return applications

    def deployment(self, name: str) -> dict[str, Any]:
        """Return Serve's record of a deployment of the only application: its target and its replicas' states."""
        [application] = self.applications().values()
        deployment: dict[str, Any] = application["deployments"][name]
        return deployment

    def descendants(self) -> list[psutil.Process]:
        """Return all processes but the first."""
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def find(self, command: str) -> psutil.Process | None:
        """Return a process whose command begins like this; None if there is none now."""
        return next(iter(self.find_all(command)), None)

    def find_all(self, command: str) -> list[psutil.Process]:
        """Return the processes whose command begins like this."""
        found = []
        for process in self.descendants():
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(command):
                    found.append(process)
        return found

    def kill(self) -> None:
        """Kill every process, the first one first, so that it cannot stop the others gracefully."""
        descendants = self.descendants()
        for process in (psutil.Process(self.process.pid), *descendants):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(LIMIT_S)
        psutil.wait_procs(descendants, timeout=LIMIT_S)

    def ask(self, command: str) -> dict[str, str]:
        """Give the program a line of input; return its answer."""
        assert self.process.stdin is not None
        num_before = len(_answers(self.home))
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        return wait_for(lambda: _answers(self.home)[num_before:], f"`{command}` is done")[0]

    def _json(self, url: str, headers: Mapping[str, str] | None = None) -> Any:
        response = self.http.get(url, headers=headers)
        response.raise_for_status()
        return response.json()


def start(home: Path, *variables: str, user_home: Path | None = None) -> subprocess.Popen[bytes]:
    """Start `make serve` with variables such as `PORT=...`, by default in one profile; `user_home` as in `serving`."""
    command = ["make", "--no-print-directory", "serve", "PROFILE=default", *variables]
    environment = clean_environment(user_home or home)
    return _start(command, home, environment=environment, stdin=subprocess.DEVNULL, preexec_fn=_heed_interrupts)


def stop(process: subprocess.Popen[bytes], signum: signal.Signals = signal.SIGTERM) -> None:
    """Send a program a signal and wait until it has ended."""
    if process.poll() is None:
        process.send_signal(signum)
        process.wait(LIMIT_S)


@contextlib.contextmanager
def serving(
    home: Path, *variables: str, port: int | None = None, key: str | None = None, user_home: Path | None = None
) -> Iterator[Served]:
    """Run `make serve` and yield the application once it is ready; end all its processes afterwards.

    `key`: an operator's API key, with which its state is read. `user_home`: home folder of the user, who may have
    several applications; None: `home`, where the output of this one is.
    """
    port = port or free_port("127.0.0.1")

    def find_places() -> dict[str, str] | None:
        found = _DASHBOARD.search((home / OUTPUT).read_text(errors="replace"))
        if found is None:
            return None
        words = [shlex.split(line)[1] for line in Path(found[2]).read_text().splitlines()]
        environment = dict(word.split("=", 1) for word in words)
        places = {"url": f"http://127.0.0.1:{port}", "dashboard_url": found[1]}
        return {**places, "token_path": environment["RAY_AUTH_TOKEN_PATH"], **environment}

    process = start(home, f"PORT={port}", *variables, user_home=user_home)
    with _served(process, home, find_places, key) as served:
        yield served


@contextlib.contextmanager
def running(
    module: str, arguments: list[str], home: Path, checkout: Path = ROOT, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Run `python -m MODULE` and yield what it serves once it is ready; end all its processes afterwards.

    `checkout` is the directory of the code that runs. `environment` is set on top of a clean one.
    """
    command = [sys.executable, "-m", module, *arguments]
    variables = {"PYTHONPATH": str(checkout), **(environment or {})}
    process = _start(command, home, checkout, variables, stdin=subprocess.PIPE)
    with process, _served(process, home, lambda: next(iter(_answers(home)), None)) as served:
        yield served


def wait_for(
    get: Callable[[], T | Literal[False] | None], what: str, limit_s: float = LIMIT_S, period_s: float = 0.05
) -> T:
    """Return the first non-empty value of `get`.

    Raises:
        TimeoutError: there was none within `limit_s`.
    """
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        value = get()
        if value:
            return value
        time.sleep(period_s)
    raise TimeoutError(f"not within {limit_s} s: {what}")


def answers(url: str) -> bool:
    """Return True if a server answers, and that all is well."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5.0, trust_env=False).is_success
    return False


def clean_environment(home: Path) -> dict[str, str]:
    """Return the environment without variables of `make` and Ray, with `home` as the home folder.

    The cache of compiled kernels is shared with the user's home: compilation takes half a minute.
    """
    kernels = home / ".cache" / "headway"
    if not kernels.exists():
        kernels.parent.mkdir(parents=True, exist_ok=True)
        shared = Path.home() / ".cache" / "headway"
        shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        kernels.symlink_to(shared)
    left_out = ("ARGS", "MAKE", "MFLAGS", "RAY_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**environment, "HOME": str(home)}


def _start(
    command: list[str], home: Path, checkout: Path = ROOT, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    variables = {**clean_environment(home), **(environment or {})}
    with open(home / OUTPUT, "wb") as output, open(home / LOG, "wb") as log:
        return subprocess.Popen(
            command, cwd=checkout, env=variables, stdout=output, stderr=log, start_new_session=True, **options
        )


def _heed_interrupts() -> None:
    """Undo what a shell does to commands in the background: they, and what they start, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def _served(
    process: subprocess.Popen[bytes],
    home: Path,
    find_places: Callable[[], dict[str, str] | None],
    key: str | None = None,
) -> Iterator[Served]:
    """Yield what a program serves once its places are found; end all its processes afterwards."""

    def ready() -> dict[str, str] | None:
        if process.poll() is not None:
            log = (home / LOG).read_text(errors="replace")
            raise CannotStart(f"the program ended with {process.returncode}; its log ends:\n{log[-3000:]}")
        return find_places()

    descendants: list[psutil.Process] = []
    try:
        places = wait_for(ready, f"the application is ready, see {home / LOG}", START_LIMIT_S, 0.2)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        with httpx.Client(timeout=LIMIT_S, trust_env=False, headers=headers) as http:
            served = Served(places, process, home, http)
            descendants = served.descendants()
            yield served
    finally:
        if process.poll() is None:
            descendants += psutil.Process(process.pid).children(recursive=True)
        try:
            stop(process)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            end_processes(descendants)


def end_processes(processes: list[psutil.Process], grace_s: float = 5.0) -> None:
    """Terminate processes, and kill those that still run after `grace_s`."""
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                stop(process)
        _, processes = psutil.wait_procs(processes, timeout=grace_s)


def _answers(home: Path) -> list[dict[str, str]]:
    """Return the whole lines of JSON that a program has printed, without those that libraries print."""
    lines = (home / OUTPUT).read_text(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith('{"') and line.endswith("\n")]
