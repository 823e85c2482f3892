"""Real Prometheus on a port and a folder of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from testkit.free_port import free_port
from testkit.limits import LIMIT_S
from testkit.serving.served import stop, wait_for

PROMETHEUS = shutil.which("prometheus")
"""Path of the program; None: it is not here (Debian's package `prometheus`)."""
SCRAPE_INTERVAL_S = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """Value of a series at one time."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Prometheus:
    """Prometheus that runs."""

    url: str
    http: httpx.Client

    def query(self, expr: str) -> list[Sample]:
        """Return the present values of an expression."""
        response = self.http.post(f"{self.url}/api/v1/query", data={"query": expr}).json()
        assert response["status"] == "success", f"{expr}: {response['error']}"
        return [Sample(found["metric"], float(found["value"][1])) for found in response["data"]["result"]]

    def targets(self) -> list[dict[str, Any]]:
        """Return the targets that are scraped."""
        targets: list[dict[str, Any]] = self.http.get(f"{self.url}/api/v1/targets").json()["data"]["activeTargets"]
        return targets


@contextlib.contextmanager
def prometheus(folder: Path, jobs: list[dict[str, Any]]) -> Iterator[Prometheus]:
    """Run Prometheus with some scrape configurations; yield it once it answers, and end it afterwards."""
    assert PROMETHEUS is not None
    config = {"global": {"scrape_interval": f"{SCRAPE_INTERVAL_S}s"}, "scrape_configs": jobs}
    path, address = folder / "prometheus.yml", f"127.0.0.1:{free_port('127.0.0.1')}"
    path.write_text(json.dumps(config))  # JSON is YAML.
    command = [
        PROMETHEUS, f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}", "--log.level=warn",
    ]  # fmt: skip
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        with httpx.Client(timeout=LIMIT_S, trust_env=False) as http:
            found = Prometheus(f"http://{address}", http)
            wait_for(lambda: _is_ready(process, found), f"Prometheus answers, see {folder / 'log'}")
            yield found
    finally:
        stop(process)


def _is_ready(process: subprocess.Popen[bytes], server: Prometheus) -> bool:
    assert process.poll() is None, "Prometheus has ended"
    with contextlib.suppress(httpx.TransportError):
        return server.http.get(f"{server.url}/-/ready").is_success
    return False
