"""Does overload cost goodput, starve a band, or linger? `python -m bench.routing.overload`.

One timed replica and a fixed mix of bands. 1. A flood tells how many requests a second it can serve. 2. Loads
around that give the peak: the best goodput (tokens a second of requests inside their band's targets) of any.
3. One run, with the SDKs' retries: normal load (0.7 of the peak's rate), 3x the peak's rate, normal load again.

A band starves while one of its requests waits (its last attempt has left, was not refused, and has no token)
and none of its requests gets a first token. Recovery is the time after the overload from which on every window
of requests does as well as before it (within 5 %).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.load.rows import Outcome, Row
from bench.load.spec import Burst, Lengths, LoadSpec, Phase, Stream, Targets
from bench.load.summary import BAND_NAMES, is_good
from bench.routing.applications import timed
from bench.routing.offer import Offered, offer
from bench.routing.report import Bar, ratio, read_options, report

TARGETS = {0: Targets(ttft_s=1.0, tpot_s=0.15), 1: Targets(ttft_s=5.0, tpot_s=0.25), 2: Targets(ttft_s=120.0)}
_SHARES = {0: 0.3, 1: 0.4, 2: 0.3}
"""Of the requests, by band."""
_PEAK_FACTORS = (0.7, 0.8, 0.9, 1.0, 1.1)
_NORMAL, _OVERLOAD = 0.7, 3.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How long everything lasts, seconds."""

    flood_requests: int = 300
    peak_s: float = 60.0
    before_s: float = 60.0
    overload_s: float = 300.0
    after_s: float = 120.0
    window_s: float = 5.0
    num_slots: int = 16
    max_starvation_s: float = 30.0


QUICK = Scale(
    flood_requests=24, peak_s=5.0, before_s=4.0, overload_s=6.0, after_s=8.0, window_s=2.0, num_slots=8,
    max_starvation_s=5.0,
)  # fmt: skip


def main() -> int:
    """Find the peak, overload, judge."""
    options = read_options(__doc__)
    scale = QUICK if options.is_quick else Scale()
    settings = {"num_replicas": 1, "max_num_seqs": scale.num_slots, "max_starvation_s": scale.max_starvation_s}
    factors = _PEAK_FACTORS[1:4:2] if options.is_quick else _PEAK_FACTORS
    with timed(options, **settings) as served:
        flood = offer(served.url, _spec(_flood(scale), options.seed))
        capacity_per_s = sustained_rate(flood.rows)
        print(f"capacity {capacity_per_s:.2f} requests/s")
        trials = []
        for factor in factors:
            phase = Phase(end_s=scale.peak_s, rate_per_s=factor * capacity_per_s)
            trials.append(offer(served.url, _spec(_mix((phase,)), options.seed)))
        goodputs = [goodput(trial, 0.0, scale.peak_s) for trial in trials]
        peak_factor = factors[goodputs.index(max(goodputs))]
        peak_per_s = peak_factor * capacity_per_s
        print(f"peak {max(goodputs):.1f} tokens/s at {peak_per_s:.2f} requests/s")
        run = offer(served.url, _spec(_mix(_phases(scale, peak_per_s)), options.seed, has_retries=True))
    figures, bars = judge(scale, run, max(goodputs))
    figures |= {
        "scale": asdict(scale),
        "capacity_requests_per_s": capacity_per_s,
        "peak_requests_per_s": peak_per_s,
        "goodput_by_factor": dict(zip(map(str, factors), goodputs, strict=True)),
    }
    return report("overload", options, bars, figures, [flood, *trials, run])


def judge(scale: Scale, run: Offered, peak: float) -> tuple[dict[str, Any], list[Bar]]:
    """The promises, and what they were judged on."""
    spec = LoadSpec.model_validate(run.summary["spec"])
    start_s, end_s = scale.before_s, scale.before_s + scale.overload_s
    during = goodput(run, start_s, end_s)
    starvation = {BAND_NAMES[band]: starvation_s([r for r in run.rows if r.priority == band]) for band in _SHARES}
    recovery = recovery_s(spec, run.rows, start_s, end_s, scale)
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
        "starvation_s": starvation,
        "recovery_s": recovery,
    }, bars


