"""Distribution of work over replicas: `python -m bench.routing.balance`.

Four timed replicas.
1. 200 requests at once: outstanding tokens of the replicas, max / mean, from the requests each was given and from
   `/load`.
2. A trace of shared prefixes, under LeastTokens and under LeastRequests: prefix hit rate, TTFT, hottest replica.
3. Traces of skewed lengths that no policy can know beforehand, under LeastTokens and under power of two choices with
   early binding, as in Ray Serve's router. Beside them a simulated oracle that knows the lengths
   (`bench.routing.oracle`).

Percentiles are over all traces together: the worst percent of one trace is one or two moments with every slot taken.
At this rate three in four slots are taken on average. Nearer to full, capacity decides TTFT, not the policy: at 8
requests a second, a slot that stays empty for 10 ms until its next request costs 20 % of the oracle's p99.

The costs of engine, processes and HTTP are not the router's. The TTFT overhead of an idle system is added to the
oracle's TTFT. The oracle's steps are lengthened by the extra time between tokens in the measured run.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.record import percentile, ratio
from bench.routing.applications import timed
from bench.routing.offer import Offered, Seen, offer, watching
from bench.routing.oracle import Arrival, run_oracle
from bench.routing.report import Bar, Options, read_options, report
from bench.routing.streams import Burst, LoadSpec, Phase, Prefixes, Stream
from serve_app.benchmark.rows import Row
from serve_app.benchmark.workload import Lengths
from testkit.engine.timed_runner import STEP_TIMES
from testkit.serving.served import Served

NUM_REPLICAS = 4
LEAST_TOKENS, LEAST_LOADED, RAY_DEFAULT = "least_tokens", "least_requests", "power_of_two, bound when it comes"
_SETTINGS: dict[str, dict[str, object]] = {
    LEAST_TOKENS: {},
    LEAST_LOADED: {"baseline_policy": "least_requests"},
    RAY_DEFAULT: {"baseline_policy": "power_of_two", "max_queued_per_replica": 1000},
}
_BUDGET = 512
_NUM_SLOTS_AT_ONCE, _NUM_SLOTS = 64, 8
_IDLE_ARRIVAL = Arrival(0.0, 1, 96, 4)


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of load."""

    num_at_once: int = 200
    trace_s: float = 120.0
    prefix_per_s: float = 12.0
    skewed_per_s: float = 7.0
    num_skewed: int = 3
    """Number of skewed traces, each with its own seed."""
    with_prefixes: tuple[str, ...] = (LEAST_TOKENS, LEAST_LOADED)
    with_skewed: tuple[str, ...] = (LEAST_TOKENS, RAY_DEFAULT)


QUICK = Scale(num_at_once=40, trace_s=5.0, num_skewed=1, with_prefixes=(LEAST_TOKENS,), with_skewed=(LEAST_TOKENS,))


def main() -> int:
    """Run all three parts; each policy gets its own application."""
    options = read_options(__doc__)
    scale = QUICK if options.is_quick else Scale()
    common = {"num_replicas": NUM_REPLICAS, "max_num_batched_tokens": _BUDGET, "load_poll_period_s": 0.2}
    with timed(options, **common, max_num_seqs=_NUM_SLOTS_AT_ONCE) as served:
        at_once, at_once_figures = _all_at_once(served, scale, options)
    prefix: dict[str, dict[str, Any]] = {}
    skewed: dict[str, list[Offered]] = {}
    loads = [at_once]
    idle_ttft_s: list[float] = []
    for policy in dict.fromkeys((*scale.with_prefixes, *scale.with_skewed)):
        with timed(options, **common, **_SETTINGS[policy], max_num_seqs=_NUM_SLOTS, num_blocks=1024) as served:
            idle_ttft_s += _idle_ttft_s(served, options)
            if policy in scale.with_prefixes:
                offered, prefix[policy] = _prefix_trace(served, scale, options)
                loads.append(offered)
            if policy in scale.with_skewed:
                seeds = range(options.seed, options.seed + scale.num_skewed)
                skewed[policy] = [offer(served.url, _skewed_spec(scale, seed)) for seed in seeds]
                loads += skewed[policy]
    skewed_figures = compare_skewed(skewed, statistics.median(idle_ttft_s), options)
    bars = _judge(at_once_figures, prefix, skewed_figures)
    figures = {"scale": asdict(scale), "at_once": at_once_figures, "prefixes": prefix, "skewed": skewed_figures}
    return report("balance", options, bars, figures, loads)


