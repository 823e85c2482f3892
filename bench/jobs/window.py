"""Completion of a batch within its window on a nearly full machine: `python -m bench.jobs.window`.

One timed replica, whose speed is first measured with a batch alone. Then three kinds of work share it:
- interactive requests, which take a quarter of that speed;
- a backlog of another tenant's batch requests without deadline, which takes all it can get;
- a batch whose lines, together with the interactive requests, need 90 % of the replica during its window.

In fair halves with the backlog the batch would be far too late. It is in time only if its lines are raised above the
backlog early enough. It must not disturb interactive work.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from bench.jobs.client import BatchClient, is_final, num_done
from bench.routing.applications import COARSE_STREAMS, timed
from bench.routing.offer import Offered, RunningLoad
from bench.routing.report import Bar, Options, read_options, report
from bench.routing.streams import Burst, LoadSpec, Phase, Stream
from serve_app.benchmark.rows import Outcome
from serve_app.benchmark.workload import Lengths
from testkit.serving.served import Served

MIN_SHARE = 0.99
LOAD = 0.9
INTERACTIVE = 0.25
NUM_SLOTS = 32
_PROMPT, _OUTPUT = Lengths(16, 256, 64, 0.4), Lengths(16, 512, 96, 0.4)
_LINES = Stream(name="lines", prompt=_PROMPT, output=_OUTPUT)
_LIMIT_S = 1800.0
_LEAD_S = 10.0
"""Time from the first request of the backlog, which fills every slot, to the batch."""
_LATE_AFTER_S = 0.1
"""Delay after which a send counts as late; small delays do not matter over hundreds of seconds."""
_MEASURED = (0.2, 0.8)
"""Part of the first batch, by lines, in which the speed is measured: at both ends slots are empty."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of work."""

    num_lines_alone: int
    """Lines of the batch that measures the replica's speed."""
    window_s: int


FULL = Scale(700, 300)
QUICK = Scale(160, 30)


@dataclass(frozen=True, slots=True)
class Seen:
    """Result of the work."""

    lines_per_s: float
    """Speed of the batch alone."""
    num_lines: int
    """Number of lines of the batch with a window."""
    batch: dict[str, Any]
    """Final state of the batch with a window."""
    load: Offered
    """Interactive requests and the backlog; requests open at the end of the batch are cut off."""
    lasted: bool
    """True if the load still ran at the end of the batch."""


def main() -> int:
    """Measure and judge."""
    options = read_options(__doc__)
    scale = QUICK if options.is_quick else FULL
    queue = "interactive=20000/4000000,standard=20000/4000000"
    settings = {"max_num_seqs": NUM_SLOTS, "max_queue_wait_s": 36000, "max_queue": queue}
    with timed(options, num_replicas=1, **settings, **COARSE_STREAMS) as served:
        seen = _measure(served, scale, options)
    figures = {"scale": asdict(scale), **figures_of(seen)}
    return report("window", options, judge(figures), figures, [seen.load], family="jobs")


def _measure(served: Served, scale: Scale, options: Options) -> Seen:
    client = BatchClient(served.url)
    alone = client.submit(_LINES, scale.num_lines_alone, options.seed)
    lines_per_s = _lines_per_s(client, alone, scale.num_lines_alone)
    num_lines = round((LOAD - INTERACTIVE) * lines_per_s * scale.window_s)
    print(f"{lines_per_s:.2f} lines a second alone; {num_lines} lines in a window of {scale.window_s} s")
    load = RunningLoad(served.url, _load(lines_per_s, scale, options))
    time.sleep(_LEAD_S)
    batch_id = client.submit(_LINES, num_lines, options.seed + 1, window=f"{scale.window_s}s")
    batch = client.wait(batch_id, is_final, _LIMIT_S)
    lasted = load.is_running
    load.stop()
    return Seen(lines_per_s, num_lines, batch, load.wait(), lasted)


def _lines_per_s(client: BatchClient, batch_id: str, num_lines: int) -> float:
    (from_s, first), (to_s, last) = (_once_done(client, batch_id, share * num_lines) for share in _MEASURED)
    client.wait(batch_id, is_final, _LIMIT_S)
    return (last - first) / (to_s - from_s)


def _once_done(client: BatchClient, batch_id: str, num_lines: float) -> tuple[float, int]:
    """Wait until at least `num_lines` lines are done; return the time and the number of lines done."""
    batch = client.wait(batch_id, lambda batch: num_done(batch) >= num_lines, _LIMIT_S)
    return time.monotonic(), num_done(batch)


def _load(lines_per_s: float, scale: Scale, options: Options) -> LoadSpec:
    end_s = scale.window_s * 1.2
    interactive = Stream(
        name="interactive",
        band="interactive",
        user="people",
        phases=(Phase(end_s=end_s, rate_per_s=INTERACTIVE * lines_per_s),),
        prompt=_PROMPT,
        output=_OUTPUT,
    )
    backlog = Stream(
        name="backlog",
        band="batch",
        user="night",
        bursts=(Burst(count=round(end_s * lines_per_s), spread_s=end_s / 4),),
        prompt=_PROMPT,
        output=_OUTPUT,
    )
    streams, seed = (interactive, backlog), options.seed + 2
    return LoadSpec(streams=streams, seed=seed, timeout_s=3600.0, late_after_s=_LATE_AFTER_S)


def figures_of(seen: Seen) -> dict[str, Any]:
    """Return all judged figures."""
    batch = seen.batch
    ended_unix_s = batch["completed_at"] or batch["expired_at"] or batch["failed_at"] or 0
    interactive = [row.outcome for row in seen.load.of("interactive")]
    return {
        "lines_per_s_alone": seen.lines_per_s,
        "num_lines": seen.num_lines,
        "num_in_time": batch["request_counts"]["completed"],
        "status": batch["status"],
        "took_s": ended_unix_s - batch["created_at"],
        "num_interactive": len(interactive),
        "num_interactive_failed": sum(outcome not in (Outcome.OK, Outcome.CUT_OFF) for outcome in interactive),
        "num_backlog_done": sum(row.outcome is Outcome.OK for row in seen.load.of("backlog")),
        "lasted": seen.lasted,
    }


def judge(figures: dict[str, Any]) -> list[Bar]:
    """Return the bars."""
    return [
        Bar(
            "share of the lines that were done within the window", figures["num_in_time"] / figures["num_lines"],
            MIN_SHARE, is_lower_bound=True,
        ),
        Bar("interactive requests failed", figures["num_interactive_failed"], 0),
        Bar("the backlog stood to the end of the batch", float(figures["lasted"]), 1, is_lower_bound=True),
        Bar("requests of the backlog done beside it", figures["num_backlog_done"], 1, is_lower_bound=True),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
