"""Accuracy of `target_itl_ms` while the load grows fourfold: `python -m bench.baselines.latency_target`.

One engine with the target and one without, each under Poisson arrivals of mixed lengths at several rates. The promise
is about the mean gap between two tokens of a sequence: within 20 % of the target if there is enough work to fill the
steps, and at most 20 % above it otherwise.

With `--beside-batch 31` the other target, `slo`: one interactive stream after another, alone, and by turns beside so
many batch sequences without and with `auto`. Wanted: a TPOT of at most the mean of the targets in force, which
follow the gaps of the same seconds; at least half of the tokens of the batch; and no loss of a batch alone.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict, dataclass
from statistics import fmean

from rich.console import Console
from rich.table import Table

from bench.baselines.serving_loop import serve_continuously
from bench.baselines.trace import TraceSpec, make_trace
from bench.engine.engines import load_runner, make_engine, model_parser, pseudo_random_tokens
from bench.engine.token_times import TimedEngine, Timeline
from bench.record import percentile, write
from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions
from replicas.model.runner import TorchModelRunner
from replicas.protocol import Band
from replicas.timing.clock import Clock

_SETTLING_SHARE = 0.25
_AUTO_S = (0.0, None, None)
_NUM_OUTPUT_TOKENS = 128
_NO_TARGETS_S = (None, None, None)


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """Gaps at one load, once it has settled."""

    target_itl_ms: float | None
    requests_per_s: float
    itl_mean_ms: float
    itl_p50_ms: float
    itl_p95_ms: float
    tokens_per_s: float
    ttft_p50_s: float


def measure(
    runner: TorchModelRunner, max_num_seqs: int, target_itl_ms: float | None, requests_per_s: float, duration_s: float
) -> LatencyResult:
    """Offer one load for the whole duration; then finish the open requests."""
    trace = make_trace(TraceSpec(round(requests_per_s * duration_s), requests_per_s))
    engine = make_engine(runner, max_num_seqs=max_num_seqs, target_itl_ms=target_itl_ms)
    answers = serve_continuously(trace, TimedEngine(engine, Timeline()))
    # The figures are of the time between settling and the last arrival.
    ends_s = trace[-1].arrival_s
    begins_s = _SETTLING_SHARE * ends_s
    gaps_ms = [
        (after - before) * 1e3
        for times in answers.values()
        for before, after in itertools.pairwise(times)
        if begins_s <= before and after <= ends_s
    ]
    num_tokens = sum(begins_s <= moment <= ends_s for times in answers.values() for moment in times)
    return LatencyResult(
        target_itl_ms=target_itl_ms,
        requests_per_s=requests_per_s,
        itl_mean_ms=fmean(gaps_ms),
        itl_p50_ms=percentile(gaps_ms, 50),
        itl_p95_ms=percentile(gaps_ms, 95),
        tokens_per_s=num_tokens / (ends_s - begins_s),
        ttft_p50_s=percentile([answers[r.number][0] - r.arrival_s for r in trace], 50),
    )


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Figures of one turn of streams and a batch, once it has settled."""

    tpot_target_ms: float | None
    """Mean of the targets in force; None: there is none."""
    num_interactive: int
    num_batch: int
    tpot_ms: float | None
    batch_tokens_per_s: float


