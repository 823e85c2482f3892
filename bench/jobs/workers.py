"""CPU time of a batch line with several jobs workers on PostgreSQL: `python -m bench.jobs.workers [--against DIR]`.

A batch runs on a timed replica whose steps take no time and whose slots are plenty, so that the workers are the limit.
The CPU time of all workers and of the database is divided by the number of lines. Each run has an application and a
database of its own, and each number of workers has several runs, by turns. The bars: four workers take at most a tenth
more CPU time a line than one, and every line has one result. Where there are more than eight cores, four workers must
be at least 2.5 times as fast as one.

`--against DIR` measures one worker of another checkout beside them: a line here takes at most half of its CPU time.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from bench.jobs.client import BatchClient, is_final, write_lines
from bench.routing.applications import timed
from bench.routing.report import Bar, Options, option_parser, options_of, report
from bench.routing.streams import Stream
from serve_app.benchmark.workload import Lengths
from testkit.jobs.postgresql import NOT_INSTALLED, find_binaries, postgresql
from testkit.serving.served import Served, wait_for

MAX_RATIO = 1.1
MIN_SPEED_UP = 2.5
MAX_RATIO_AGAINST = 0.5
_MIN_CORES = 8
_LIMIT_S = 1800.0
_NUM_WARM_UP_LINES = 800
_STREAM = Stream(name="lines", prompt=Lengths(16, 256, 48, 0.4), output=Lengths(2, 32, 8, 0.4))
_WORKER = re.compile(r"ray::ServeReplica:\w+:Jobs")
"""Processes of the workers; the application has another name in an old checkout."""
_SETTINGS: dict[str, object] = {
    "num_replicas": 1, "max_num_seqs": 1024, "max_num_batched_tokens": 4096, "step_times": "instant",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """Application to measure."""

    num_workers: int
    checkout: str | None = None
    """Directory of its code; None: this code."""

    @property
    def name(self) -> str:
        """Name in the figures."""
        return f"{self.num_workers} here" if self.checkout is None else f"{self.num_workers} there"


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU time of some processes since their start, seconds."""

    workers: float
    database: float


def main() -> int:
    """Measure one worker, four, and the other checkout's one."""
    parser = option_parser(__doc__)
    parser.add_argument("--against", metavar="DIR")
    parser.add_argument("--lines", type=int, help="lines of each run")
    parser.add_argument("--turns", type=int, default=3)
    own = parser.parse_args()
    options = options_of(own)
    num_lines = own.lines or (400 if options.is_quick else 20_000)
    runs = [Run(1), Run(4), *([Run(1, own.against)] if own.against else [])]
    binaries = find_binaries()
    if binaries is None:
        raise SystemExit(NOT_INSTALLED)
    with postgresql(binaries) as server:
        server_process = psutil.Process(server.pid)
        measured: dict[str, list[dict[str, Any]]] = {run.name: [] for run in runs}
        for run in runs * (1 if options.is_quick else own.turns):
            with server.fresh_database() as url:
                measured[run.name].append(_measure(run, url, server_process, num_lines, options))
            print(run.name, measured[run.name][-1], flush=True)
    figures = {name: _together(turns) for name, turns in measured.items()}
    record = {"num_lines": num_lines, **figures, "turns": measured}
    return report("workers", options, judge(figures), record, [], family="jobs")


def judge(figures: dict[str, dict[str, Any]]) -> list[Bar]:
    """Return the bars."""
    one, four = figures["1 here"], figures["4 here"]
    bars = [
        Bar("CPU time a line, 4 workers / 1", four["cpu_s_a_line"] / one["cpu_s_a_line"], MAX_RATIO),
        Bar("lines without one result", sum(each["num_wrong"] for each in figures.values()), 0),
    ]
    if (os.cpu_count() or 1) > _MIN_CORES:
        speed_up = four["lines_per_s"] / one["lines_per_s"]
        bars.append(Bar("lines a second, 4 workers / 1", speed_up, MIN_SPEED_UP, is_lower_bound=True))
    if (other := figures.get("1 there")) is not None:
        ratio = one["cpu_s_a_line"] / other["cpu_s_a_line"]
        bars.append(Bar("CPU time a line, here / there", ratio, MAX_RATIO_AGAINST))
    return bars


def _together(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over all turns, and the sum of the wrong lines."""
    names = ("cpu_s_a_line", "cpu_s_of_workers", "cpu_s_of_database", "lines_per_s")
    medians = {name: statistics.median(turn[name] for turn in turns) for name in names}
    return medians | {"num_wrong": sum(turn["num_wrong"] for turn in turns)}


def _measure(run: Run, url: str, server: psutil.Process, num_lines: int, options: Options) -> dict[str, Any]:
    settings = {**_SETTINGS, "database_url": url, "max_batch_lines": num_lines}
    if run.checkout is None:
        settings["num_jobs_workers"] = run.num_workers
    with (
        timed(replace(options, checkout=run.checkout), **settings) as served,
        tempfile.TemporaryDirectory(prefix="hw-lines-") as folder,
    ):
        wait_for(lambda: len(_workers(served)) == run.num_workers, "all workers run")
        # The first lines of a process also pay for its imports and its connections.
        warm_up, path = Path(folder) / "warm_up.jsonl", Path(folder) / "lines.jsonl"
        write_lines(warm_up, _STREAM, _NUM_WARM_UP_LINES, options.seed)
        write_lines(path, _STREAM, num_lines, options.seed)
        _run(served, server, warm_up, _NUM_WARM_UP_LINES)
        return _run(served, server, path, num_lines)


def _run(served: Served, server: psutil.Process, path: Path, num_lines: int) -> dict[str, Any]:
    client = BatchClient(served.url)
    file_id = client.upload(path)
    before, started_s = _cpu_times(served, server), time.monotonic()
    batch = client.wait(client.create(file_id), is_final, _LIMIT_S)
    duration_s, after = time.monotonic() - started_s, _cpu_times(served, server)
    of_workers, of_database = after.workers - before.workers, after.database - before.database
    files = filter(None, (batch["output_file_id"], batch["error_file_id"]))
    results = Counter(result["custom_id"] for each in files for result in client.results(each))
    return {
        "cpu_s_a_line": (of_workers + of_database) / num_lines,
        "cpu_s_of_workers": of_workers,
        "cpu_s_of_database": of_database,
        "lines_per_s": num_lines / duration_s,
        "num_wrong": abs(results.total() - num_lines) + num_lines - len(results),
        "status": batch["status"],
        "cpu": asdict(after),
    }


def _workers(served: Served) -> list[psutil.Process]:
    return [process for process in served.descendants() if _WORKER.match(_command(process))]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _cpu_times(served: Served, server: psutil.Process) -> CpuTimes:
    return CpuTimes(_sum(_workers(served)), _sum([server, *server.children()]))


def _sum(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU time of processes, with that of their children that have ended."""
    times = [process.cpu_times() for process in processes]
    return float(sum(one.user + one.system + one.children_user + one.children_system for one in times))


if __name__ == "__main__":
    sys.exit(main())
