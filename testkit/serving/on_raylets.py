"""Headway on several raylets, driven from a test process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from serve_app.cli.private_cluster import end_processes, free_port
from testkit.limits import LIMIT_S, START_LIMIT_S
from testkit.serving.make_serve import ROOT, clean_environment, get_from_dashboard, wait_for
from testkit.serving.streams import Clients, Stream

_MAX_TRIES = 8
_ANSWERS = "answers"


@dataclass(frozen=True)
class Served:
    """Running `testkit.serving.raylets`."""

    url: str
    dashboard_url: str
    token_path: str
    logs: Path
    process: subprocess.Popen[bytes]
    home: Path

    def replicas(self) -> list[dict[str, Any]] | None:
        """Return an ingress's view of the model replicas; None if no ingress answers at the moment."""
        try:
            response = httpx.get(f"{self.url}/load", timeout=LIMIT_S)
        except httpx.TransportError:
            return None
        replicas: list[dict[str, Any]] | None = response.json()["replicas"] if response.is_success else None
        return replicas

    def num_running(self) -> dict[str, int]:
        """Return the number of running sequences by replica."""
        return {replica["replica_id"]: replica["num_running"] for replica in self.replicas() or ()}

    def node_of(self, replica_id: str) -> str:
        """Return the raylet of a model replica."""
        [node_id] = [replica["node_id"] for replica in self._deployment("Model") if replica["replica_id"] == replica_id]
        return str(node_id)

    def ingress_pids(self) -> dict[str, int]:
        """Return the process id of every running ingress, by replica id."""
        return {
            replica["replica_id"]: replica["pid"]
            for replica in self._deployment("Ingress")
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
        """Open requests until one reaches this ingress; return it and the earlier ones, at other ingresses."""
        others: list[Stream] = []
        for _ in range(_MAX_TRIES):
            # Requests at another ingress stay open: the proxy prefers the ingress with fewer requests.
            stream = clients.open(body)
            if self.ingress_of(stream) == ingress_id:
                return stream, others
            others.append(stream)
        raise AssertionError(f"none of {_MAX_TRIES} requests came to ingress {ingress_id}")

    def wait_until_idle(self) -> None:
        """Return when nothing runs and every block is free."""

        def is_idle() -> bool:
            replicas = self.replicas()
            return bool(replicas) and all(
                replica["num_running"] + replica["num_waiting"] + replica["num_in_flight"] == 0
                and replica["num_free_blocks"] == replica["num_blocks"]
                for replica in replicas or ()
            )

        wait_for(is_idle, "every replica is idle")

    def add_worker(self) -> str:
        """Add a raylet with room for one model replica; return its id."""
        return self._command("add")

    def kill_worker(self, node_id: str) -> None:
        """Kill a raylet with all its processes."""
        self._command(f"remove {node_id}")

    def _command(self, command: str) -> str:
        assert self.process.stdin is not None
        num_before = len(_answers(self.home))
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        return wait_for(lambda: _answers(self.home)[num_before:], f"`{command}` is done")[0]["node_id"]

    def _deployment(self, name: str) -> list[dict[str, Any]]:
        page = get_from_dashboard(self.dashboard_url, self.token_path, "/api/serve/applications/")
        [application] = page["applications"].values()
        replicas: list[dict[str, Any]] = application["deployments"][name]["replicas"]
        return replicas

    def _find_started(self, request_id: str) -> str | None:
        for log in self.logs.glob("replica_*_Ingress_*.log"):
            for line in log.read_text().splitlines():
                if request_id in line and (entry := json.loads(line))["message"] == "request started":
                    return str(entry["replica"])
        return None


@contextmanager
def serving(home: Path, **fields: object) -> Iterator[Served]:
    """Serve the application with these fields of its configuration; end all its processes afterwards."""
    port = free_port("127.0.0.1")
    arguments = [f"{name}={value}" for name, value in {"port": port, **fields}.items()]
    with open(home / _ANSWERS, "wb") as answers, open(home / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "testkit.serving.raylets", *arguments],
            cwd=ROOT,
            env={**clean_environment(home), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=answers,
            stderr=log,
            start_new_session=True,
        )

    def first_answer() -> dict[str, str] | None:
        assert process.poll() is None, (home / "log").read_text()
        return next(iter(_answers(home)), None)

    try:
        places = wait_for(first_answer, f"the application runs, see {home / 'log'}", START_LIMIT_S)
        dashboard_url, token_path, logs = places["dashboard_url"], places["token_path"], Path(places["logs"])
        yield Served(f"http://127.0.0.1:{port}", dashboard_url, token_path, logs, process, home)
    finally:
        _stop(process)


def _answers(home: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (home / _ANSWERS).read_text().splitlines(keepends=True) if line[-1] == "\n"]


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    descendants = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.stdin.close()
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    end_processes(descendants)
