"""Faults, each with the way back that an operator would take, if it needs one."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.chaos.load import Load
from bench.chaos.receivers import BAD
from testkit.serving.raylets import Raylets

_LASTS_S = 10.0
GCS_FAULT = "kill -9: gcs with its state in Redis, down for 10 s"
_NUM_BAD_JOBS = 4


@dataclass(frozen=True)
class Part:
    """Processes of one kind."""

    command: str
    """Beginning of their command line."""
    number: int


PARTS = {
    "model replica": Part("ray::ServeReplica:headway:Model", 2),
    "ingress": Part("ray::ServeReplica:headway:Ingress", 2),
    "jobs process": Part("ray::ServeReplica:headway:Jobs", 1),
    "HTTP proxy": Part("ray::ProxyActor", 1),
    "Serve controller": Part("ray::ServeController", 1),
}


class Stage:
    """The application, and the faults that can be done to it."""

    def __init__(self, raylets: Raylets, load: Load, receivers_url: str, data_dir: Path, keeps_gcs_state: bool) -> None:
        """`keeps_gcs_state`: Ray's gcs has its state in Redis, so that it may die."""
        self._raylets = raylets
        self._keeps_gcs_state = keeps_gcs_state
        self._load = load
        self._receivers_url = receivers_url
        self._database = data_dir / "jobs.sqlite3"
        self._gone: set[int] = set()

    def faults(self) -> dict[str, Callable[[], None]]:
        """Return the faults by name, in order. Each returns once the fault is over, or needs no hand any more."""
        kills = {f"kill -9: {name}": self._killer(name) for name in PARTS}
        gcs = {GCS_FAULT: lambda: self._raylets.kill_gcs(_LASTS_S)} if self._keeps_gcs_state else {}
        return {
            **kills,
            **gcs,
            "SIGSTOP: model replica": lambda: self._signal("model replica", signal.SIGSTOP),
            "kill -9: raylet with a model replica": self._kill_raylet,
            "full disk, 10 s": self._full_disk,
            "read-only database, 10 s": self._read_only,
            "corrupt database, restored after 10 s": self._corrupt,
            "webhooks: hang, fail, redirect, 1 GB": self._bad_webhooks,
        }

    def is_whole(self) -> bool:
        """Return True if every part runs, none of them a victim, and the application says that it is well."""
        pids = {name: {process.pid for process in self._processes(part)} for name, part in PARTS.items()}
        if any(len(found) != PARTS[name].number or found & self._gone for name, found in pids.items()):
            return False
        with contextlib.suppress(httpx.HTTPError):
            health = self._raylets.app.http.get(f"{self._raylets.app.url}/health", timeout=5.0)
            replicas = self._raylets.replicas()
            is_well = health.is_success and health.json()["jobs"] == "ok"
            return is_well and {replica["pid"] for replica in replicas} == pids["model replica"]
        return False

    def _killer(self, name: str) -> Callable[[], None]:
        return lambda: self._signal(name, signal.SIGKILL)

    def _signal(self, name: str, signum: signal.Signals) -> None:
        process = self._processes(PARTS[name])[0]
        self._gone.add(process.pid)
        process.send_signal(signum)

    def _kill_raylet(self) -> None:
        replica = self._raylets.replicas()[0]
        self._gone.add(replica["pid"])
        self._raylets.kill_worker(self._raylets.node_of(replica["replica_id"]))
        self._raylets.add_worker()

    def _full_disk(self) -> None:
        """Let no file of the jobs process and the ingresses grow: the kernel refuses it, as on a full disk."""
        processes = [*self._processes(PARTS["jobs process"]), *self._processes(PARTS["ingress"])]
        for process in processes:
            process.rlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        time.sleep(_LASTS_S)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def _read_only(self) -> None:
        with self._immutable():
            time.sleep(_LASTS_S)

    @contextlib.contextmanager
    def _immutable(self) -> Iterator[None]:
        """Have the file system refuse every write to the database and its log."""
        files = [str(self._database), f"{self._database}-wal"]
        subprocess.run(["chattr", "+i", *files], check=True)
        try:
            yield
        finally:
            subprocess.run(["chattr", "-i", *files], check=True)

    def _corrupt(self) -> None:
        """Overwrite the database, and bring a backup back that was made just before."""
        backup = self._database.with_suffix(".backup")
        with self._load.without_new_jobs():
            self._back_up(backup)
            for path in (self._database, Path(f"{self._database}-wal")):
                with path.open("r+b") as file:
                    file.write(b"\xde\xad" * (path.stat().st_size // 2))
        time.sleep(_LASTS_S)
        for name in (self._database, f"{self._database}-wal", f"{self._database}-shm"):
            Path(name).unlink(missing_ok=True)
        os.replace(backup, self._database)

    def _back_up(self, path: Path) -> None:
        with (
            contextlib.closing(sqlite3.connect(self._database)) as source,
            contextlib.closing(sqlite3.connect(path)) as target,
        ):
            source.backup(target)

    def _bad_webhooks(self) -> None:
        for kind in BAD:
            self._load.submit_jobs_to(f"{self._receivers_url}/{kind}", _NUM_BAD_JOBS)
        time.sleep(_LASTS_S)

    def _processes(self, part: Part) -> list[psutil.Process]:
        found = []
        for process in self._raylets.app.descendants():
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(part.command) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found
