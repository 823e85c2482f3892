"""The HTTP application with the demo model in a process of its own, for measurements: `LocalServer`.

With DEFAULT_RUN_TIME in its environment the process leaves the GIL's interval, the C heap and the garbage collector as
they are by default. With NO_KEYS nobody needs a key, and all share the prefix cache. With KEY_LIMITS each key has all
limits, so high that none is reached.

It prints one line of JSON each second: its memory, descriptors, threads and tasks, and the longest time for which its
event loop stood still in that second.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions, StreamOptions
from replicas.protocol import Band
from serve_app.config import DEMO_MODEL_NAME, HeadwayConfig
from serve_app.http_app import IngressSettings
from serve_app.keys.key_file import digest_of
from serve_app.openai.request.validation import RequestLimits
from serve_app.process import return_freed_memory, share_gil
from testkit.http.local_service import local_service

KEYS = {band: f"hw-{band.name.lower()}" for band in Band}
"""API key of one tenant in each band; the band is the key's ceiling."""

_HIGH_LIMITS = {
    "requests_per_minute": 10**6, "tokens_per_minute": 10**9, "max_concurrent_requests": 10**4, "max_tokens": 10**4,
}  # fmt: skip
_START_S, _PERIOD_S, _TICK_S = 120.0, 1.0, 0.002


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _heap_mb() -> dict[str, float]:
    """Return the sizes of glibc's heaps: in use, free but not given back, and in mappings of their own."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    named = {"heap_used_mb": info.uordblks, "heap_free_mb": info.fordblks, "mapped_mb": info.hblkhd}
    return {name: round(size / 1e6, 1) for name, size in named.items()}


class LocalServer:
    """Server in a child process; use it as a context manager. `lines` are the process's reports."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._environment = os.environ | (environment or {})
        self.lines: list[dict[str, Any]] = []
        self.url = ""

    def __enter__(self) -> Self:
        """Start the process and wait until it serves."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.server.local_server"],
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        assert self._process.stdout is not None
        self.url = json.loads(self._process.stdout.readline())["url"]
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(_START_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(json.loads(line))


async def _watch() -> None:
    """Print a report each second."""
    process, loop = psutil.Process(), asyncio.get_running_loop()
    while True:
        worst_s, until_s = 0.0, loop.time() + _PERIOD_S
        while (before_s := loop.time()) < until_s:
            await asyncio.sleep(_TICK_S)
            worst_s = max(worst_s, loop.time() - before_s - _TICK_S)
        report = {
            "time_s": round(time.monotonic(), 3),
            "rss_mb": round(process.memory_info().rss / 1e6, 1),
            **_heap_mb(),
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "tasks": len(asyncio.all_tasks()),
            "python_blocks": sys.getallocatedblocks(),
            "garbage": sum(gc.get_count()),
            "loop_stall_ms": round(1000 * worst_s, 1),
        }
        print(json.dumps(report), flush=True)


async def _serve(data_dir: Path) -> None:
    if not os.environ.get("DEFAULT_RUN_TIME"):
        return_freed_memory()
        share_gil()
    model = HeadwayConfig(model=DEMO_MODEL_NAME).model_path
    keys = data_dir / "keys.json"
    limits = _HIGH_LIMITS if os.environ.get("KEY_LIMITS") else {}
    entries = {digest_of(key): {"tenant": key, "ceiling": band.name.lower()} | limits for band, key in KEYS.items()}
    keys.write_text(json.dumps(entries))
    has_keys = not os.environ.get("NO_KEYS")
    options = ReplicaOptions(
        ModelOptions(model, num_threads=1),
        RunnerOptions(kv_cache_bytes=32 * 2**20),
        EngineLimits(),
        StreamOptions(),
    )
    settings = IngressSettings(
        model=model,
        served_model_name=DEMO_MODEL_NAME,
        api_key_file=str(keys) if has_keys else None,
        limits=RequestLimits(prefix_cache_scope="tenant" if has_keys else "shared"),
    )
    async with local_service(options, settings) as service:
        if not os.environ.get("DEFAULT_RUN_TIME"):
            gc.collect()
            gc.freeze()  # As the processes of the deployments do: a collection of the whole heap takes a second here.
        print(json.dumps({"url": service.url}), flush=True)
        await _watch()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_serve(Path(directory)))
