"""Effect of a standing batch backlog on interactive work: `python -m bench.routing.backlog`.

One replica. The same interactive requests are sent twice at the same times: to an idle replica, and to one with 1,000
batch requests. Then the batch runs alone. Each run has other prompts of the same lengths: the prefix cache would hold
those of the run before.

Interactive latencies are compared over the requests that came and ended while batch requests wanted every slot. Total
tokens/s (prompt and output) are compared over the same stretch of the backlog.

The kinds of replica: a timed one; a small random model on CPU, where a step with more sequences is itself slower
(`decode_step_ratio` gives that part of the ratio); and the demo model, whose steps are mostly per-sequence overhead.
Latencies of the demo model have no bar.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.record import ratio
from bench.routing.applications import INTERACTIVE, KINDS
from bench.routing.offer import Offered, compare_latencies, offer, tokens_computed
from bench.routing.report import Bar, Options, latency_bars, read_options, report
from bench.routing.streams import Burst, LoadSpec, Phase, Stream
from serve_app.benchmark.rows import Outcome, Row
from serve_app.benchmark.workload import Lengths
from testkit.serving.served import Served

NUM_SLOTS = 32


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of load for one kind of replica, and its bars."""

    name: str
    num_batch: int
    batch_output: int
    lead_s: float
    """Time from the first batch request to the first interactive one; by then every slot is taken."""
    interactive_s: float
    """Duration of the interactive arrivals; the backlog must outlast it."""
    interactive_per_s: float
    max_ttft_ratio: float | None = None
    """Largest allowed ratio; None: no bar."""
    max_gap_ratio: float | None = None


FULL = (
    Scale("timed", 1000, 128, 20.0, 100.0, 3.0, 1.5, 1.3),
    Scale("small", 1000, 96, 20.0, 150.0, 1.0, 2.5, 2.0),
    Scale("demo", 1000, 256, 20.0, 75.0, 2.0),
)
QUICK = (Scale("timed", 80, 96, 2.0, 4.0, 4.0, 1.5, 1.3),)


def main() -> int:
    """Measure on each kind of replica."""
    options = read_options(__doc__, kinds=[scale.name for scale in FULL])
    bars: list[Bar] = []
    figures: dict[str, Any] = {}
    loads: list[Offered] = []
    for scale in QUICK if options.is_quick else FULL:
        if not options.wants(scale.name):
            continue
        room = f"{2 * scale.num_batch}/4000000"
        settings = {
            "num_replicas": 1,
            "max_num_seqs": NUM_SLOTS,
            "max_queue": f"interactive={room},standard={room}",
        }
        with KINDS[scale.name].start(options, **settings, max_queue_wait_s=3600) as served:
            runs = _measure(served, scale, options)
        seen = figures_of(scale.lead_s, *runs)
        bars += judge(scale, seen)
        figures[scale.name] = {"scale": asdict(scale), **seen}
        loads += runs
    return report("backlog", options, bars, figures, loads)


def _measure(served: Served, scale: Scale, options: Options) -> tuple[Offered, Offered, Offered]:
    """Run interactive work alone, both together, batch work alone."""
    end_s = scale.lead_s + scale.interactive_s
    phase = Phase(start_s=scale.lead_s, end_s=end_s, rate_per_s=scale.interactive_per_s)
    interactive = replace(INTERACTIVE, phases=(phase,))
    batch = Stream(
        name="batch",
        band="batch",
        user="night",
        bursts=(Burst(count=scale.num_batch, spread_s=scale.num_batch / 100),),
        prompt=Lengths(16, 256, 64, 0.4),
        output=Lengths(8, 1024, scale.batch_output, 0.4),
    )
    model, prompts_seeds = KINDS[scale.name].model, itertools.count()

    def run(*streams: Stream) -> Offered:
        print(f"{scale.name}: {' and '.join(stream.name for stream in streams)}")
        return offer(served.url, LoadSpec(streams, options.seed, next(prompts_seeds), model, timeout_s=3600.0))

    return run(interactive), run(interactive, batch), run(batch)


def judge(scale: Scale, figures: dict[str, Any]) -> list[Bar]:
    """Return the bars, for requests with a standing backlog over their whole life."""
    prefix = f"{scale.name}: "
    return [
        *latency_bars(scale.name, "backlog", figures, scale.max_ttft_ratio, scale.max_gap_ratio),
        Bar(f"{prefix}batch requests lost", figures["num_batch_lost"], 0),
        Bar(f"{prefix}interactive requests failed", figures["num_interactive_failed"], 0),
        Bar(f"{prefix}share of interactive requests beside a standing backlog", figures["share_beside"], 0.9, True),
        Bar(f"{prefix}total tokens/s, both / batch alone", figures["tokens_per_s_ratio"], 0.95, True),
    ]


def figures_of(lead_s: float, alone: Offered, both: Offered, batch: Offered) -> dict[str, Any]:
    """Return all compared figures."""
    stands_until_s = backlog_stands_until_s(both.of("batch"))
    beside = [row for row in both.of("interactive") if (row.end_s or row.scheduled_s) <= stands_until_s]
    times_s = {row.scheduled_s for row in beside}
    same = [row for row in alone.rows if row.scheduled_s in times_s]
    rates = [_total_rate(run, lead_s) for run in (both, batch)]
    return {
        "backlog_stands_until_s": stands_until_s,
        "share_beside": ratio(len(beside), len(alone.rows)),
        **compare_latencies(beside, same),
        "num_batch_lost": sum(row.outcome is not Outcome.OK for run in (both, batch) for row in run.of("batch")),
        "num_interactive_failed": sum(row.outcome is not Outcome.OK for row in [*alone.rows, *both.of("interactive")]),
        "total_tokens_per_s": rates,
        "tokens_per_s_ratio": ratio(*rates),
    }


def backlog_stands_until_s(batch: Sequence[Row]) -> float:
    """Return the first-token time of the last batch request: until then batch work took every free slot."""
    return max((row.chunk_s[0] for row in batch if row.chunk_s), default=0.0)


def _total_rate(run: Offered, lead_s: float) -> float | None:
    """Return prompt and output tokens per second, from the lead to the end of the standing backlog."""
    end_s = backlog_stands_until_s(run.of("batch"))
    if end_s <= lead_s:
        return None
    return sum(tokens_computed(run.rows, lead_s, end_s)) / (end_s - lead_s)


if __name__ == "__main__":
    sys.exit(main())
