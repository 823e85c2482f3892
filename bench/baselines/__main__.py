"""Every classic batcher compared with continuous batching on one trace: `python -m bench.baselines`.

The model, its kernels, the KV cache, `max_num_seqs` and the tokens of a step are the same for all. The last row is
transformers' `generate()` in static batches, with its own cache and kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from bench.baselines.outcome import EQUAL_STEPS, Outcome, StepCosts, allowed_gain, measure_costs, outcome_of
from bench.baselines.policies import CONTINUOUS, FixedSize, Limits, methods
from bench.baselines.serving_loop import StaticBatches, serve_continuously, serve_in_batches
from bench.baselines.trace import TraceRequest, TraceSpec, make_trace
from bench.engine.engines import load_runner, make_engine, model_parser
from bench.engine.token_times import TimedEngine, Timeline, TokenTimes
from bench.peers.engine import PeerRequest
from bench.peers.transformers_generate import StaticGenerate, load_plain
from bench.record import cell, ratio, write
from replicas.engine.config import EngineLimits
from replicas.model.hardware.device import choose_device, choose_dtype
from replicas.model.loading.options import ModelOptions

_GENERATE = "transformers generate(), fixed size"
_COMPARED = "fixed size, no padding"
"""Base of the gain. Continuous batching differs only in that slots do not idle, so the gain is due to the lengths."""


class Comparison:
    """All methods over one loaded model, each with a fresh engine."""

    def __init__(self, arguments: argparse.Namespace, limits: Limits) -> None:
        self._limits = limits
        self._steps = {
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": arguments.max_batch_tokens,
        }
        model = ModelOptions(arguments.model, arguments.dtype, "cpu", None, arguments.threads)
        self._runner = load_runner(model, EngineLimits(**self._steps), arguments.kv_cache_mib)

    def continuous(self, trace: Sequence[TraceRequest]) -> Outcome:
        """Serve the trace with continuous batching."""
        engine = self._engine()
        answers = serve_continuously(trace, engine)
        return outcome_of(CONTINUOUS, trace, answers, engine.figures())

    def static(self, trace: Sequence[TraceRequest], only: str) -> list[Outcome]:
        """Serve the trace with every batcher whose name contains `only`."""
        outcomes = []
        for method in methods(self._limits):
            if only in method.name:
                engine = self._engine()
                runner = StaticBatches(engine, method.is_padded)
                answers = serve_in_batches(trace, method.make_policy(), runner, Timeline())
                outcomes.append(outcome_of(method.name, trace, answers, engine.figures()))
                print(f"{method.name}: {outcomes[-1].tokens_per_s:.1f} tokens/s", flush=True)
        return outcomes

    def costs(self, trace: Sequence[TraceRequest]) -> StepCosts:
        """Measure decode steps after a prompt of the trace's mean length, and the prompts."""
        num_tokens = round(fmean(len(request.prompt) for request in trace))
        longest = max((request.prompt for request in trace), key=len)
        return measure_costs(StaticBatches(self._engine()), longest[:num_tokens], self._limits.max_num_seqs)

    def _engine(self) -> TimedEngine:
        return TimedEngine(make_engine(self._runner, **self._steps), Timeline())


def main() -> None:
    """Run all methods, print the table and the allowed gain, write the figures."""
    arguments = _parse()
    spec = TraceSpec(num_requests=arguments.requests, requests_per_s=arguments.rate)
    trace = make_trace(spec)
    limits = Limits(max_num_seqs=arguments.max_num_seqs)
    comparison = Comparison(arguments, limits)
    comparison.continuous(trace[:4])  # warms up
    outcomes = [comparison.continuous(trace), *comparison.static(trace, arguments.only)]
    outcomes += _generate(arguments, trace, limits)
    by_lengths = allowed_gain(trace, limits.max_num_seqs, EQUAL_STEPS)
    costs = comparison.costs(trace)
    allowed = allowed_gain(trace, limits.max_num_seqs, costs)
    Console(width=160).print(_table(outcomes, f"{len(trace)} requests, {spec.requests_per_s:g} a second"))
    speeds = {outcome.method: outcome.tokens_per_s for outcome in outcomes}
    reached = ratio(speeds[CONTINUOUS], speeds.get(_COMPARED))
    if reached is not None:
        print(f"tokens/s of '{_COMPARED}' times {by_lengths:.2f} is what the lengths allow where all steps cost the "
              f"same, {allowed:.2f} where they cost what they do here; continuous batching reaches {reached:.2f}, "
              f"{reached / allowed:.0%} of that")  # fmt: skip
    figures = {
        "trace": asdict(spec), "limits": asdict(limits), "outcomes": [asdict(outcome) for outcome in outcomes],
        "gain_is_over": _COMPARED, "reached_gain": reached, "allowed_gain": allowed,
        "allowed_gain_where_steps_cost_the_same": by_lengths, "costs": asdict(costs),
    }  # fmt: skip
    print(write(arguments.name, figures))


def _parse() -> argparse.Namespace:
    parser = model_parser(__doc__, "baselines")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--kv-cache-mib", type=int, default=512)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rate", type=float, default=16.0, help="requests per second; more than the engine can serve")
    parser.add_argument("--only", default="", help="run only batchers whose name contains this")
    parser.add_argument("--no-generate", action="store_true", help="leave transformers' generate() out")
    arguments = parser.parse_args()
    arguments.model = str(Path(arguments.model).resolve())
    return arguments


class GenerateBatches:
    """transformers' `generate()` in the dtype that Headway's loader would choose."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        dtype = choose_dtype(arguments.dtype, choose_device("cpu"))
        self._model = StaticGenerate(load_plain(arguments.model, dtype, arguments.threads), batch_size=10**6)

    def run(self, batch: Sequence[TraceRequest]) -> TokenTimes:
        """Run `batch`, left-padded, to the end of its longest request."""
        requests = [PeerRequest(r.number, r.prompt, r.num_output_tokens) for r in batch]
        return self._model.run(requests, concurrency=1).token_s


def _generate(arguments: argparse.Namespace, trace: Sequence[TraceRequest], limits: Limits) -> list[Outcome]:
    if arguments.no_generate:
        return []
    policy = FixedSize(limits.max_num_seqs, limits.max_wait_s)
    runner = GenerateBatches(arguments)
    runner.run(trace[:2])  # warms up
    answers = serve_in_batches(trace, policy, runner, Timeline())
    return [outcome_of(_GENERATE, trace, answers, None)]


def _table(outcomes: Sequence[Outcome], title: str) -> Table:
    table = Table(
        "method", "tokens/s", "padding efficiency", "slots used", "TTFT p50 / p99 s", "latency p50 / p99 s",
        "urgent p50 s", title=title,
    )  # fmt: skip
    for each in outcomes:
        table.add_row(
            each.method, f"{each.tokens_per_s:.1f}",
            cell(each.padding_efficiency, ".0%"), cell(each.utilization, ".0%"),
            f"{each.ttft_p50_s:.2f} / {each.ttft_p99_s:.2f}", f"{each.latency_p50_s:.2f} / {each.latency_p99_s:.2f}",
            cell(each.urgent_latency_p50_s, ".2f"),
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
