"""Prometheus exposition of the metrics of the engines, the jobs deployment and this ingress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from replicas.protocol import EngineMetrics, HistogramMetric, Metric, MetricKind
from serve_app.jobs.api.records import JobsCounts

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})

_REFUSAL_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens", "max_predicted_wait", "deadline")
"""Reasons whose series exist from the start, so that the first refusal shows as an increase."""

_DURATION_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class HttpMetrics:
    """HTTP metrics of this ingress, with the names and labels of prometheus-fastapi-instrumentator."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._requests = Counter(
            "http_requests",
            "HTTP requests answered, by route, method and class of status.",
            ["handler", "method", "status"],
            registry=self.registry,
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Time from a request's arrival to the last byte of its response, by route and method.",
            ["handler", "method"],
            buckets=_DURATION_BUCKETS_S,
            registry=self.registry,
        )
        self._request_size = Summary(
            "http_request_size_bytes",
            "Bytes of request bodies that were read.",
            ["handler"],
            registry=self.registry,
        )
        self._response_size = Summary(
            "http_response_size_bytes", "Bytes of response bodies.", ["handler"], registry=self.registry
        )
        self._refusals = Counter(
            "vllm:admission_rejections",
            "Requests answered with 429, by the limit reached. A request that a replica refuses waits in this ingress "
            "and is not counted (headway:engine_refusals_total).",
            ["model_name", "reason"],
            registry=self.registry,
        )
        for reason in _REFUSAL_REASONS:
            self._refusals.labels(model_name, reason)

    def observe(
        self, *, handler: str, method: str, status: int, duration_s: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Count one answered request.

        Clients must not be able to create series: `handler` is the route, and unknown methods share the label `other`.
        """
        method = method if method in _METHODS else "other"
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._duration.labels(handler, method).observe(duration_s)
        self._request_size.labels(handler).observe(request_bytes)
        self._response_size.labels(handler).observe(response_bytes)

    def refused(self, reason: str) -> None:
        """Count a request refused for lack of room; `reason` is that of the error."""
        self._refusals.labels(self._model_name, reason).inc()


class EngineCollector(Collector):
    """Collector of the metrics that the replicas returned for one scrape.

    Each sample has the labels `model_name` and `engine`. `engine` is the replica's index, from "0", in the sorted ids
    of the replicas that answered, so that all ingresses number the replicas in the same way.
    """

    def __init__(self, engines: Sequence[EngineMetrics], model_name: str) -> None:
        self._engines = sorted(engines, key=lambda engine: engine.replica_id)
        self._model_name = model_name

    def collect(self) -> Iterator[Family]:
        """Yield one family per metric name, with the samples of all replicas."""
        families: dict[str, Family] = {}
        for index, engine in enumerate(self._engines):
            labels = {"model_name": self._model_name, "engine": str(index)}
            for metric in engine.metrics:
                _add_metric(families, metric, labels)
            for histogram in engine.histograms:
                family = families.setdefault(histogram.name, HistogramMetricFamily(histogram.name, histogram.help))
                _add_histogram(family, histogram, labels)
        yield from families.values()


class JobsCollector(Collector):
    """Collector of the metrics of the jobs deployment."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        """Yield one family per metric name."""
        families: dict[str, Family] = {}
        for metric in self._metrics:
            _add_metric(families, metric, {})
        yield from families.values()


class IngressCollector(Collector):
    """Collector of this ingress's metrics, with the jobs process's samples of the same names as `process="jobs"`."""

    def __init__(self, registry: CollectorRegistry, jobs: Sequence[Family]) -> None:
        self._registry = registry
        self._jobs = {family.name: family for family in jobs}

    def collect(self) -> Iterator[Family]:
        """Yield every family of this ingress once."""
        for family in self._registry.collect():
            if family.name in self._jobs:
                for sample in self._jobs[family.name].samples:
                    family.add_sample(sample.name, sample.labels | {"process": "jobs"}, sample.value)
            yield family


_NO_COUNTS = JobsCounts()


def exposition(
    engines: Iterable[EngineMetrics], model_name: str, http: HttpMetrics, jobs: JobsCounts = _NO_COUNTS
) -> bytes:
    """Return the page for Prometheus, in its text format."""
    collectors = (
        EngineCollector(list(engines), model_name),
        JobsCollector(jobs.own),
        IngressCollector(http.registry, jobs.router),
    )
    return b"".join(generate_latest(collector) for collector in collectors)


def _add_metric(families: dict[str, Family], metric: Metric, labels: dict[str, str]) -> None:
    family = families.setdefault(metric.name, _family(metric))
    suffix = "_total" if metric.kind is MetricKind.COUNTER else ""
    family.add_sample(family.name + suffix, labels | dict(metric.labels), metric.value)


def _family(metric: Metric) -> Family:
    if metric.kind is MetricKind.COUNTER:
        return CounterMetricFamily(metric.name, metric.help)
    return GaugeMetricFamily(metric.name, metric.help)


def _add_histogram(family: Family, histogram: HistogramMetric, labels: dict[str, str]) -> None:
    """Add a histogram's samples in Prometheus's form: cumulative buckets, each with its upper bound."""
    total = 0
    bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        family.add_sample(f"{family.name}_bucket", labels | {"le": bound}, total)
    family.add_sample(f"{family.name}_count", labels, total)
    family.add_sample(f"{family.name}_sum", labels, histogram.sum)
