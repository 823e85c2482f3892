"""Latency of submitting a job while the engine is busy: `python -m bench.jobs.submit`.

One replica has a backlog of batch requests that fills every slot. Beside it, `POST /v1/jobs` and `GET /health/live`
are called in turn at fixed times, in an open loop; each call is timed from its send. The difference between the two is
the cost of accepting a job. It is mostly the disk, which must have the job before the answer leaves. The bars are for
a replica with a device of its own. A replica that needs all the CPUs of ingress and database is recorded beside it.

`--against DIR` serves the code of another checkout beside this one, with a backlog of its own, and calls both in turn.
The bars are then ratios of the two costs, which hold on a machine of any speed.

On virtual CPUs the host at times gives them to other guests for tens of milliseconds, several times the measured cost.
So only calls count, of either kind, that were sent in seconds with next to no steal time. With too few of them the run
is void. The figures of all calls are recorded too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import aiohttp

from bench.peers.machine import ProcessorMeter
from bench.record import percentiles, ratio
from bench.routing.applications import COARSE_STREAMS, KINDS
from bench.routing.offer import Offered, RunningLoad, Seen, watching
from bench.routing.report import Bar, Options, option_parser, options_of, report
from bench.routing.streams import Burst, LoadSpec, Stream
from serve_app.benchmark.workload import Lengths
from testkit.serving.served import Served

MAX_EXTRA_S = {"p50": 0.008, "p99": 0.040}
MAX_RATIO = {"p50": 2.0, "p99": 4.5}
"""Largest ratios of the submission cost here to that in the other checkout."""
MAX_STEAL_PERCENT = 1.0
"""Percentage of a second's CPU time. Calls sent in a second with more steal time do not count."""
_PERCENTS = (50, 90, 99, 100)
_SUBMIT, _LIVE = "submit", "live"
_KINDS = (_SUBMIT, _LIVE)
_HERE, _THERE = "here", "there"


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of load for one kind of replica."""

    num_backlog: int
    lead_s: float
    """Time from the first request of the backlog to the first call."""
    num_calls: int
    """Number of calls of each kind to each application."""
    period_s: float
    """Time between two calls of a kind."""
    min_undisturbed: int
    """Smallest number of counted calls of each kind for a valid percentile."""


FULL = {"timed": Scale(1100, 15.0, 2000, 0.1, 1000), "demo": Scale(1400, 15.0, 1000, 0.1, 1)}
QUICK = {"timed": Scale(64, 3.0, 30, 0.1, 1)}


@dataclass(frozen=True, slots=True)
class Call:
    """One call and its result."""

    kind: str
    place: str
    """Application that was called: of this checkout, or of the other one."""
    status: int
    """HTTP status; 0: no answer."""
    sent_unix_s: float
    duration_s: float
    lateness_s: float
    """Delay of the send after its scheduled time."""


def main() -> int:
    """Measure beside both kinds of replica."""
    parser = option_parser(__doc__, kinds=list(FULL))
    parser.add_argument("--against")
    own = parser.parse_args()
    options, other_checkout = options_of(own), own.against
    scales = QUICK if options.is_quick else FULL
    bars: list[Bar] = []
    figures: dict[str, Any] = {"scale": {name: asdict(scale) for name, scale in scales.items()}}
    loads: list[Offered] = []
    is_disturbed = False
    for name, scale in scales.items():
        if not options.wants(name):
            continue
        measured, offered = _measure(name, scale, options, other_checkout)
        figures[name] = measured
        loads += offered
        is_disturbed |= any(its["undisturbed"] is None for its in measured.values())
        if name == "timed":
            bars += judge({place: its["undisturbed"] for place, its in measured.items()})
        for place, its in measured.items():
            bars += [
                Bar(f"{name}, {place}: calls that were not answered as they should be", its["num_failed"], 0),
                Bar(f"{name}, {place}: the engine was busy to the end", its["was_busy"], 1, is_lower_bound=True),
            ]
    void = "the host took the processors too often" if is_disturbed else None
    record = "submit_against" if other_checkout else "submit"
    return report(record, options, bars, figures, loads, family="jobs", void_because=void)


def judge(undisturbed: Mapping[str, dict[str, Any] | None]) -> list[Bar]:
    """Return the bars on the submission cost; with two places they are ratios."""
    extra = {place: its["extra_s"] if its else dict.fromkeys(MAX_EXTRA_S) for place, its in undisturbed.items()}
    here, there = extra[_HERE], extra.get(_THERE)
    if there is None:
        return [
            Bar(f"{percent} of submitting - {percent} of /health/live, seconds", here[percent], limit)
            for percent, limit in MAX_EXTRA_S.items()
        ]
    return [
        Bar(
            f"{percent} of submitting - {percent} of /health/live, here / there",
            ratio(here[percent], there[percent]),
            limit,
        )
        for percent, limit in MAX_RATIO.items()
    ]


def _measure(
    name: str, scale: Scale, options: Options, other_checkout: str | None
) -> tuple[dict[str, Any], list[Offered]]:
    """Return the figures of each place, and the results of the backlogs."""
    checkouts = {_HERE: None, _THERE: other_checkout} if other_checkout else {_HERE: None}
    with contextlib.ExitStack() as stack:
        places: dict[str, Served] = {
            place: stack.enter_context(
                KINDS[name].start(
                    replace(options, checkout=checkout), num_replicas=1, max_queue_wait_s=3600, **COARSE_STREAMS
                )
            )
            for place, checkout in checkouts.items()
        }
        backlogs = {place: RunningLoad(served.url, _backlog(scale, options)) for place, served in places.items()}
        time.sleep(scale.lead_s)
        meter = ProcessorMeter([])
        with watching(lambda: meter.shares().steal, 1.0) as steal:
            calls = asyncio.run(_call_in_turn({place: served.url for place, served in places.items()}, scale))
        was_busy = {place: float(backlog.is_running) for place, backlog in backlogs.items()}
        offered = [backlog.wait() for backlog in backlogs.values()]
    figures = {
        place: {
            "was_busy": was_busy[place],
            **_figures_of_place([call for call in calls if call.place == place], steal.seen, scale),
        }
        for place in places
    }
    return figures, offered


def _figures_of_place(calls: Sequence[Call], steal: Sequence[Seen], scale: Scale) -> dict[str, Any]:
    calm = undisturbed_of(calls, steal)
    num_calm = Counter(call.kind for call in calm)
    has_enough = all(num_calm[kind] >= scale.min_undisturbed for kind in _KINDS)
    return {**figures_of(calls), "undisturbed": figures_of(calm) if has_enough else None}


def undisturbed_of(calls: Sequence[Call], steal: Sequence[Seen]) -> list[Call]:
    """Return the calls sent in periods with little steal time; each look covers the time since the look before."""
    looks_at = [seen.at_unix_s for seen in steal]

    def steal_percent(call: Call) -> float:
        look = bisect_left(looks_at, call.sent_unix_s)
        return steal[look].value if look < len(steal) else 100.0

    return [call for call in calls if steal_percent(call) <= MAX_STEAL_PERCENT]


def _backlog(scale: Scale, options: Options) -> LoadSpec:
    stream = Stream(
        name="backlog",
        band="batch",
        user="night",
        bursts=(Burst(count=scale.num_backlog, spread_s=scale.num_backlog / 100),),
        prompt=Lengths(16, 256, 64, 0.4),
        output=Lengths(32, 1024, 160, 0.4),
    )
    # The backlog only has to be there: exact send times do not matter.
    return LoadSpec(streams=(stream,), seed=options.seed, timeout_s=3600.0, late_after_s=1.0)


async def _call_in_turn(urls: Mapping[str, str], scale: Scale) -> list[Call]:
    """Submit to each place in turn, then call /health/live at each, and so on at even intervals."""
    turns = list(itertools.product(_KINDS, urls))
    async with contextlib.AsyncExitStack() as stack:
        sessions = {
            place: await stack.enter_async_context(aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)))
            for place, url in urls.items()
        }
        for kind, place in turns * 3:  # opens connections and initialises lazy parts
            await _call(sessions[place], kind, place, 0.0)
        started_s = time.monotonic()
        tasks = []
        for number in range(len(turns) * scale.num_calls):
            at_s = number * scale.period_s / len(turns)
            await asyncio.sleep(max(0.0, started_s + at_s - time.monotonic()))
            lateness_s = time.monotonic() - started_s - at_s
            kind, place = turns[number % len(turns)]
            tasks.append(asyncio.create_task(_call(sessions[place], kind, place, lateness_s)))
        return await asyncio.gather(*tasks)


async def _call(session: aiohttp.ClientSession, kind: str, place: str, lateness_s: float) -> Call:
    sent_unix_s, sent_s = time.time(), time.monotonic()
    body = {"model": "headway-demo", "prompt": "def accept(job):", "max_tokens": 4}
    request = session.post("/v1/jobs", json=body) if kind == _SUBMIT else session.get("/health/live")
    try:
        async with request as response:
            await response.read()
            status = response.status
    except aiohttp.ClientError:
        status = 0
    return Call(kind, place, status, sent_unix_s, time.monotonic() - sent_s, lateness_s)


def figures_of(calls: Sequence[Call]) -> dict[str, Any]:
    """Return all compared figures."""
    durations_s = {kind: [call.duration_s for call in calls if call.kind == kind] for kind in _KINDS}
    by_kind = {
        kind: dict(zip(_PERCENTS, percentiles(values, _PERCENTS), strict=True)) for kind, values in durations_s.items()
    }
    expected = {_SUBMIT: 202, _LIVE: 200}
    return {
        "num_calls": {kind: len(values) for kind, values in durations_s.items()},
        "duration_s": {kind: {f"p{percent}": value for percent, value in its.items()} for kind, its in by_kind.items()},
        "extra_s": {f"p{percent}": by_kind[_SUBMIT][percent] - by_kind[_LIVE][percent] for percent in (50, 99)},
        "num_failed": sum(call.status != expected[call.kind] for call in calls),
        "statuses": dict(Counter(f"{call.kind} {call.status}" for call in calls)),
        "lateness_p99_s": percentiles([call.lateness_s for call in calls], (99,))[0],
    }


if __name__ == "__main__":
    sys.exit(main())
