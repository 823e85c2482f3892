"""Device time: marks between steps, and the share of time that profiled work covers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Protocol, Self

import torch

from replicas.engine.batch import ScheduledBatch
from replicas.engine.interfaces import LaunchedStep, ModelRunner
from replicas.model.runner import TorchModelRunner


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


def num_graphs(runner: TorchModelRunner) -> int:
    """Return the number of decode batch sizes with a captured graph."""
    return 0 if runner._decode_graphs is None else len(runner._decode_graphs._graphs)


class MarkedRunner:
    """Runner that passes steps on and marks the end of each on the device."""

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