def sustained_rate(rows: Sequence[Row]) -> float:
    """Requests a second while a flood is served, without the last tenth of it, when slots are running empty."""
    ends = sorted(row.end_s for row in rows if row.outcome is Outcome.OK and row.end_s is not None)
    if not ends:
        raise RuntimeError("no request of the flood was served")
    counted = max(1, len(ends) * 9 // 10)
    return counted / ends[counted - 1]


def goodput(run: Offered, start_s: float, end_s: float) -> float:
    """Tokens a second of good requests, each token when it came."""
    spec = LoadSpec.model_validate(run.summary["spec"])
    num_tokens = sum(
        count
        for row in run.rows
        if is_good(spec, row)
        for at_s, count in zip(row.chunk_s, row.chunk_tokens, strict=True)
        if start_s <= at_s < end_s
    )
    return num_tokens / (end_s - start_s)


def starvation_s(rows: Sequence[Row]) -> float:
    """The longest time in which one of these requests waited and none got its first token."""
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


def recovery_s(spec: LoadSpec, rows: Sequence[Row], start_s: float, end_s: float, scale: Scale) -> float | None:
    """Seconds after the overload until every later window is as good as the time before; None: never."""
    before = _good_share(spec, rows, 0.0, start_s)
    step_s, last_bad_s = scale.window_s / 5, None
    at_s = end_s
    while at_s + scale.window_s <= end_s + scale.after_s:
        share = _good_share(spec, rows, at_s, at_s + scale.window_s)
        if before is not None and share is not None and share < 0.95 * before:
            last_bad_s = at_s
        at_s += step_s
    if last_bad_s is None:
        return 0.0
    if last_bad_s + scale.window_s + step_s > end_s + scale.after_s:
        return None
    return last_bad_s + step_s - end_s


def _good_share(spec: LoadSpec, rows: Sequence[Row], start_s: float, end_s: float) -> float | None:
    """Of the requests scheduled in [start_s, end_s), those that met their targets."""
    scheduled = [row for row in rows if start_s <= row.scheduled_s < end_s]
    return ratio(sum(is_good(spec, row) for row in scheduled), len(scheduled))


def _phases(scale: Scale, peak_per_s: float) -> tuple[Phase, ...]:
    start_s, end_s = scale.before_s, scale.before_s + scale.overload_s
    return (
        Phase(end_s=start_s, rate_per_s=_NORMAL * peak_per_s),
        Phase(start_s=start_s, end_s=end_s, rate_per_s=_OVERLOAD * peak_per_s),
        Phase(start_s=end_s, end_s=end_s + scale.after_s, rate_per_s=_NORMAL * peak_per_s),
    )


def _mix(phases: tuple[Phase, ...]) -> tuple[Stream, ...]:
    """One stream a band, each with its share of the phases' rates."""
    return tuple(
        _stream(band).model_copy(
            update={"phases": tuple(p.model_copy(update={"rate_per_s": p.rate_per_s * share}) for p in phases)}
        )
        for band, share in _SHARES.items()
    )


def _flood(scale: Scale) -> tuple[Stream, ...]:
    return tuple(
        _stream(band).model_copy(
            update={"bursts": (Burst(count=round(scale.flood_requests * share), spread_s=scale.flood_requests / 300),)}
        )
        for band, share in _SHARES.items()
    )


def _stream(band: int) -> Stream:
    return Stream(
        name=BAND_NAMES[band],
        priority=band,
        user=f"tenant-{band}",
        prompt=Lengths.around(96, 0.5, 16, 384),
        output=Lengths.around(48, 0.5, 8, 192),
    )


def _spec(streams: tuple[Stream, ...], seed: int, has_retries: bool = False) -> LoadSpec:
    return LoadSpec(streams=streams, seed=seed, targets=TARGETS, has_retries=has_retries)


if __name__ == "__main__":
    sys.exit(main())
