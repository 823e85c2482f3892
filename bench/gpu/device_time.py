"""Times of steps: as the host sees them, by marks on the device, and the share that profiled work covers."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol, Self

import torch

from bench.engine.engines import decode_batch, prefill_batch
from replicas.engine.batch import LaunchedStep, ModelRunner, ScheduledBatch
from replicas.model.runner import TorchModelRunner
from replicas.protocol import SamplingParams

NUM_ITERATIONS = 20
_NUM_OPERATORS = 40


class Mark(Protocol):
    """Moment in the order of the device's work."""

    def ms_until(self, later: Self) -> float:
        """Return the milliseconds between two marks, once the device has passed both."""
        ...


class CudaMark:
    """Moment at which the device has completed the work launched so far."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def ms_until(self, later: Self) -> float:
        """Return the milliseconds to a later mark; wait for it."""
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event))


class HostMark:
    """Moment of a device that computes while the host waits."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def ms_until(self, later: HostMark) -> float:
        """Return the milliseconds to a later mark."""
        return 1000 * (later._at_s - self._at_s)


def median_ms(run: Callable[[], object], device: str, num_repetitions: int = NUM_ITERATIONS) -> float:
    """Return the median time of `run` by the device's clock, after three warm-up runs."""
    durations = []
    for _ in range(num_repetitions + 3):
        if device == "cuda":
            begun = CudaMark()
            run()
            durations.append(begun.ms_until(CudaMark()))
        else:
            started = HostMark()
            run()
            durations.append(started.ms_until(HostMark()))
    return statistics.median(durations[3:])


def profiled(runner: TorchModelRunner, num_seqs: int, context: int, folder: Path) -> tuple[str, Path]:
    """Return the operators of 20 decodes by their time, as text, and the file of their trace."""
    batch = decode_batch(runner, num_seqs, context)
    runner.execute(batch)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(NUM_ITERATIONS):
            runner.execute(batch)
    trace = folder / "decodes_trace.json.gz"
    profiler.export_chrome_trace(str(trace))
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=_NUM_OPERATORS), trace


def release() -> None:
    """Give back the device memory of objects that are no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def num_graphs(runner: TorchModelRunner) -> int:
    """Return the number of captured graphs."""
    return 0 if runner._graphs is None else runner._graphs.num_graphs


@dataclass(slots=True)
class MarkedRunner:
    """Runner that passes steps on and marks the end of each on the device."""

    runner: ModelRunner
    mark: Callable[[], Mark]
    marks: list[Mark] = field(default_factory=list)

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Launch `batch`, then mark."""
        step = self.runner.launch(batch)
        self.marks.append(self.mark())
        return step

    def take_periods_ms(self) -> list[float]:
        """Return the milliseconds from each step's end to the next one's, for the steps since the last call."""
        marks, self.marks = self.marks, []
        return [earlier.ms_until(later) for earlier, later in pairwise(marks)]


def covered_share(intervals: Iterable[tuple[float, float]]) -> float | None:
    """Return the share of the time from first start to last end that intervals cover; None without intervals."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    covered, until = 0.0, ordered[0][0]
    for start, end in ordered:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered / (until - ordered[0][0]) if until > ordered[0][0] else None


@dataclass(frozen=True, slots=True)
class StepTime:
    """Duration of one kind of step, over `NUM_ITERATIONS` repetitions."""

    step: str
    num_tokens: int
    min_ms: float
    median_ms: float
    tokens_per_s: float


def measure_decode(runner: TorchModelRunner, num_seqs: int, context: int, params: SamplingParams) -> StepTime:
    """Measure a step of one token for each of `num_seqs` sequences with `context` tokens."""
    batch = decode_batch(runner, num_seqs, context, params)
    return _time(f"decode {num_seqs} x {context}", num_seqs, lambda: runner.execute(batch))


def measure_prefill(runner: TorchModelRunner, num_tokens: int) -> StepTime:
    """Measure a step of a whole prompt of `num_tokens` tokens."""
    batch = prefill_batch(runner, num_tokens)
    return _time(f"prefill {num_tokens}", num_tokens, lambda: runner.execute(batch))


def _time(step: str, num_tokens: int, execute: Callable[[], object]) -> StepTime:
    """Time `execute`, which returns once its tokens are on the host, so wall time covers the whole step."""
    durations = []
    for _ in range(NUM_ITERATIONS + 3):
        started_s = time.perf_counter()
        execute()
        durations.append(1000 * (time.perf_counter() - started_s))
    median_ms = statistics.median(durations[3:])
    return StepTime(step, num_tokens, min(durations[3:]), median_ms, 1000 * num_tokens / median_ms)
