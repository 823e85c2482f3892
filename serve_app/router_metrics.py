"""Prometheus metrics of flow control and routing in this ingress."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from replicas.protocol import Band
from router.autoscaling_loop import AutoscalingLoop
from router.flow_queue import FlowQueue
from router.load_table import LoadTable
from router.types import Outcome

_WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_MAX_TENANTS = 1000
_OTHER = "other"


class RouterMetrics:
    """What the router did; hears of it as `router.types.RouterObserver`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._wait = Histogram(
            "headway:queue_wait_seconds",
            "From a request's arrival in flow control to the end of its waiting, by how it ended.",
            ["band", "outcome"],
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self._promotions = Counter(
            "headway:starvation_promotions", "Dispatches of a band that had starved.", ["band"], registry=registry
        )
        self._migrations = Counter(
            "headway:migrations", "Requests whose replica was lost, by what became of them.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self._finished = Counter(
            "headway:finished_tokens", "Output tokens of requests that ended well.", ["band"], registry=registry
        )

    def waited(self, band: Band, outcome: Outcome, seconds: float) -> None:
        """A request's waiting ended."""
        self._wait.labels(_name(band), outcome.value).observe(seconds)

    def promoted(self, band: Band) -> None:
        """A band that had starved was served first."""
        self._promotions.labels(_name(band)).inc()

    def migrated(self, outcome: str) -> None:
        """A request whose replica was lost went on elsewhere or did not."""
        self._migrations.labels(outcome).inc()

    def finished(self, band: Band, ttft_s: float | None, duration_s: float, num_tokens: int) -> None:
        """A request ended well."""
        self._finished.labels(_name(band)).inc(num_tokens)


class RouterCollector(Collector):
    """Renders what waits in flow control, how old the load table's entries are, and how many replicas are wanted."""

    def __init__(self, queue: FlowQueue, table: LoadTable, autoscaling: AutoscalingLoop) -> None:
        self._queue = queue
        self._table = table
        self._autoscaling = autoscaling

    def collect(self) -> Iterator[Family]:
        """Gauges of this moment."""
        size = GaugeMetricFamily("headway:queue_size", "Requests that wait in flow control.", labels=["band", "tenant"])
        tokens = GaugeMetricFamily("headway:queue_tokens", "Tokens that they are expected to need.", labels=["band"])
        age = GaugeMetricFamily(
            "headway:router_state_age_seconds", "Age of a replica's last report.", labels=["replica"]
        )
        for band in Band:
            for tenant, count in _bounded(self._queue.num_by_tenant(band)).items():
                size.add_metric([_name(band), tenant], count)
            tokens.add_metric([_name(band)], self._queue.num_tokens(band))
        for view in self._table.views():
            age.add_metric([view.stats.replica_id], view.age_s)
        desired = GaugeMetricFamily("headway:autoscale_desired_replicas", "Model replicas that there should be.")
        drain = GaugeMetricFamily(
            "headway:autoscale_drain_seconds",
            "Tokens that wait, save batch work / (replicas * measured tokens/s of one); infinite without replicas.",
        )
        if (decision := self._autoscaling.decision) is not None:
            desired.add_metric([], decision.desired_replicas)
            drain.add_metric([], float("inf") if decision.drain_s is None else decision.drain_s)
        yield from (size, tokens, age, desired, drain)


def _bounded(counts: dict[str, int]) -> dict[str, int]:
    """The tenants with most requests; the rest together as `other`."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    bounded = dict(ordered[:_MAX_TENANTS])
    if rest := sum(count for _, count in ordered[_MAX_TENANTS:]):
        bounded[_OTHER] = bounded.get(_OTHER, 0) + rest
    return bounded


def _name(band: Band) -> str:
    return band.name.lower()
