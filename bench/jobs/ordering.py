"""Gain from the worker's order of a batch's lines: `python -m bench.jobs.ordering`.

One timed replica runs the same lines twice: in the worker's order, and in the file's. For the second run a database
trigger gives all new lines the same length rank and prefix key, so only their position orders them.

Two workloads: lengths that differ much, where the longest lines must not come last; and shuffled prompts of many
groups with a shared prefix each, a quarter of which fit into the KV cache at once.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.jobs.client import BatchClient, is_final, write_lines
from bench.record import ratio
from bench.routing.applications import timed
from bench.routing.report import Bar, Options, read_options, report
from bench.routing.streams import Prefixes, Stream
from serve_app.benchmark.workload import Lengths

MIN_GAIN = 1.1
NUM_SLOTS = 32
_LIMIT_S = 1800.0
_ALIKE = """
CREATE TRIGGER lines_look_alike AFTER INSERT ON lines BEGIN
    UPDATE lines SET length_rank = 0, prefix_key = '' WHERE batch_id = NEW.batch_id AND position = NEW.position;
END
"""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lines, and the replica's number of KV blocks."""

    stream: Stream
    num_lines: int
    num_blocks: int


FULL = {
    "lengths": Workload(
        Stream(name="lines", prompt=Lengths(16, 512, 64, 0.5), output=Lengths(8, 1024, 96, 1.0)),
        num_lines=400,
        num_blocks=8192,
    ),
    "prefixes": Workload(
        Stream(
            name="lines",
            prompt=Lengths(8, 128, 32, 0.4),
            output=Lengths(16, 256, 64, 0.3),
            prefixes=Prefixes(num_groups=200, num_tokens=768, zipf_exponent=0.0),
        ),
        num_lines=800,
        num_blocks=2400,
    ),
}
_FEW = {"lengths": 48, "prefixes": 48}


def main() -> int:
    """Measure both workloads in both orders."""
    options = read_options(__doc__)
    bars: list[Bar] = []
    figures: dict[str, Any] = {}
    for name, workload in FULL.items():
        num_lines = _FEW[name] if options.is_quick else workload.num_lines
        runs = {order: _measure(workload, num_lines, order, options) for order in ("worker", "file")}
        gain = ratio(runs["worker"]["tokens_per_s"], runs["file"]["tokens_per_s"])
        bars.append(Bar(f"{name}: tokens/s, the worker's order / the file's", gain, MIN_GAIN, is_lower_bound=True))
        bars.append(Bar(f"{name}: lines that failed", sum(run["num_failed"] for run in runs.values()), 0))
        figures[name] = {
            "num_lines": num_lines,
            "workload": asdict(workload),
            "gain": gain,
            **runs,
        }
    return report("ordering", options, bars, figures, [], family="jobs")


def _measure(workload: Workload, num_lines: int, order: str, options: Options) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hw-lines-") as folder:
        path, data = Path(folder) / "lines.jsonl", Path(folder) / "data"
        write_lines(path, workload.stream, num_lines, options.seed)
        settings = {"num_blocks": workload.num_blocks, "max_num_seqs": NUM_SLOTS, "data_dir": data}
        with timed(options, num_replicas=1, **settings) as served:
            if order == "file":
                with contextlib.closing(sqlite3.connect(data / "jobs.sqlite3", timeout=30.0)) as database:
                    database.execute(_ALIKE)
            client = BatchClient(served.url)
            batch_id = client.create(client.upload(path))
            client.wait(batch_id, lambda batch: batch["status"] == "in_progress", _LIMIT_S)
            started_s = time.monotonic()
            batch = client.wait(batch_id, is_final, _LIMIT_S)
            duration_s = time.monotonic() - started_s
            hits, queries = (served.metric(f"vllm:prefix_cache_{what}_total") for what in ("hits", "queries"))
    num_tokens = batch["usage"]["total_tokens"]
    seen = {
        "duration_s": duration_s,
        "num_tokens": num_tokens,
        "tokens_per_s": num_tokens / duration_s,
        "prefix_hit_share": ratio(hits, queries),
        "num_failed": num_lines - batch["request_counts"]["completed"],
    }
    print(f"{order}'s order: {seen}", flush=True)
    return seen


if __name__ == "__main__":
    sys.exit(main())
