"""Time that the device waits for the host between decodes, with and without async scheduling and CUDA graphs.

A step's gap = time from the end of the previous step on the device to its own end - its time on the device. The latter
is measured with the next steps already in the device's queue. The profiler's busy share is a second measure of the
same. It slows the host down a little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from bench.engine.engines import decode_batch, exact_request, make_engine, pseudo_random_tokens, warm_runner
from bench.gpu.device_time import CudaMark, MarkedRunner, covered_share, num_graphs
from bench.gpu.mixed_trace import measure_trace
from bench.record import percentile
from replicas.engine.config import EngineLimits
from replicas.engine.engine import Engine
from replicas.model.loading.loaded_model import LoadedModel
from replicas.model.loading.options import RunnerOptions
from replicas.model.runner import TorchModelRunner

MANY_SEQS, CONTEXT = 64, 512
NUM_STEPS, NUM_WARM_UP_STEPS, NUM_PROFILED_STEPS, NUM_QUEUED_STEPS = 300, 30, 50, 40
_NUM_OUTPUT_TOKENS = NUM_STEPS + NUM_WARM_UP_STEPS + NUM_PROFILED_STEPS + 64

MakeModel = Callable[[], LoadedModel]


@dataclass(frozen=True, slots=True)
class HostGap:
    """One way of decoding, in a steady state."""

    num_seqs: int
    is_async: bool
    has_graphs: bool
    device_ms: float
    """Device time of a step with its successors already in the queue."""
    period_p50_ms: float
    period_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    busy_share: float
    """Busy share of the device's time, by marks."""
    profiled_busy_share: float | None
    """Busy share of the device's time, by the profiler's kernels and copies; None if it saw none."""
    tokens_per_s: float

    def describe(self) -> str:
        """Return one line of text."""
        return (
            f"{self.num_seqs:3} sequences, {'a step ahead' if self.is_async else 'in turn':12} "
            f"{'graphs' if self.has_graphs else 'eager':6} gap {self.gap_p50_ms:.3f} ms p50 {self.gap_p99_ms:.3f} p99, "
            f"device {self.device_ms:6.3f} ms a step, busy {self.busy_share:4.0%}, {self.tokens_per_s:8.0f} tokens/s"
        )


def summarise(
    periods_ms: list[float], device_ms: float, num_seqs: int, profiled_busy_share: float | None, *, is_async: bool,
    has_graphs: bool,
) -> HostGap:  # fmt: skip
    """Return the figures; a gap is the part of a period beyond `device_ms`, at least 0."""
    gaps_ms = [max(0.0, period_ms - device_ms) for period_ms in periods_ms]
    mean_ms = sum(periods_ms) / len(periods_ms)
    return HostGap(
        num_seqs=num_seqs,
        is_async=is_async,
        has_graphs=has_graphs,
        device_ms=device_ms,
        period_p50_ms=percentile(periods_ms, 50),
        period_p99_ms=percentile(periods_ms, 99),
        gap_p50_ms=percentile(gaps_ms, 50),
        gap_p99_ms=percentile(gaps_ms, 99),
        busy_share=min(1.0, device_ms / mean_ms),
        profiled_busy_share=profiled_busy_share,
        tokens_per_s=1000 * num_seqs / mean_ms,
    )


def measure(runner: TorchModelRunner, num_seqs: int, *, is_async: bool) -> HostGap:
    """Decode `num_seqs` sequences of about `CONTEXT` tokens for many steps."""
    marked = MarkedRunner(runner, CudaMark)
    engine = make_engine(
        runner, launcher=marked, max_num_seqs=num_seqs, max_num_batched_tokens=2048, async_scheduling=is_async
    )
    for number in range(num_seqs):
        engine.add(exact_request(number, pseudo_random_tokens(number, CONTEXT), _NUM_OUTPUT_TOKENS))
    begun: set[str] = set()
    while len(begun) < num_seqs:
        begun |= {delta.request_id for delta in engine.step() if delta.token_ids}
    _steps(engine, NUM_WARM_UP_STEPS)
    marked.marks.clear()
    _steps(engine, NUM_STEPS)
    periods_ms = marked.take_periods_ms()
    profiled = _profiled_busy_share(engine)
    for number in range(num_seqs):
        engine.abort(str(number))
    while engine.has_work:
        engine.step()
    return summarise(
        periods_ms,
        device_ms(runner, num_seqs),
        num_seqs,
        profiled,
        is_async=is_async,
        has_graphs=num_graphs(runner) > 0,
    )


def device_ms(runner: TorchModelRunner, num_seqs: int) -> float:
    """Return the device's milliseconds for a decode of `num_seqs` sequences when it never waits for the host."""
    marked = MarkedRunner(runner, CudaMark)
    batch = decode_batch(runner, num_seqs, CONTEXT)
    steps = [marked.launch(batch) for _ in range(NUM_QUEUED_STEPS)]
    for step in steps:
        step.collect()
    return percentile(marked.take_periods_ms()[NUM_QUEUED_STEPS // 2 :], 50)


def measure_all(make_model: MakeModel) -> list[HostGap]:
    """Measure many sequences and one, each with and without graphs, and with and without async scheduling."""
    gaps: list[HostGap] = []
    loaded = make_model()
    for has_graphs in (True, False):
        limits = EngineLimits(max_num_seqs=MANY_SEQS, max_num_batched_tokens=2048)
        options = RunnerOptions(gpu_memory_utilization=0.5, enforce_eager=not has_graphs)
        runner = warm_runner(loaded, limits, options)
        for num_seqs in (MANY_SEQS, 1):
            for is_async in (False, True):
                gaps.append(measure(runner, num_seqs, is_async=is_async))
                print(gaps[-1].describe(), flush=True)
        del runner
        torch.cuda.empty_cache()
    return gaps


def run(make_model: MakeModel, make_peer: Callable[[], object]) -> dict[str, object]:
    """Return gaps, and a mixed trace on all engines; `make_peer` gives the same model in plain transformers."""
    gaps = [asdict(gap) for gap in measure_all(make_model)]
    return {"host_gaps": gaps, "mixed_trace": [asdict(outcome) for outcome in measure_trace(make_model, make_peer)]}


def _steps(engine: Engine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


def _profiled_busy_share(engine: Engine) -> float | None:
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        _steps(engine, NUM_PROFILED_STEPS)
        torch.cuda.synchronize()
    return covered_share(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    )
