"""Memory of a batch with ten times the lines: `python -m bench.jobs.memory`.

A batch of 10,000 lines and one of 100,000 are uploaded, run and downloaded. Each has an application of its own, with
timed replicas whose steps take no time. The figures compared are the peak resident memory of the jobs process and the
ingress. The results are read to the end: every line must be there once.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.jobs.client import BatchClient, is_final, peak_memory_bytes, replica_process
from bench.jobs.lines import write_lines
from bench.load.spec import Lengths, Stream
from bench.routing.applications import timed
from bench.routing.report import Bar, Options, read_options, report
from bench.serving import Served

MAX_RATIO = 1.1
_PROCESSES = ("Jobs", "Ingress")
_LIMIT_S = 3600.0
_STREAM = Stream(name="lines", prompt=Lengths.around(48, 0.4, 16, 256), output=Lengths.around(8, 0.4, 2, 32))


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
        Bar(f"peak memory of {name}, {scale.many_lines} lines / {scale.few_lines}", _ratio(name, many, few), MAX_RATIO)
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
        processes = {name: replica_process(served, name) for name in _PROCESSES}
        before = {name: peak_memory_bytes(process) for name, process in processes.items()}
        figures = _run(served, path, num_lines)
        after = {name: peak_memory_bytes(process) for name, process in processes.items()}
    seen = {"peak_bytes_before": before, "peak_bytes": after, "file_bytes": figures.pop("file_bytes"), **figures}
    print(f"{num_lines} lines: {seen}", flush=True)
    return seen


def _run(served: Served, path: Path, num_lines: int) -> dict[str, Any]:
    """Upload, run and download."""
    client = BatchClient(served.url)
    started_s = time.monotonic()
    batch_id = client.create(client.upload(path))
    batch = client.wait(batch_id, is_final, _LIMIT_S)
    duration_s = time.monotonic() - started_s
    custom_ids: set[str] = set()
    num_results = 0
    for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
        for result in client.results(file_id):
            custom_ids.add(result["custom_id"])
            num_results += 1
    return {
        "file_bytes": path.stat().st_size,
        "status": batch["status"],
        "request_counts": batch["request_counts"],
        "num_lost": abs(num_results - num_lines) + num_lines - len(custom_ids),
        "duration_s": duration_s,
        "lines_per_s": num_lines / duration_s,
    }


def _ratio(name: str, many: dict[str, Any], few: dict[str, Any]) -> float:
    return float(many["peak_bytes"][name] / few["peak_bytes"][name])


if __name__ == "__main__":
    sys.exit(main())
