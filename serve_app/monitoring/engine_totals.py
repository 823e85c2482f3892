"""Sums of the metrics of many engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import add

from replicas.protocol import EngineMetrics, HistogramMetric, Metric

_Key = tuple[str, tuple[tuple[str, str], ...]]


class EngineTotals:
    """Metrics of engines taken together: values and distributions are summed; of shares and settings it is the mean."""

    def __init__(self) -> None:
        self._metrics: dict[_Key, Metric] = {}
        self._values: dict[_Key, list[float]] = {}
        self._histograms: dict[str, HistogramMetric] = {}
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def add(self, *engines: EngineMetrics) -> None:
        """Add engines' metrics."""
        for engine in engines:
            for metric in engine.metrics:
                key = (metric.name, metric.labels)
                if key not in self._metrics:
                    self._metrics[key], self._values[key] = metric, []
                self._values[key].append(metric.value)
            for histogram in engine.histograms:
                self._add_histogram(histogram)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics with one value, in the order of the first engine's."""
        for key, metric in self._metrics.items():
            values = self._values[key]
            yield replace(metric, value=sum(values) / len(values) if metric.is_mean else sum(values))

    def histograms(self) -> Iterator[HistogramMetric]:
        """Yield the distributions."""
        for name, histogram in self._histograms.items():
            yield replace(histogram, counts=tuple(self._counts[name]), sum=self._sums[name])

    def _add_histogram(self, histogram: HistogramMetric) -> None:
        name = histogram.name
        if self._histograms.setdefault(name, histogram).bounds != histogram.bounds:
            return  # Of a replica with other code, while an update is rolled out.
        counts = self._counts.get(name)
        self._counts[name] = list(histogram.counts) if counts is None else list(map(add, counts, histogram.counts))
        self._sums[name] = self._sums.get(name, 0.0) + histogram.sum
