"""Headway started like a user starts it: `make serve` in a process of its own."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import psutil

from serve_app.cli.private_cluster import end_processes, free_port
from testkit.limits import LIMIT_S, START_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]

T = TypeVar("T")


def wait_for(
    get: Callable[[], T | Literal[False] | None], what: str, limit_s: float = LIMIT_S, period_s: float = 0.05
) -> T:
    """Return the first non-empty value of `get`; fail after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        value = get()
        if value:
            return value
        time.sleep(period_s)
    raise AssertionError(f"not within {limit_s} s: {what}")


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
    left_out = ("MAKE", "MFLAGS", "RAY_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**environment, "HOME": str(home)}


def get_from_dashboard(dashboard_url: str, token_path: str | Path, path: str) -> Any:
    """Return the JSON of one page of the dashboard."""
    headers = {"authorization": f"Bearer {Path(token_path).read_text()}"}
    response = httpx.get(f"{dashboard_url}{path}", headers=headers, timeout=LIMIT_S)
    response.raise_for_status()
    return response.json()


@dataclass(frozen=True)
class Instance:
    """Running `make serve`."""

    url: str
    dashboard_url: str
    ray_environment: dict[str, str]
    """Variables that Ray's commands need to reach its cluster."""
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str) -> Any:
        response = httpx.get(self.url + path, timeout=LIMIT_S)
        response.raise_for_status()
        return response.json()

    def replicas(self) -> list[dict[str, Any]]:
        replicas: list[dict[str, Any]] = self.get("/load")["replicas"]
        return replicas

    def applications(self) -> dict[str, Any]:
        token_path = self.ray_environment["RAY_AUTH_TOKEN_PATH"]
        page = get_from_dashboard(self.dashboard_url, token_path, "/api/serve/applications/")
        applications: dict[str, Any] = page["applications"]
        return applications

    def descendants(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children


def start(home: Path, *variables: str) -> subprocess.Popen[bytes]:
    """Start `make serve` with variables such as `PORT=...`; its output goes to `home`/serve.log."""
    with open(home / "serve.log", "wb") as log:
        return subprocess.Popen(
            ["make", "--no-print-directory", "serve", *variables],
            cwd=ROOT,
            env=clean_environment(home),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )


def _heed_interrupts() -> None:
    """Undo what a shell does to commands in the background: they, and what they start, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def serving(home: Path, *variables: str) -> Iterator[Instance]:
    """Run `make serve` and yield it once it reports ready; end all its processes afterwards."""
    port = free_port("127.0.0.1")
    process = start(home, f"PORT={port}", *variables)
    log = home / "serve.log"

    def ready() -> re.Match[str] | None:
        text = log.read_text(errors="replace")
        assert process.poll() is None, f"make serve ended with {process.returncode}:\n{text}"
        return re.search(r"^Ray dashboard at (\S+);.*\nRay's commands.*: \. (\S+)\n\n", text, re.MULTILINE)

    descendants: list[psutil.Process] = []
    try:
        found = wait_for(ready, f"make serve is ready, see {log}", START_LIMIT_S, 0.2)
        instance = Instance(f"http://127.0.0.1:{port}", found[1], _read_exports(Path(found[2])), process, log)
        descendants = instance.descendants()
        yield instance
    finally:
        stop(process)
        end_processes(descendants)


def _read_exports(script: Path) -> dict[str, str]:
    words = [shlex.split(line)[1] for line in script.read_text().splitlines()]
    return dict(word.split("=", 1) for word in words)


def stop(process: subprocess.Popen[bytes], signum: signal.Signals = signal.SIGTERM) -> None:
    """Send `make serve` a signal and wait until it has ended."""
    if process.poll() is None:
        process.send_signal(signum)
        process.wait(LIMIT_S)
