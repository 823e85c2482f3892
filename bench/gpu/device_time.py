"""Where a device's time goes: marks between steps, and what a profiler saw."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Protocol, Self

import torch

from replicas.engine.batch import ScheduledBatch
from replicas.engine.interfaces import LaunchedStep, ModelRunner
from replicas.model.runner import TorchModelRunner


class Mark(Protocol):
    """A moment in the order of the device's work."""

    def ms_until(self, later: Self) -> float:
        """Milliseconds between two marks, once the device has passed both."""
        ...


class CudaMark:
    """The moment at which the device has done what was launched so far."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def ms_until(self, later: Self) -> float:
        """Milliseconds to a later mark; waits for it."""
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event))


def num_graphs(runner: TorchModelRunner) -> int:
    """Batch sizes of decodes that are replayed from graphs."""
    return 0 if runner._decodes is None else len(runner._decodes._graphs)


class MarkedRunner:
    """Passes steps on, and marks where each ends on the device."""

    def __init__(self, runner: ModelRunner, mark: Callable[[], Mark]) -> None:
        self._runner = runner
        self._mark = mark
        self.marks: list[Mark] = []

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Launch `batch`, then mark."""
        step = self._runner.launch(batch)
        self.marks.append(self._mark())
        return step

    def take_periods_ms(self) -> list[float]:
        """Milliseconds from each step's end to the next one's, of the steps since the last call."""
        marks, self.marks = self.marks, []
        return [earlier.ms_until(later) for earlier, later in pairwise(marks)]


def covered_share(intervals: Iterable[tuple[float, float]]) -> float | None:
    """Share of the time from the first start to the last end that some interval covers; None without intervals."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    covered, until = 0.0, ordered[0][0]
    for start, end in ordered:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered / (until - ordered[0][0]) if until > ordered[0][0] else None
