"""Export of a process's metrics to Ray, whose exporter and dashboards show them by deployment and replica.

Ray drops names with a colon, so `vllm:x` becomes `vllm_x`, and Ray's exporter shows `ray_vllm_x`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry

from replicas.protocol import EngineMetrics, HistogramMetric, Metric, MetricKind
from serve_app.monitoring.families import registry_metrics

_log = logging.getLogger(__name__)

_PERIOD_S = 5.0
"""Period of the export, seconds. Ray passes the values on every 10 s; the jobs process reads the database for them."""
_SERVE_LABELS = frozenset({"application", "deployment", "replica"})
"""Labels that Ray Serve adds itself."""
_SUMMED_LABELS = frozenset({"tenant"})
"""Labels that are summed over: Ray keeps each series that it has ever seen."""
_NOT_EXPORTED = frozenset(
    {
        "vllm:inter_token_latency_seconds",
        "vllm:iteration_tokens_total",
        "headway:step_padding_efficiency",
        "headway:batch_utilization",
    }
)
"""Histograms with an observation for each token or step, which cost too much to pass on."""
_SWAPPED = Metric("vllm:num_requests_swapped", "always 0: preempted sequences are recomputed", MetricKind.GAUGE, 0)
"""Gauge that Ray's dashboard asks for."""

Labels = tuple[tuple[str, str], ...]
_Series = tuple[str, Labels]
Export = Callable[[], Awaitable[None]]
"""Export of the present values to Ray."""


@dataclass(frozen=True, slots=True)
class Instruments:
    """Constructors of Ray's metrics: of counters, gauges and histograms."""

    counter: Callable[..., Any]
    gauge: Callable[..., Any]
    histogram: Callable[..., Any]

    @classmethod
    def of_serve(cls) -> Instruments:
        """Return those of Ray Serve, which add the application, the deployment and the replica."""
        from ray.serve import metrics

        return cls(metrics.Counter, metrics.Gauge, metrics.Histogram)


class RayExporter:
    """Exporter of snapshots: sets gauges, and passes on what counters and histograms have gained since the last one.

    A histogram gains observations in its buckets and a sum, not single values. It passes on as many observations in
    each bucket, at one relative place in all of them, such that buckets, count and sum at Ray are the same.
    """

    def __init__(self, model_name: str, instruments: Instruments) -> None:
        """Create the exporter; every metric gets the label `model_name`."""
        self._fixed: Labels = (("model_name", model_name),)
        self._make = instruments
        self._instruments: dict[str, Any] = {}
        self._counted: dict[_Series, float] = defaultdict(float)
        self._gauges: set[_Series] = set()
        self._histograms: dict[_Series, HistogramMetric] = {}

    def export(self, metrics: Iterable[Metric], histograms: Iterable[HistogramMetric]) -> None:
        """Pass a snapshot on."""
        values: dict[_Series, Metric] = {}
        for metric in metrics:
            if not _SERVE_LABELS & dict(metric.labels).keys():
                series = (metric.name, self._labels(metric.labels))
                known = values.get(series)
                values[series] = metric if known is None else replace(known, value=known.value + metric.value)
        for series, metric in values.items():
            if metric.kind is MetricKind.COUNTER:
                self._count(series, metric)
            else:
                self._set(series, metric)
        for name, labels in self._gauges - values.keys():
            self._instruments[name].set(0, dict(labels))
        for histogram in histograms:
            if histogram.name not in _NOT_EXPORTED:
                self._observe((histogram.name, self._labels(histogram.labels)), histogram)

    def _labels(self, labels: Labels) -> Labels:
        left_out = _SUMMED_LABELS | dict(self._fixed).keys()
        return (*self._fixed, *((name, value) for name, value in labels if name not in left_out))

    def _count(self, series: _Series, metric: Metric) -> None:
        gained = metric.value - self._counted[series]
        instrument = self._instrument(self._make.counter, series, metric.help)
        if gained > 0:
            self._counted[series] = metric.value
            instrument.inc(gained, dict(series[1]))

    def _set(self, series: _Series, metric: Metric) -> None:
        if not math.isfinite(metric.value):
            return  # Ray takes finite values alone; the last one stays.
        self._gauges.add(series)
        self._instrument(self._make.gauge, series, metric.help).set(metric.value, dict(series[1]))

    def _observe(self, series: _Series, histogram: HistogramMetric) -> None:
        before = self._histograms.get(series)
        self._histograms[series] = histogram
        bounds = [bound for bound in histogram.bounds if bound > 0]
        instrument = self._instrument(self._make.histogram, series, histogram.help, boundaries=bounds)
        for value, number in spread(histogram, before).items():
            for _ in range(number):
                instrument.observe(value, dict(series[1]))

    def _instrument(self, make: Callable[..., Any], series: _Series, text: str, **options: Any) -> Any:
        name, labels = series
        if name not in self._instruments:
            keys = tuple(key for key, _ in labels)
            ray_name = name.replace(":", "_")
            self._instruments[name] = make(ray_name, description=text, tag_keys=keys, **options)
        return self._instruments[name]


def spread(histogram: HistogramMetric, before: HistogramMetric | None) -> Counter[float]:
    """Return observations that bring a histogram from `before` to its present buckets and sum; None: it was empty."""
    counts, total = list(histogram.counts), histogram.sum
    if before is not None:
        counts = [now - then for now, then in zip(counts, before.counts, strict=True)]
        total -= before.sum
    lows = [min(0.0, histogram.bounds[0]), *histogram.bounds]
    # The last bucket has no upper bound; what the others do not explain of the sum is in it.
    highs = [*histogram.bounds, max(2 * histogram.bounds[-1], total)]
    low_sum = sum(number * low for number, low in zip(counts, lows, strict=True))
    width = sum(number * (high - low) for number, low, high in zip(counts, lows, highs, strict=True))
    # A bucket includes its upper bound and not its lower one.
    place = min(1.0, max(1e-6, (total - low_sum) / width)) if width > 0 else 1.0
    return Counter(
        {low + place * (high - low): number for number, low, high in zip(counts, lows, highs, strict=True) if number}
    )


def engine_exporter(model_name: str, read: Callable[[], EngineMetrics], instruments: Instruments) -> Export:
    """Return the export of an engine's metrics."""
    exporter = RayExporter(model_name, instruments)

    async def export() -> None:
        metrics = read()
        exporter.export((*metrics.metrics, _SWAPPED), metrics.histograms)

    return export


def registry_exporter(model_name: str, registry: CollectorRegistry, instruments: Instruments) -> Export:
    """Return the export of the metrics of an ingress's registry, without those of HTTP, which Ray Serve has itself."""
    exporter = RayExporter(model_name, instruments)

    async def export() -> None:
        exporter.export(*registry_metrics(registry))

    return export


def jobs_exporter(model_name: str, read: Callable[[], Awaitable[Iterable[Metric]]], instruments: Instruments) -> Export:
    """Return the export of the metrics of the jobs process's own work."""
    exporter = RayExporter(model_name, instruments)

    async def export() -> None:
        exporter.export(await read(), ())

    return export


async def export_forever(export: Export) -> None:
    """Run the export once a period until cancelled; a failure is logged once, and the next run tries again."""
    is_logged = False
    while True:
        try:
            await export()
        except Exception:  # metrics must not end the process
            if not is_logged:
                _log.exception("metrics cannot be exported to Ray")
            is_logged = True
        await asyncio.sleep(_PERIOD_S)