def _judge(at_once: dict[str, Any], prefix: dict[str, dict[str, Any]], skewed: dict[str, Any]) -> list[Bar]:
    own, least_loaded = prefix[LEAST_TOKENS], prefix.get(LEAST_LOADED, {})
    p99 = skewed["ttft_p99_s"]
    hit_rates, ttfts = ((own[key], least_loaded.get(key)) for key in ("hit_rate", "ttft_p50_s"))
    return [
        Bar("at once: tokens given to replicas, max / mean", at_once["given_max_over_mean"], 1.15),
        Bar("at once: outstanding tokens in /load, max / mean", at_once["load_max_over_mean"], 1.15),
        Bar("prefixes: hit rate, Headway / least loaded", ratio(*hit_rates), 1.0, True),
        Bar("prefixes: TTFT p50, Headway / least loaded", ratio(*ttfts), 1.0),
        Bar("prefixes: requests on the hottest replica, max / mean", own["hot_spot"], 1.5),
        Bar("skewed: TTFT p99, Headway / oracle", ratio(p99[LEAST_TOKENS], p99["oracle"]), 1.2),
        Bar("skewed: TTFT p99, Headway / power of two choices", ratio(p99[LEAST_TOKENS], p99.get(RAY_DEFAULT)), 1.0),
    ]


def _all_at_once(served: Served, scale: Scale, options: Options) -> tuple[Offered, dict[str, Any]]:
    """Send 200 requests of mixed sizes within a fifth of a second; none ends before all are placed."""
    stream = Stream(
        name="at-once",
        bursts=(Burst(count=scale.num_at_once, spread_s=scale.num_at_once / 1000),),
        prompt=Lengths(16, 1024, 128, 0.8),
        output=Lengths(32, 512, 96, 0.6),
    )
    with watching(served.replicas, 0.1) as watch:
        offered = offer(served.url, LoadSpec(streams=(stream,), seed=options.seed))
    given: Counter[str] = Counter()
    for row in offered.rows:
        if row.replica_id is not None:
            given[row.replica_id] += row.num_prompt_tokens + row.num_output_tokens
    return offered, {
        "given_tokens": dict(given),
        "given_max_over_mean": max_over_mean(given),
        "load_max_over_mean": _load_at_its_height(watch.seen),
    }


def _load_at_its_height(looks: Sequence[Seen]) -> float | None:
    """Return max / mean of `/load`'s outstanding tokens, at the look with the largest sum."""
    key = "outstanding_tokens"
    known = [{r["replica_id"]: r[key] for r in look.value} for look in looks if all(key in r for r in look.value)]
    return max_over_mean(max(known, key=lambda tokens: sum(tokens.values()))) if known else None


def max_over_mean(amounts: dict[str, int] | Counter[str]) -> float | None:
    """Return the largest amount / the mean over all replicas, including those without any."""
    values = list(amounts.values())
    return ratio(max(values), sum(values) / NUM_REPLICAS) if values else None


def _prefix_trace(served: Served, scale: Scale, options: Options) -> tuple[Offered, dict[str, Any]]:
    """Offer long shared prefixes, more than one replica's cache holds."""
    stream = Stream(
        name="prefixes",
        band="interactive",
        phases=(Phase(end_s=scale.trace_s, rate_per_s=scale.prefix_per_s),),
        prompt=Lengths(8, 192, 48, 0.5),
        output=Lengths(8, 128, 32, 0.5),
        prefixes=Prefixes(num_groups=48, num_tokens=512, zipf_exponent=1.0),
    )
    before = _cache_counts(served)
    offered = offer(served.url, LoadSpec(streams=(stream,), seed=options.seed))
    hits, queries = (now - then for now, then in zip(_cache_counts(served), before, strict=True))
    placed = Counter(row.replica_id for row in offered.rows if row.replica_id is not None)
    ttft_s = [row.ttft_s for row in offered.rows if row.ttft_s is not None]
    return offered, {
        "hit_rate": ratio(hits, queries),
        "ttft_p50_s": percentile(ttft_s, 50),
        "ttft_p99_s": percentile(ttft_s, 99),
        "hot_spot": max_over_mean(placed),
    }