def serve_together(
    runner: TorchModelRunner, num_interactive: int, num_batch: int, targets_s: tuple[float | None, ...], seconds: float
) -> TurnResult:
    """Keep so many streams of both bands open for the whole duration, 32 prompt and 128 output tokens each.

    Time is the processor time of this process, which other work on the machine changes little: with one thread it is
    what a quiet machine takes.
    """
    num_slots, clock = max(2, num_interactive + num_batch), Clock(time.process_time)
    engine = make_engine(runner, clock=clock, max_num_seqs=num_slots, tpot_targets_s=targets_s)
    timed = TimedEngine(engine, Timeline(time.process_time))
    wanted = {Band.INTERACTIVE: num_interactive, Band.BATCH: num_batch}
    open_times: dict[Band, list[list[float]]] = {band: [] for band in wanted}
    all_times: dict[Band, list[list[float]]] = {band: [] for band in wanted}
    targets_ms: list[float] = []
    begun_s = timed.timeline.clock()
    while timed.timeline.clock() < begun_s + seconds:
        for band, num in wanted.items():
            open_times[band] = [times for times in open_times[band] if len(times) < _NUM_OUTPUT_TOKENS]
            while len(open_times[band]) < num:
                times = timed.add(pseudo_random_tokens(len(all_times[band]), 32), _NUM_OUTPUT_TOKENS, band)
                open_times[band].append(times)
                all_times[band].append(times)
        timed.step()
        target_s = engine.stats().tpot_targets_s[Band.INTERACTIVE]
        targets_ms += [] if target_s is None else [1e3 * target_s]
    settled_s = begun_s + seconds / 2
    gaps_ms = [
        (after - before) * 1e3
        for times in all_times[Band.INTERACTIVE]
        for before, after in itertools.pairwise(times)
        if before >= settled_s
    ]
    num_tokens = sum(moment >= settled_s for times in all_times[Band.BATCH] for moment in times)
    return TurnResult(
        fmean(targets_ms[len(targets_ms) // 2 :]) if targets_ms else None,
        num_interactive,
        num_batch,
        fmean(gaps_ms) if gaps_ms else None,
        num_tokens / (timed.timeline.clock() - settled_s),
    )


def measure_beside_batch(runner: TorchModelRunner, num_batch: int, num_turns: int, seconds: float) -> list[TurnResult]:
    """Measure a stream alone, beside a batch, and the batch alone, without and with the target, by turns."""
    return [
        serve_together(runner, num_interactive, num, targets_s, seconds)
        for _ in range(num_turns)
        for num_interactive, num in ((1, 0), (1, num_batch), (0, num_batch))
        for targets_s in (_NO_TARGETS_S, _AUTO_S)
    ]


def main() -> None:
    """Measure every load with and without the target, print the table."""
    parser = model_parser(__doc__, "latency_target")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--target-ms", type=float, default=15.0)
    parser.add_argument("--rates", default="4,8,16", help="arrival rates, requests per second")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of arrivals at each rate")
    parser.add_argument(
        "--beside-batch", type=int, help="measure `slo` beside so many batch sequences instead, best with --threads 1"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.set_defaults(name=None)
    arguments = parser.parse_args()
    model = ModelOptions(arguments.model, arguments.dtype, "cpu", None, arguments.threads)
    runner = load_runner(model, EngineLimits(max_num_seqs=arguments.max_num_seqs), kv_cache_mib=1024)
    if arguments.beside_batch is not None:
        turns = measure_beside_batch(runner, arguments.beside_batch, arguments.turns, arguments.duration)
        _print_turns(turns)
        print(write(arguments.name or "tpot_target", {"turns": [asdict(turn) for turn in turns]}))
        return
    rates = [float(rate) for rate in arguments.rates.split(",")]
    held = [
        measure(runner, arguments.max_num_seqs, target, rate, arguments.duration)
        for target in (arguments.target_ms, None)
        for rate in rates
    ]
    table = Table("target ms", "requests/s", "gap mean", "p50", "p95 ms", "tokens/s", "TTFT p50 s")
    for each in held:
        target = "-" if each.target_itl_ms is None else f"{each.target_itl_ms:g}"
        table.add_row(
            target, f"{each.requests_per_s:g}", f"{each.itl_mean_ms:.1f}", f"{each.itl_p50_ms:.1f}",
            f"{each.itl_p95_ms:.1f}", f"{each.tokens_per_s:.0f}", f"{each.ttft_p50_s:.2f}",
        )  # fmt: skip
    Console(width=100).print(table)
    worst = max(each.itl_mean_ms / arguments.target_ms for each in held if each.target_itl_ms is not None)
    print(f"mean gap at most {worst:.2f} times the target over {rates[-1] / rates[0]:g} times the load")
    figures = {"loads": [asdict(each) for each in held], "worst_of_target": worst}
    print(write(arguments.name or "latency_target", figures))


def _print_turns(turns: list[TurnResult]) -> None:
    table = Table("streams", "batch", "target ms", "TPOT ms", "batch tokens/s")
    for turn in turns:
        target, tpot = ("-" if value is None else f"{value:.4g}" for value in (turn.tpot_target_ms, turn.tpot_ms))
        table.add_row(str(turn.num_interactive), str(turn.num_batch), target, tpot, f"{turn.batch_tokens_per_s:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
