"""Families of Prometheus from the plain metrics that cross processes, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from replicas.protocol import HistogramMetric, Metric, MetricKind


class CountsCollector(Collector):
    """Collector of metrics that a part of this process counts itself."""

    def __init__(self, counts: Callable[[], Iterable[Metric]]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Family]:
        """Return one family per metric name."""
        return plain_families(self._counts())


def plain_families(metrics: Iterable[Metric]) -> Iterable[Family]:
    """Return one family per metric name, whose samples have the metrics' own labels."""
    families: dict[str, Family] = {}
    for metric in metrics:
        add_metric(families, metric, {})
    return families.values()


def registry_metrics(registry: CollectorRegistry) -> tuple[list[Metric], list[HistogramMetric]]:
    """Return a registry's metrics of engines and routers: those with a prefix, such as `headway:queue_size`."""
    metrics: list[Metric] = []
    histograms: list[HistogramMetric] = []
    for family in registry.collect():
        if ":" not in family.name:
            continue
        if family.type == "histogram":
            histograms += _histograms_of(family)
            continue
        kind = MetricKind.COUNTER if family.type == "counter" else MetricKind.GAUGE
        metrics += [
            Metric(family.name, family.documentation, kind, sample.value, tuple(sorted(sample.labels.items())))
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]
    return metrics, histograms


def _histograms_of(family: Family) -> Iterator[HistogramMetric]:
    """Yield one histogram for each set of labels of a family."""
    buckets: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        if sample.name.endswith("_bucket"):
            buckets.setdefault(labels, {})[float(sample.labels["le"])] = sample.value
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    for labels, cumulative in buckets.items():
        *bounds, _ = sorted(cumulative)
        totals = [0.0, *(cumulative[bound] for bound in sorted(cumulative))]
        counts = tuple(int(after - before) for before, after in pairwise(totals))
        yield HistogramMetric(family.name, family.documentation, tuple(bounds), counts, sums[labels], labels)


def families_of_process(registry: CollectorRegistry, process: str) -> tuple[Family, ...]:
    """Return the families of a process that is not an ingress, for the page of one."""
    families = []
    for family in registry.collect():
        labelled = Family(family.name, family.documentation, family.type, family.unit)
        for sample in family.samples:
            labelled.add_sample(sample.name, sample.labels | {"process": process}, sample.value)
        families.append(labelled)
    return tuple(families)


def add_metric(
    families: dict[str, Family], metric: Metric, labels: dict[str, str], start_unix_s: float | None = None
) -> None:
    """Add a metric's sample; that of a counter with its start as `x_created`, as prometheus_client has it."""
    family, labels = families.setdefault(metric.name, _family(metric)), labels | dict(metric.labels)
    if metric.kind is not MetricKind.COUNTER:
        family.add_sample(family.name, labels, metric.value)
        return
    family.add_sample(f"{family.name}_total", labels, metric.value)
    if start_unix_s is not None:
        family.add_sample(f"{family.name}_created", labels, start_unix_s)


def _family(metric: Metric) -> Family:
    if metric.kind is MetricKind.COUNTER:
        return CounterMetricFamily(metric.name, metric.help)
    return GaugeMetricFamily(metric.name, metric.help)


def add_histogram(
    family: Family, histogram: HistogramMetric, labels: dict[str, str], start_unix_s: float | None
) -> None:
    """Add a histogram's samples in Prometheus's form: cumulative buckets, each with its upper bound."""
    total = 0
    bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        family.add_sample(f"{family.name}_bucket", labels | {"le": bound}, total)
    family.add_sample(f"{family.name}_count", labels, total)
    family.add_sample(f"{family.name}_sum", labels, histogram.sum)
    if start_unix_s is not None:
        family.add_sample(f"{family.name}_created", labels, start_unix_s)


def text_of(family: Family) -> bytes:
    """Return a family in the text format of Prometheus."""
    return generate_latest(_OneFamily(family))


@dataclass(frozen=True, slots=True)
class _OneFamily(Collector):
    family: Family

    def collect(self) -> Iterable[Family]:
        return (self.family,)
