"""A local service in a process of its own, which may be killed: `python -m testkit.http.service_process MODEL FOLDER`.

When it is ready it writes its URL to the file `url` of the folder, where its database and its files are. It runs until
it is killed, or its parent has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions, StreamOptions
from serve_app.http_app import IngressSettings
from testkit.http.local_service import local_service
from testkit.limits import START_LIMIT_S

MODEL = "served"
_LEASE_S = 1.0
_PERIOD_S = 0.02
_ROOT = Path(__file__).resolve().parents[2]


async def main(model: str, folder: Path) -> None:
    """Serve until the parent has ended."""
    options = ReplicaOptions(
        ModelOptions(model, dtype="float32", num_threads=1),
        RunnerOptions(kv_cache_bytes=2**26),
        EngineLimits(max_num_seqs=64),
        StreamOptions(),
    )
    settings, parent = IngressSettings(model=model, served_model_name=MODEL), os.getppid()
    async with local_service(options, settings, folder, job_lease_s=_LEASE_S) as local:
        (folder / "new").write_text(local.url)
        (folder / "new").rename(folder / "url")
        while os.getppid() == parent:
            await asyncio.sleep(_PERIOD_S)


@dataclass
class KilledService:
    """Service that goes on from its folder after it was killed."""

    model: str
    folder: Path
    process: Popen[bytes] | None = None

    @property
    def url(self) -> str | None:
        """URL of the service; None: it is starting."""
        path = self.folder / "url"
        return path.read_text() if path.exists() else None

    def start(self) -> None:
        """Start the service, and wait until it is ready."""
        program = [sys.executable, "-m", "testkit.http.service_process", self.model, str(self.folder)]
        self.process = Popen(program, cwd=_ROOT)
        end_s = time.monotonic() + START_LIMIT_S
        while self.url is None:
            assert time.monotonic() < end_s and self.process.poll() is None, "the service does not start"
            time.sleep(_PERIOD_S)

    def kill(self) -> None:
        """Kill the service."""
        assert self.process is not None
        (self.folder / "url").unlink(missing_ok=True)
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def killed_service(model: str, folder: Path) -> Iterator[KilledService]:
    """Run a service that may be killed and started again within the context."""
    service = KilledService(model, folder)
    service.start()
    try:
        yield service
    finally:
        service.kill()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
