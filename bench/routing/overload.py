"""Goodput, starvation and recovery under overload: `python -m bench.routing.overload`.

One timed replica and a fixed mix of bands. Each load has its own prompts, which the prefix cache does not hold.
1. A flood gives the capacity in requests a second.
2. Loads around the capacity give the peak: the best goodput (tokens a second of requests within their band's targets).
3. One run with the SDKs' retries: normal load (0.7 of the peak's rate), 3x the peak's rate, normal load again.

A request is good if it ended whole and met its band's targets from its arrival. Its arrival is the attempt that was
not refused, as in a server's own metrics; the figures also have goodput from the first attempt.

A band starves while one of its requests waits (its last attempt was sent, was not refused, and has no token) and none
of its requests gets a first token. Recovery is the time after the overload from which on every window of requests does
as well as those before it. It is judged on the bands with latency targets: batch work accepted in the overload is
done afterwards, and its duration is arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.record import percentile, ratio
from bench.routing.applications import timed
from bench.routing.offer import Offered, offer
from bench.routing.report import Bar, read_options, report
from bench.routing.streams import Burst, LoadSpec, Phase, Stream, consecutive
from replicas.protocol import Band
from serve_app.benchmark.rows import Outcome, Row, Targets
from serve_app.benchmark.workload import Lengths
from serve_app.settings.by_band import BandQueues, BandWaits, QueueLimit

_INTERACTIVE_TTFT_S, _STANDARD_TTFT_S = 1.0, 5.0
TARGETS = {
    0: Targets(1e3 * _INTERACTIVE_TTFT_S, 150.0),
    1: Targets(1e3 * _STANDARD_TTFT_S, 250.0),
    2: Targets(),
}
_SHARES = {0: 0.3, 1: 0.4, 2: 0.3}
"""Share of the requests by band."""
_PEAK_FACTORS = (1.0, 1.1, 1.2)
_NORMAL, _OVERLOAD = 0.7, 3.0
_SIGMA = 0.25
"""Sigma of the lengths' logarithms, small enough for nearly equal means over a few hundred requests."""
_WAIT_SHARE = 0.15
"""Share of the TTFT target. A longer predicted wait is refused: the prompt is still to be computed after it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Durations in seconds, and sizes."""

    flood_requests: int = 300
    peak_s: float = 75.0
    before_s: float = 60.0
    overload_s: float = 300.0
    after_s: float = 120.0
    window_s: float = 5.0
    num_slots: int = 16
    max_starvation_s: float = 30.0
    max_queued_batch_requests: int = 200


QUICK = Scale(
    flood_requests=60, peak_s=10.0, before_s=8.0, overload_s=25.0, after_s=15.0, window_s=3.0, num_slots=8,
    max_starvation_s=10.0, max_queued_batch_requests=50,
)  # fmt: skip


