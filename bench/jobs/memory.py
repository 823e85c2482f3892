"""Memory of a batch with ten times the lines: `python -m bench.jobs.memory`.

A batch of 10,000 lines and one of 100,000 are uploaded, run and downloaded. Each has an application of its own, with
timed replicas whose steps take no time. The figures compared are the peak resident memory of the jobs process and the
ingress. The results are read to the end: every line must be there once.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.jobs.client import BatchClient, is_final, write_lines
from bench.peers.machine import peak_memory_bytes
from bench.routing.applications import timed
from bench.routing.report import Bar, Options, read_options, report
from bench.routing.streams import Stream
from serve_app.benchmark.workload import Lengths
from testkit.serving.served import Served

MAX_RATIO = 1.1
_PROCESSES = ("Jobs", "Ingress")
_LIMIT_S = 3600.0
_STREAM = Stream(name="lines", prompt=Lengths(16, 256, 48, 0.4), output=Lengths(2, 32, 8, 0.4))


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers of lines of the two batches."""

    few_lines: int
    many_lines: int


FULL, QUICK = Scale(10_000, 100_000), Scale(200, 2_000)


def main() -> int:
    """Measure both batches."""
    options = read_options(__doc__)
    scale = QUICK if options.is_quick else FULL
    few, many = (_measure(num_lines, options) for num_lines in (scale.few_lines, scale.many_lines))
    bars = [
        Bar(
            f"peak memory of {name}, {scale.many_lines} lines / {scale.few_lines}",
            many["peak_bytes"][name] / few["peak_bytes"][name],
            MAX_RATIO,
        )
        for name in _PROCESSES
    ]
    bars.append(Bar("lines without a result of their own", few["num_lost"] + many["num_lost"], 0))
    return report("memory", options, bars, {"scale": asdict(scale), "few": few, "many": many}, [], family="jobs")


def _measure(num_lines: int, options: Options) -> dict[str, Any]:
    settings = {
        "num_replicas": 1,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 4096,
        "step_times": "instant",
        "max_batch_lines": num_lines,
        "max_file_bytes": "1GiB",
    }
    with timed(options, **settings) as served, tempfile.TemporaryDirectory(prefix="hw-lines-") as folder:
        path = Path(folder) / "lines.jsonl"
        write_lines(path, _STREAM, num_lines, options.seed)
        before = _peak_bytes(served)
        figures = _run(served, path, num_lines)
        seen = {"peak_bytes_before": before, "peak_bytes": _peak_bytes(served), **figures}
    print(f"{num_lines} lines: {seen}", flush=True)
    return seen


def _peak_bytes(served: Served) -> dict[str, int]:
    found = {name: served.find(f"ray::ServeReplica:headway:{name}") for name in _PROCESSES}
    return {name: peak_memory_bytes([process.pid]) for name, process in found.items() if process is not None}


def _run(served: Served, path: Path, num_lines: int) -> dict[str, Any]:
    """Upload, run and download."""
    client = BatchClient(served.url)
    started_s = time.monotonic()
    batch_id = client.create(client.upload(path))
    batch = client.wait(batch_id, is_final, _LIMIT_S)
    duration_s = time.monotonic() - started_s
    file_ids = filter(None, (batch["output_file_id"], batch["error_file_id"]))
    results = Counter(result["custom_id"] for file_id in file_ids for result in client.results(file_id))
    return {
        "file_bytes": path.stat().st_size,
        "status": batch["status"],
        "request_counts": batch["request_counts"],
        "num_lost": abs(results.total() - num_lines) + num_lines - len(results),
        "duration_s": duration_s,
        "lines_per_s": num_lines / duration_s,
    }


if __name__ == "__main__":
    sys.exit(main())
