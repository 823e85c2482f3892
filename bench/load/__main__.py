"""Offer a load and measure: `python -m bench.load --url http://... --spec file.json --output result.json`.

Exit codes: 0, or 3 if the run is void because more than `max_late_share` of the sends were late (1 % by default).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.load.generator import run_schedule
from bench.load.schedule import make_schedule
from bench.load.spec import LoadSpec
from bench.load.summary import VOID_EXIT_CODE, summarize, table
from bench.record import write
from serve_app.benchmark.rows import write_rows


def main() -> int:
    """Run the load and record the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="base URL of the server, without /v1")
    parser.add_argument("--spec", type=Path, required=True, help="JSON file of a LoadSpec")
    parser.add_argument("--output", type=Path, required=True, help="JSON result, ending in .json")
    parser.add_argument("--rows", type=Path, help="file for all requests, one JSON object per line")
    arguments = parser.parse_args()
    spec = LoadSpec.model_validate_json(arguments.spec.read_text())
    run = run_schedule(arguments.url.rstrip("/"), spec, make_schedule(spec))
    summary = summarize(spec, run.rows, run.duration_s)
    figures = {
        "spec": spec.model_dump(mode="json"),
        "started_unix_s": run.started_unix_s,
        "generator_scheduling": run.scheduling,
        "machine_busy_share": run.machine_busy_share,
        "generator_cpu_share": run.cpu_s / run.duration_s,
        **summary,
    }
    write(str(arguments.output.absolute().with_suffix("")), figures)
    if arguments.rows is not None:
        write_rows(arguments.rows, run.rows)
    print(table(summary), f"\nall cores {run.machine_busy_share:.0%} busy")
    return VOID_EXIT_CODE if summary["is_void"] else 0


if __name__ == "__main__":
    sys.exit(main())