def main() -> int:
    """Find the peak, run the overload, judge."""
    options = read_options(__doc__)
    scale = QUICK if options.is_quick else Scale()
    settings = {
        "num_replicas": 1,
        "max_num_seqs": scale.num_slots,
        "max_starvation_s": scale.max_starvation_s,
        "max_wait_s": BandWaits(_WAIT_SHARE * _INTERACTIVE_TTFT_S, _WAIT_SHARE * _STANDARD_TTFT_S),
        "max_queue": BandQueues(batch=QueueLimit(scale.max_queued_batch_requests, 64_000_000)),
        "coalesce_interval_s": 0.1,  # clients, ingress and replica share two cores here
    }
    factors = _PEAK_FACTORS[:1] if options.is_quick else _PEAK_FACTORS
    with timed(options, **settings) as served:
        burst = Burst(count=scale.flood_requests, spread_s=scale.flood_requests / 300)
        flood = offer(served.url, LoadSpec(_mix(bursts=(burst,)), options.seed))
        capacity_per_s = sustained_rate(flood.rows)
        print(f"capacity {capacity_per_s:.2f} requests/s")
        trials = []
        for number, factor in enumerate(factors, start=1):
            phase = Phase(end_s=scale.peak_s, rate_per_s=factor * capacity_per_s)
            trials.append(offer(served.url, LoadSpec(_mix((phase,)), options.seed + number)))
        goodputs = [goodput(trial.rows, 0.0, scale.peak_s) for trial in trials]
        peak_factor = factors[goodputs.index(max(goodputs))]
        peak_per_s = peak_factor * capacity_per_s
        print(f"peak {max(goodputs):.1f} tokens/s at {peak_per_s:.2f} requests/s")
        normal_per_s, overload_per_s = _NORMAL * peak_per_s, _OVERLOAD * peak_per_s
        phases = consecutive(
            (scale.before_s, normal_per_s), (scale.overload_s, overload_per_s), (scale.after_s, normal_per_s)
        )
        run = offer(served.url, LoadSpec(_mix(phases), options.seed + len(factors) + 1, has_retries=True))
    figures, bars = judge(scale, run, max(goodputs))
    figures |= {
        "scale": asdict(scale),
        "capacity_requests_per_s": capacity_per_s,
        "peak_requests_per_s": peak_per_s,
        "goodput_by_factor": dict(zip(map(str, factors), goodputs, strict=True)),
    }
    return report("overload", options, bars, figures, [flood, *trials, run])


def judge(scale: Scale, run: Offered, peak: float) -> tuple[dict[str, Any], list[Bar]]:
    """Return the figures and the bars."""
    start_s, end_s = scale.before_s, scale.before_s + scale.overload_s
    during = goodput(run.rows, start_s, end_s)
    starvation = {_name(band): starvation_s([r for r in run.rows if r.priority == band]) for band in _SHARES}
    recovery = recovery_s(run.rows, start_s, end_s, scale)
    server_errors = sum(row.outcome not in (Outcome.OK, Outcome.REFUSED) for row in run.rows)
    bars = [
        Bar("goodput under 3x overload / peak", ratio(during, peak), 0.95, True),
        *(Bar(f"longest starvation of {name}, s", value, scale.max_starvation_s) for name, value in starvation.items()),
        Bar("recovery, s", recovery, 10.0),
        Bar("requests that ended neither whole nor refused", server_errors, 0),
    ]
    return {
        "peak_goodput_tokens_per_s": peak,
        "overload_goodput_tokens_per_s": during,
        "overload_tokens_per_s": goodput(run.rows, start_s, end_s, lambda row: True),
        "overload_goodput_from_first_attempt": goodput(run.rows, start_s, end_s, _was_good_at_once),
        "overload_bands": {_name(band): _seen_of(run, band, start_s, end_s) for band in _SHARES},
        "starvation_s": starvation,
        "recovery_s": recovery,
        "good_shares": good_shares(run.rows, 0.0, end_s + scale.after_s, scale),
    }, bars