def _cache_counts(served: Served) -> tuple[float, float]:
    return served.metric("vllm:prefix_cache_hits_total"), served.metric("vllm:prefix_cache_queries_total")


def _skewed_spec(scale: Scale, seed: int) -> LoadSpec:
    """Return a load of short answers, one in ten 20 times longer; `max_tokens` is the same and hides the length."""
    outputs = {"short": (0.9, Lengths(4, 900, 24, 0.5)), "long": (0.1, Lengths(4, 900, 480, 0.2))}
    streams = (
        Stream(
            name=name,
            phases=(Phase(scale.trace_s, share * scale.skewed_per_s),),
            prompt=Lengths(16, 1024, 96, 0.8),
            output=output,
            max_tokens=1000,
        )
        for name, (share, output) in outputs.items()
    )
    return LoadSpec(streams=tuple(streams), seed=seed)


def compare_skewed(skewed: dict[str, list[Offered]], idle_ttft_s: float, options: Options) -> dict[str, Any]:
    """Return TTFT percentiles of every policy and of the oracle, over all traces together."""
    step_times = STEP_TIMES[options.settings.get("step_times", options.step_times)]
    some = next(iter(skewed.values()))
    traces = [
        [Arrival(r.scheduled_s, r.priority, r.num_prompt_tokens, r.num_output_tokens) for r in offered.rows]
        for offered in some
    ]
    fleet = (NUM_REPLICAS, _NUM_SLOTS, _BUDGET)
    nominal = [run_oracle(arrivals, step_times, *fleet) for arrivals in traces]
    gap_s = percentile(
        [gap_s for offered in skewed[LEAST_TOKENS] for row in offered.rows for gap_s in row.inter_token_s], 50
    )
    step_overhead_s = max(0.0, gap_s - statistics.median(run.gap_s for run in nominal))
    slower = replace(step_times, base_s=step_times.base_s + step_overhead_s)
    overhead_s = max(0.0, idle_ttft_s - run_oracle([_IDLE_ARRIVAL], step_times, *fleet).ttft_s[0])
    ttft_s = {policy: _ttft_s(_rows(its)) for policy, its in skewed.items()}
    ttft_s["oracle"] = [
        value_s + overhead_s for arrivals in traces for value_s in run_oracle(arrivals, slower, *fleet).ttft_s
    ]
    ttft_s["oracle without any overhead"] = [value_s for run in nominal for value_s in run.ttft_s]
    return {
        "idle_overhead_s": overhead_s,
        "step_overhead_s": step_overhead_s,
        "ttft_p50_s": {policy: percentile(values_s, 50) for policy, values_s in ttft_s.items()},
        "ttft_p99_s": {policy: percentile(values_s, 99) for policy, values_s in ttft_s.items()},
        "hot_spot": {
            policy: max_over_mean(Counter(row.replica_id for row in _rows(its) if row.replica_id is not None))
            for policy, its in skewed.items()
        },
    }


def _rows(traces: Sequence[Offered]) -> list[Row]:
    return [row for offered in traces for row in offered.rows]


def _idle_ttft_s(served: Served, options: Options) -> list[float]:
    """Measure times to first token on an idle system."""
    stream = Stream(
        name="idle",
        bursts=(Burst(count=10, spread_s=5.0),),
        prompt=Lengths(_IDLE_ARRIVAL.num_prompt_tokens, _IDLE_ARRIVAL.num_prompt_tokens),
        output=Lengths(_IDLE_ARRIVAL.num_output_tokens, _IDLE_ARRIVAL.num_output_tokens),
    )
    return _ttft_s(offer(served.url, LoadSpec(streams=(stream,), seed=options.seed)).rows)


def _ttft_s(rows: Sequence[Row]) -> list[float]:
    """Return the TTFT of every request; one without a first token counts with its whole duration."""
    return [row.ttft_s if row.ttft_s is not None else (row.end_s or 0.0) - row.scheduled_s for row in rows]


if __name__ == "__main__":
    sys.exit(main())
