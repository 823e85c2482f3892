"""Accuracy of `target_itl_ms` while the load grows fourfold: `python -m bench.latency_target`.

One engine with the target and one without, each under Poisson arrivals of mixed lengths at several rates. The promise
is about the mean gap between two tokens of a sequence: within 20 % of the target if there is enough work to fill the
steps, and at most 20 % above it otherwise.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from dataclasses import asdict, dataclass
from statistics import fmean

from rich.console import Console
from rich.table import Table

from bench.baselines.engine_batches import EngineBatches, TokenTimes
from bench.baselines.serving_loop import serve_continuously
from bench.baselines.timeline import Timeline
from bench.baselines.trace import TraceRequest, TraceSpec, make_trace
from bench.load.percentiles import percentile
from bench.record import write
from replicas.engine.config import EngineConfig, EngineLimits
from replicas.engine.engine import Engine
from replicas.model.build import build_runner, warm_up
from replicas.model.loading.loader import load_model
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.model.loading.tokenizer import SilentDecoder
from replicas.protocol import ReplicaIdentity

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


class TargetBench:
    """Engines over one loaded model."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        loaded = load_model(ModelOptions(arguments.model, arguments.dtype, "cpu", None, arguments.threads))
        limits = EngineLimits(max_num_seqs=arguments.max_num_seqs)
        self._runner = build_runner(loaded, limits, RunnerOptions(kv_cache_bytes=2**30))
        warm_up(self._runner, limits)
        self._max_num_seqs: int = arguments.max_num_seqs
        self._max_model_len = min(1024, loaded.max_model_len)
        self._duration_s: float = arguments.duration

    def measure(self, target_itl_ms: float | None, requests_per_s: float) -> LatencyResult:
        """Offer one load for the whole duration; then finish the open requests."""
        spec = TraceSpec(round(requests_per_s * self._duration_s), requests_per_s)
        trace = make_trace(spec)
        answers = serve_continuously(trace, EngineBatches(self._engine(target_itl_ms), Timeline()), Timeline())
        return self._figures(target_itl_ms, requests_per_s, trace, answers)

    def _engine(self, target_itl_ms: float | None) -> Engine:
        config = EngineConfig(
            num_blocks=self._runner.num_blocks,
            max_model_len=self._max_model_len,
            max_num_seqs=self._max_num_seqs,
            target_itl_ms=target_itl_ms,
            enable_prefix_caching=False,
        )
        return Engine(config, self._runner, lambda _: SilentDecoder(), ReplicaIdentity("bench", "bench", os.getpid()))

    def _figures(
        self, target_itl_ms: float | None, requests_per_s: float, trace: list[TraceRequest], answers: TokenTimes
    ) -> LatencyResult:
        """Return the figures of the time between settling and the last arrival."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="replicas/demo", help="directory or hub id")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--target-ms", type=float, default=15.0)
    parser.add_argument("--rates", default="4,8,16", help="arrival rates, requests per second")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of arrivals at each rate")
    parser.add_argument("--name", default="latency_target", help="name of the result file")
    arguments = parser.parse_args()
    bench = TargetBench(arguments)
    rates = [float(rate) for rate in arguments.rates.split(",")]
    held = [bench.measure(target, rate) for target in (arguments.target_ms, None) for rate in rates]
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
    command = "python -m bench.latency_target " + " ".join(sys.argv[1:])
    print(write(arguments.name, command, {"loads": [asdict(each) for each in held], "worst_of_target": worst}))


if __name__ == "__main__":
    main()