def sustained_rate(rows: Sequence[Row]) -> float:
    """Return requests per second in a flood, without its last tenth, when slots run empty."""
    ends = sorted(row.end_s for row in rows if row.outcome is Outcome.OK and row.end_s is not None)
    if not ends:
        raise RuntimeError("no request of the flood was served")
    counted = max(1, len(ends) * 9 // 10)
    return counted / ends[counted - 1]


def goodput(
    rows: Sequence[Row], start_s: float, end_s: float, is_counted: Callable[[Row], bool] | None = None
) -> float:
    """Return tokens per second of good requests, each token counted at its arrival."""
    num_tokens = sum(
        count
        for row in rows
        if (is_counted or is_good)(row)
        for at_s, count in zip(row.chunk_s, row.chunk_tokens, strict=True)
        if start_s <= at_s < end_s
    )
    return num_tokens / (end_s - start_s)


def is_good(row: Row) -> bool:
    """Return True if a request was served whole and within its band's targets, from the attempt that was served."""
    return row.last_sent_s is not None and _was_good_at_once(replace(row, scheduled_s=row.last_sent_s))


def starvation_s(rows: Sequence[Row]) -> float:
    """Return the longest time in which one of these requests waited and none got its first token."""
    events = []
    for row in rows:
        if row.last_sent_s is None or row.outcome is Outcome.REFUSED:
            continue
        until_s = row.chunk_s[0] if row.chunk_s else row.end_s
        if until_s is not None:
            events += [(row.last_sent_s, 1, False), (until_s, -1, bool(row.chunk_s))]
    longest_s = since_s = 0.0
    num_waiting = 0
    for at_s, change, is_first_token in sorted(events):
        if num_waiting:
            longest_s = max(longest_s, at_s - since_s)
        if num_waiting == 0 or is_first_token:
            since_s = at_s
        num_waiting += change
    return longest_s


def recovery_s(rows: Sequence[Row], start_s: float, end_s: float, scale: Scale) -> float | None:
    """Return the seconds after the overload until every later window is as good as before; None if never.

    The threshold is 0.95 of the mean share before the overload, or the worst window before if that is lower: a window
    has few requests, and at any load one or two are refused.
    """
    before = good_shares(rows, 0.0, start_s, scale)
    least = min(0.95 * sum(before.values()) / len(before), *before.values()) if before else 0.0
    bad = [at_s for at_s, share in good_shares(rows, end_s, end_s + scale.after_s, scale).items() if share < least]
    if not bad:
        return 0.0
    recovered_s = bad[-1] + _step_s(scale) - end_s
    return None if recovered_s + scale.window_s > scale.after_s else recovered_s


def good_shares(rows: Sequence[Row], start_s: float, end_s: float, scale: Scale) -> dict[float, float]:
    """Return the share of good requests in each window of [start_s, end_s), by the window's start."""
    num_windows = int((end_s - start_s - scale.window_s) / _step_s(scale)) + 1
    starts = [start_s + number * _step_s(scale) for number in range(num_windows)]
    shares = {at_s: _good_share(rows, at_s, at_s + scale.window_s) for at_s in starts}
    return {at_s: share for at_s, share in shares.items() if share is not None}


def _step_s(scale: Scale) -> float:
    return scale.window_s / 5


def _good_share(rows: Sequence[Row], start_s: float, end_s: float) -> float | None:
    """Return the share of good requests among those scheduled in [start_s, end_s)."""
    scheduled = [row for row in rows if start_s <= row.scheduled_s < end_s and TARGETS[row.priority] != Targets()]
    return ratio(sum(is_good(row) for row in scheduled), len(scheduled))


def _was_good_at_once(row: Row) -> bool:
    """Return True if a request is good from its scheduled time; after a refusal it mostly is too late."""
    return TARGETS[row.priority].are_met(row)


def _seen_of(run: Offered, band: int, start_s: float, end_s: float) -> dict[str, Any]:
    """Return a band's figures in the overload."""
    of_band = [row for row in run.rows if row.priority == band]
    waits = [
        r.chunk_s[0] - r.last_sent_s
        for r in of_band
        if r.chunk_s and r.last_sent_s and start_s <= r.last_sent_s < end_s
    ]
    return {
        "tokens_per_s": goodput(of_band, start_s, end_s, lambda row: True),
        "goodput_tokens_per_s": goodput(of_band, start_s, end_s),
        "served_ttft_s": {str(p): percentile(waits, p) for p in (50, 90, 99)} if waits else {},
    }


def _mix(phases: tuple[Phase, ...] = (), bursts: tuple[Burst, ...] = ()) -> tuple[Stream, ...]:
    """Return one stream per band, each with its share of the phases' rates and of the bursts."""
    return tuple(
        Stream(
            name=_name(band),
            band=_name(band),
            user=f"tenant-{band}",
            phases=tuple(replace(p, rate_per_s=p.rate_per_s * share) for p in phases),
            bursts=tuple(replace(b, count=round(b.count * share)) for b in bursts),
            prompt=Lengths(16, 384, 96, _SIGMA),
            output=Lengths(8, 192, 48, _SIGMA),
        )
        for band, share in _SHARES.items()
    )


def _name(band: int) -> str:
    return Band(band).name.lower()


if __name__ == "__main__":
    sys.exit(main())
