"""Effect of a running batch on interactive work: `python -m bench.jobs.interactive`.

One replica. The same interactive requests are sent twice at the same times: to an idle replica, and to one that works
on a batch of many lines. The batch must last to the end. Kinds of replica and bars are those of
`bench.routing.backlog`, which offers the same work as single requests.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.jobs.client import BatchClient, is_final, num_done
from bench.routing.applications import INTERACTIVE, KINDS
from bench.routing.offer import Offered, compare_latencies, offer
from bench.routing.report import Bar, Options, latency_bars, read_options, report
from bench.routing.streams import LoadSpec, Phase, Stream
from serve_app.benchmark.rows import Outcome
from serve_app.benchmark.workload import Lengths
from testkit.serving.served import Served

NUM_SLOTS = 32
_START_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of load for one kind of replica, and its bars."""

    name: str
    num_lines: int
    line_output: int
    interactive_s: float
    interactive_per_s: float
    max_ttft_ratio: float | None = None
    """Largest allowed ratio; None: no bar."""
    max_gap_ratio: float | None = None


FULL = (
    Scale("timed", 1500, 160, 150.0, 2.0, 1.5, 1.3),
    Scale("small", 1200, 96, 150.0, 1.0, 2.5, 2.0),
    Scale("demo", 1500, 96, 120.0, 1.5),
)
QUICK = (Scale("timed", 160, 96, 4.0, 4.0, 1.5, 1.3),)


def main() -> int:
    """Measure on each kind of replica."""
    options = read_options(__doc__, kinds=[scale.name for scale in FULL])
    bars: list[Bar] = []
    figures: dict[str, Any] = {}
    loads: list[Offered] = []
    for scale in QUICK if options.is_quick else FULL:
        if not options.wants(scale.name):
            continue
        with KINDS[scale.name].start(options, num_replicas=1, max_num_seqs=NUM_SLOTS) as served:
            spec = _interactive(scale, options)
            print(f"{scale.name}: alone")
            alone = offer(served.url, spec)
            print(f"{scale.name}: beside a batch")
            # Other prompts of the same lengths: the prefix cache holds the ones before.
            beside, batch = _beside_a_batch(served, replace(spec, prompts_seed=1), scale, options)
        seen = figures_of(alone, beside, batch)
        bars += judge(scale, seen)
        figures[scale.name] = {"scale": asdict(scale), **seen}
        loads += [alone, beside]
    return report("interactive", options, bars, figures, loads, family="jobs")


def _interactive(scale: Scale, options: Options) -> LoadSpec:
    phase = Phase(end_s=scale.interactive_s, rate_per_s=scale.interactive_per_s)
    stream = replace(INTERACTIVE, phases=(phase,))
    return LoadSpec(model=KINDS[scale.name].model, streams=(stream,), seed=options.seed, timeout_s=3600.0)


def _beside_a_batch(
    served: Served, spec: LoadSpec, scale: Scale, options: Options
) -> tuple[Offered, dict[str, dict[str, Any]]]:
    """Offer the load beside a batch that already has every slot; return it and the batch at its start and end."""
    lines = Stream(
        name="lines",
        prompt=Lengths(16, 256, 64, 0.4),
        output=Lengths(8, 1024, scale.line_output, 0.4),
    )
    client = BatchClient(served.url)
    batch_id = client.submit(lines, scale.num_lines, options.seed, KINDS[scale.name].model)
    before = client.wait(batch_id, lambda batch: num_done(batch) > 0, _START_LIMIT_S)
    load = offer(served.url, spec)
    after = client.get(batch_id)
    if not is_final(after):
        client.cancel(batch_id)
        client.wait(batch_id, is_final, _START_LIMIT_S)
    return load, {"before": before, "after": after}


def figures_of(alone: Offered, beside: Offered, batch: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return all compared figures."""
    return {
        **compare_latencies(beside.rows, alone.rows),
        "num_interactive_failed": sum(row.outcome is not Outcome.OK for load in (beside, alone) for row in load.rows),
        "num_lines_done": [num_done(batch[when]) for when in ("before", "after")],
        "lasted": batch["after"]["status"] == "in_progress",
    }


def judge(scale: Scale, figures: dict[str, Any]) -> list[Bar]:
    """Return the bars."""
    prefix = f"{scale.name}: "
    num_before, num_after = figures["num_lines_done"]
    return [
        *latency_bars(scale.name, "a batch", figures, scale.max_ttft_ratio, scale.max_gap_ratio),
        Bar(f"{prefix}interactive requests failed", figures["num_interactive_failed"], 0),
        Bar(f"{prefix}the batch lasted to the end", float(figures["lasted"]), 1, is_lower_bound=True),
        Bar(f"{prefix}lines done beside it", num_after - num_before, 1, is_lower_bound=True),
    ]


if __name__ == "__main__":
    sys.exit(main())
