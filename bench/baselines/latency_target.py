"""Accuracy of `target_itl_ms` while the load grows fourfold: `python -m bench.baselines.latency_target`.

One engine with the target and one without, each under Poisson arrivals of mixed lengths at several rates. The promise
is about the mean gap between two tokens of a sequence: within 20 % of the target if there is enough work to fill the
steps, and at most 20 % above it otherwise.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from statistics import fmean

from rich.console import Console
from rich.table import Table

from bench.baselines.serving_loop import serve_continuously
from bench.baselines.trace import TraceSpec, make_trace
from bench.engine.engines import load_runner, make_engine, model_parser
from bench.engine.token_times import TimedEngine, Timeline
from bench.record import percentile, write
from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions
from replicas.model.runner import TorchModelRunner

_SETTLING_SHARE = 0.25


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


def main() -> None:
    """Measure every load with and without the target, print the table."""
    parser = model_parser(__doc__, "latency_target")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--target-ms", type=float, default=15.0)
    parser.add_argument("--rates", default="4,8,16", help="arrival rates, requests per second")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of arrivals at each rate")
    arguments = parser.parse_args()
    model = ModelOptions(arguments.model, arguments.dtype, "cpu", None, arguments.threads)
    runner = load_runner(model, EngineLimits(max_num_seqs=arguments.max_num_seqs), kv_cache_mib=1024)
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
    print(write(arguments.name, {"loads": [asdict(each) for each in held], "worst_of_target": worst}))


if __name__ == "__main__":
    main()
