"""Scaling of replicas with the load: `python -m bench.routing.burst`.

Timed replicas, scaled from 1 to 6. No request may fail in either part.
1. A steady load at a third of one replica's capacity jumps to ten times as much. Measured: the delay until Serve's
   target rises, and the idle time of each new replica after it starts to run.
2. A square wave for 20 minutes. Measured: how often per period the target turns from rising to falling. Following
   the wave once is one such reversal.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.routing.applications import COARSE_STREAMS, timed
from bench.routing.offer import Offered, RunningLoad, Seen, Watch, watching
from bench.routing.report import Bar, Options, read_options, report
from bench.routing.streams import LoadSpec, Phase, Stream, consecutive
from serve_app.benchmark.workload import Lengths
from testkit.serving.served import Served

MIN_REPLICAS, MAX_REPLICAS = 1, 6
_NUM_SLOTS = 16
_LOOK_PERIOD_S = 0.1
# On two cores a replica takes half a minute to start; requests that wait for it must not be refused.
_PATIENCE = {"max_wait_s": "standard=600"}


@dataclass(frozen=True, slots=True)
class Scale:
    """Rates and durations in seconds."""

    low_per_s: float = 1.5
    high_per_s: float = 15.0
    before_s: float = 30.0
    burst_s: float = 90.0
    after_s: float = 60.0
    half_period_s: float = 60.0
    num_periods: int = 10


QUICK = Scale(before_s=3.0, burst_s=18.0, after_s=2.0, half_period_s=3.0, num_periods=1)


@dataclass(frozen=True, slots=True)
class Replicas:
    """State of the replicas at one moment, from Serve and the ingress."""

    target: int
    running_ids: frozenset[str]
    busy_ids: frozenset[str]


def main() -> int:
    """Run both parts on one application."""
    options = read_options(__doc__)
    scale = QUICK if options.is_quick else Scale()
    scaling: dict[str, object] = {"min_replicas": MIN_REPLICAS, "max_replicas": MAX_REPLICAS}
    with timed(options, **scaling, **_PATIENCE, **COARSE_STREAMS, max_num_seqs=_NUM_SLOTS) as served:
        burst, burst_seen = _observe(
            served,
            consecutive(
                (scale.before_s, scale.low_per_s),
                (scale.burst_s, scale.high_per_s),
                (scale.after_s, scale.low_per_s),
            ),
            options,
        )
        low, high = (scale.half_period_s, scale.low_per_s), (scale.half_period_s, scale.high_per_s)
        wave, wave_seen = _observe(served, consecutive(*(low, high) * scale.num_periods), options)
    burst_at_unix_s = burst.started_unix_s + scale.before_s
    decision_s = decision_delay_s(burst_seen.seen, burst_at_unix_s)
    idle_s = idle_before_first_work_s(burst_seen.seen, burst_at_unix_s + scale.burst_s)
    turns = num_reversals([seen.value.target for seen in wave_seen.seen])
    bars = [
        Bar("from the burst to the decision to scale up, s", decision_s, 2.0),
        Bar("from a new replica running to its first work, worst, s", max(idle_s.values(), default=None), 1.0),
        Bar("square wave: reversals a period", turns / scale.num_periods, 1.0),
        Bar("square wave: highest target", max((s.value.target for s in wave_seen.seen), default=0), 2.0, True),
        Bar("requests that failed", burst.num_failed + wave.num_failed, 0),
    ]
    figures = {
        "scale": asdict(scale),
        "decision_s": decision_s,
        "idle_before_first_work_s": idle_s,
        "num_reversals": turns,
        "burst_history": history(burst_seen.seen, burst.started_unix_s),
        "wave_history": history(wave_seen.seen, wave.started_unix_s),
        "num_failed_looks": burst_seen.num_failed + wave_seen.num_failed,
    }
    return report("burst", options, bars, figures, [burst, wave])


def decision_delay_s(seen: Sequence[Seen], burst_at_unix_s: float) -> float | None:
    """Return the seconds from the burst until Serve's target exceeds its value before; None if it never does."""
    before = [look.value.target for look in seen if look.at_unix_s < burst_at_unix_s]
    after = [look for look in seen if look.at_unix_s >= burst_at_unix_s]
    rises_unix_s = (look.at_unix_s for look in after if before and look.value.target > before[-1])
    rise_unix_s = next(rises_unix_s, None)
    return None if rise_unix_s is None else rise_unix_s - burst_at_unix_s


def idle_before_first_work_s(seen: Sequence[Seen], burst_ends_unix_s: float) -> dict[str, float]:
    """Return, for each replica that started during the burst, the seconds until it was first seen with work.

    A replica that never had work counts until the last look. Replicas that started after the burst are left out: there
    may be no work for them.
    """
    if not seen:
        return {}
    idle_s = {}
    known = set(seen[0].value.running_ids)
    for number, look in enumerate(seen):
        for replica_id in look.value.running_ids - known:
            known.add(replica_id)
            if look.at_unix_s < burst_ends_unix_s:
                busy = (later.at_unix_s for later in seen[number:] if replica_id in later.value.busy_ids)
                idle_s[replica_id] = next(busy, seen[-1].at_unix_s) - look.at_unix_s
    return idle_s


def num_reversals(targets: Sequence[int]) -> int:
    """Return the number of times that the target rises and then falls."""
    changes = [later - earlier for earlier, later in itertools.pairwise(targets) if later != earlier]
    return sum(earlier > 0 > later for earlier, later in itertools.pairwise(changes))


def history(seen: Sequence[Seen], started_unix_s: float) -> list[dict[str, float]]:
    """Return target and number of running replicas at each change."""

    def state(look: Seen) -> tuple[int, int]:
        return look.value.target, len(look.value.running_ids)

    return [
        {"at_s": round(next(looks).at_unix_s - started_unix_s, 2), "target": target, "running": num_running}
        for (target, num_running), looks in itertools.groupby(seen, state)
    ]


def _observe(served: Served, phases: tuple[Phase, ...], options: Options) -> tuple[Offered, Watch]:
    """Offer a load and watch the replicas until it is over."""
    stream = Stream(
        name="steady",
        phases=phases,
        prompt=Lengths(16, 384, 96, 0.5),
        output=Lengths(8, 256, 64, 0.5),
    )
    with watching(lambda: _look(served), _LOOK_PERIOD_S) as watch:
        return RunningLoad(served.url, LoadSpec(streams=(stream,), seed=options.seed)).wait(), watch


def _look(served: Served) -> Replicas:
    deployment = served.deployment("Model")
    running = {str(r["replica_id"]) for r in deployment["replicas"] if r["state"] == "RUNNING"}
    load = served.replicas()
    busy = {str(r["replica_id"]) for r in load if r["num_running"] + r["num_waiting"] + r["num_in_flight"] > 0}
    return Replicas(deployment["target_num_replicas"], frozenset(running), frozenset(busy))


if __name__ == "__main__":
    sys.exit(main())
