"""Loss of a stream whose replica is killed: `python -m bench.routing.failover`.

The demo model in float32 on three replicas, 200 greedy streams. The same requests are served twice: undisturbed, and
with ten kills by SIGKILL. Each kill hits a replica with a stream in mid-decode. `/load` shows that before the kill;
afterwards the clients' chunks confirm it: a stream of that replica had a token before the kill and was not finished.
Outputs are compared token for token.

The added pause of a stream is its longest gap between two chunks that spans a kill, less its usual gap. A pause above
the bar of 2 s comes only from lack of capacity: with too few replicas left, some streams wait.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from bench.record import percentile
from bench.routing.applications import demo
from bench.routing.offer import Offered, RunningLoad, offer
from bench.routing.report import Bar, read_options, report
from bench.routing.streams import Burst, LoadSpec, Stream
from serve_app.benchmark.rows import Outcome, Row
from serve_app.benchmark.workload import Lengths
from testkit.serving.served import Served, wait_for

_NUM_REPLICAS = 3
_RECOVERY_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of load and number of kills."""

    num_streams: int = 200
    num_kills: int = 10
    arrive_s: float = 240.0
    """Duration of the evenly spread arrivals, long enough for open streams at every kill."""
    output_tokens: int = 384
    first_kill_s: float = 8.0
    between_kills_s: float = 12.0


QUICK = Scale(num_streams=12, num_kills=1, arrive_s=5.0, output_tokens=160, first_kill_s=3.0, between_kills_s=5.0)


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill of one replica."""

    at_unix_s: float
    replica_id: str
    pid: int
    num_running: int
    """Sequences that it was running, according to `/load`."""


def main() -> int:
    """Serve undisturbed, serve with kills, compare."""
    options = read_options(__doc__)
    scale = QUICK if options.is_quick else Scale()
    settings = {"num_replicas": _NUM_REPLICAS, "dtype": "float32", "max_num_seqs": 32, "load_poll_period_s": 0.2}
    with demo(options, **settings) as served:
        calm = offer(served.url, _spec(scale, options.seed))
        load = RunningLoad(served.url, _spec(scale, options.seed))
        kills = _kill_repeatedly(served, load, scale, random.Random(options.seed))
        stormy = load.wait()
    figures, bars = judge(scale, calm, stormy, kills)
    return report("failover", options, bars, {"scale": asdict(scale), **figures}, [calm, stormy])


def judge(scale: Scale, calm: Offered, stormy: Offered, kills: Sequence[Kill]) -> tuple[dict[str, Any], list[Bar]]:
    """Return the figures and the bars."""
    different = [
        row.index
        for row, undisturbed in zip(stormy.rows, calm.rows, strict=True)
        if row.token_ids != undisturbed.token_ids
    ]
    hits = [len(streams_hit(stormy.rows, kill, stormy.started_unix_s)) for kill in kills]
    pauses = [p for row in stormy.rows if (p := added_pause_s(row, kills, stormy.started_unix_s)) is not None]
    truncated = sum(row.outcome is Outcome.TRUNCATED for row in stormy.rows)
    bars = [
        Bar("kills of a replica with a stream in mid-decode", sum(hit > 0 for hit in hits), scale.num_kills, True),
        Bar("undisturbed streams that failed", calm.num_failed, 0),
        Bar("streams that ended in an error", stormy.num_failed - truncated, 0),
        Bar("streams that were truncated", truncated, 0),
        Bar("outputs that differ", len(different), 0),
        Bar("added pause p95, s", percentile(pauses, 95) if pauses else None, 2.0),
    ]
    return {
        "kills": [{**asdict(kill), "streams_hit": hit} for kill, hit in zip(kills, hits, strict=True)],
        "different_indices": different,
        "pauses_s": sorted(pauses, reverse=True),
    }, bars


def streams_hit(rows: Sequence[Row], kill: Kill, started_unix_s: float) -> list[Row]:
    """Return the streams that began on the killed replica, had a token before the kill and were not finished."""
    at_s = kill.at_unix_s - started_unix_s
    return [
        row
        for row in rows
        if row.replica_id == kill.replica_id and row.chunk_s and row.chunk_s[0] < at_s < (row.end_s or at_s)
    ]


def added_pause_s(row: Row, kills: Sequence[Kill], started_unix_s: float) -> float | None:
    """Return the longest gap over a kill of the stream's first replica, less its median gap; None if not hit.

    The client does not know a stream's replica after it has moved. Later kills therefore count for every stream that
    has moved, with any gap that spans them.
    """
    gaps = list(zip(row.chunk_s, row.chunk_s[1:], strict=False))
    hit_s = [kill.at_unix_s for kill in kills if streams_hit([row], kill, started_unix_s)]
    if not hit_s or not gaps:
        return None
    times_s = [k.at_unix_s - started_unix_s for k in kills if k.at_unix_s >= min(hit_s)]
    spanning = [end - start for start, end in gaps if any(start <= at_s < end for at_s in times_s)]
    return max(spanning, default=0.0) - percentile([end - start for start, end in gaps], 50)


def _kill_repeatedly(served: Served, load: RunningLoad, scale: Scale, rng: random.Random) -> list[Kill]:
    """Kill replicas one after another while the load lasts, each time after all replicas run again."""
    kills: list[Kill] = []
    time.sleep(scale.first_kill_s)
    while len(kills) < scale.num_kills and load.is_running:
        kill = _kill_one(served, load, rng)
        if kill is None:
            break
        kills.append(kill)
        print(f"killed {kill.replica_id} (pid {kill.pid}) with {kill.num_running} sequences", flush=True)
        time.sleep(scale.between_kills_s)
        _wait_until_whole(served, load)
    return kills


def _kill_one(served: Served, load: RunningLoad, rng: random.Random) -> Kill | None:
    """Kill a replica as soon as one runs a sequence; return None if the load ends first."""
    while load.is_running:
        own_pids = {process.pid for process in served.descendants()}
        victims = [
            replica for replica in served.replicas() if replica["num_running"] > 0 and replica["pid"] in own_pids
        ]
        if victims:
            victim = rng.choice(victims)
            at_unix_s = time.time()
            os.kill(victim["pid"], signal.SIGKILL)
            return Kill(at_unix_s, victim["replica_id"], victim["pid"], victim["num_running"])
        time.sleep(0.1)
    return None


def _wait_until_whole(served: Served, load: RunningLoad) -> None:
    """Return when all replicas run again, the load has ended, or the recovery limit has passed."""

    def is_over() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            states = [replica["state"] for replica in served.deployment("Model")["replicas"]]
            return states == ["RUNNING"] * _NUM_REPLICAS or not load.is_running
        return not load.is_running

    with contextlib.suppress(TimeoutError):
        wait_for(is_over, "all replicas run again", _RECOVERY_LIMIT_S, 0.2)


def _spec(scale: Scale, seed: int) -> LoadSpec:
    stream = Stream(
        name="greedy",
        bursts=(Burst(count=scale.num_streams, spread_s=scale.arrive_s),),
        prompt=Lengths(16, 256, 64, 0.4),
        output=Lengths(64, 1024, scale.output_tokens, 0.3),
    )
    return LoadSpec(streams=(stream,), seed=seed)


if __name__ == "__main__":
    sys.exit(main())
