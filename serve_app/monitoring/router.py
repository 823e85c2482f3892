"""Prometheus metrics of flow control, routing and autoscaling in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import nlargest

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from replicas.protocol import Band
from router.balancing.load_table import LoadTable
from router.flow.flow_queue import FlowQueue
from router.scaling.autoscaling_loop import AutoscalingLoop
from router.types import LatencyTargets, Outcome, Reason, Slo
from serve_app.monitoring.engines import MAX_ENGINES

_WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_MIGRATIONS = ("resumed", "restarted", "failed")
_MAX_TENANTS = 100
"""Most tenants of a band with a series of their own; the others are one series."""
_OTHER = "other"


class RouterMetrics:
    """Counters and histograms of the router's decisions; a `router.types.RouterObserver`."""

    def __init__(self, registry: CollectorRegistry, targets: Mapping[Band, LatencyTargets]) -> None:
        self._targets = targets
        self._wait = Histogram(
            "headway:queue_wait_seconds",
            "Time from a request's arrival in flow control to the end of its wait, by the outcome of the wait.",
            ["band", "outcome"],
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self._decisions = Counter(
            "headway:router_decisions",
            "Requests dispatched to a replica, by the reason for the choice of replica (see router.types.Reason).",
            ["reason"],
            registry=registry,
        )
        self._promotions = Counter(
            "headway:starvation_promotions", "Dispatches of a band that had starved.", ["band"], registry=registry
        )
        self._migrations = Counter(
            "headway:migrations", "Requests whose replica was lost, by outcome.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self._finished = Counter("headway:finished_requests", "Requests that ended well.", ["band"], registry=registry)
        self._finished_tokens = Counter(
            "headway:finished_tokens", "Output tokens of requests that ended well.", ["band"], registry=registry
        )
        self._attained = Counter(
            "headway:slo_attained",
            "Requests that ended well and met a latency target of their band (ttft: arrival in flow control to first "
            "output; tpot: (last - first) / (output tokens - 1); all: both), or have none to meet; "
            "attainment = headway:slo_attained_total / on(band) group_left headway:finished_requests_total.",
            ["band", "slo"],
            registry=registry,
        )
        self._goodput = Counter(
            "headway:goodput_tokens",
            "Output tokens of requests that ended well and met every latency target of their band.",
            ["band"],
            registry=registry,
        )
        self._show_zeros()

    def waited(self, band: Band, outcome: Outcome, seconds: float) -> None:
        """Observe the end of a request's wait in flow control."""
        self._wait.labels(_name(band), outcome.value).observe(seconds)

    def decided(self, reason: Reason) -> None:
        """Count a request that was dispatched to the first replica of a ranking."""
        self._decisions.labels(reason.value).inc()

    def promoted(self, band: Band) -> None:
        """Count a dispatch of a band that had starved."""
        self._promotions.labels(_name(band)).inc()

    def migrated(self, outcome: str) -> None:
        """Count a request whose replica was lost, by its outcome: resumed, restarted or failed."""
        self._migrations.labels(outcome).inc()

    def finished(
        self, band: Band, ttft_s: float | None, duration_s: float, num_tokens: int, auto_tpot_s: float | None = None
    ) -> None:
        """Count a request that ended well, its tokens and the latency targets that it met."""
        self._finished.labels(_name(band)).inc()
        self._finished_tokens.labels(_name(band)).inc(num_tokens)
        attained = self._targets[band].attained(ttft_s, duration_s, num_tokens, auto_tpot_s)
        for slo in attained:
            self._attained.labels(_name(band), slo.value).inc()
        if Slo.ALL in attained:
            self._goodput.labels(_name(band)).inc(num_tokens)

    def _show_zeros(self) -> None:
        """Create every series of the counters, so that the first event shows as an increase."""
        for band in map(_name, Band):
            for counter in (self._promotions, self._finished, self._finished_tokens, self._goodput):
                counter.labels(band)
            for slo in Slo:
                self._attained.labels(band, slo.value)
        for reason in Reason:
            self._decisions.labels(reason.value)
        for outcome in _MIGRATIONS:
            self._migrations.labels(outcome)


class RouterCollector(Collector):
    """Collector of flow control's queue sizes, the age of the load table's entries and the autoscaling decision."""

    def __init__(self, queue: FlowQueue, table: LoadTable, autoscaling: AutoscalingLoop) -> None:
        self._queue = queue
        self._table = table
        self._autoscaling = autoscaling

    def collect(self) -> Iterator[Family]:
        """Yield the present values as gauges."""
        size = GaugeMetricFamily(
            "headway:queue_size",
            "Requests waiting in flow control, of the 100 tenants of a band with most; tenant=other has the rest.",
            labels=["band", "tenant"],
        )
        tokens = GaugeMetricFamily(
            "headway:queue_tokens", "Expected tokens of the requests waiting in flow control.", labels=["band"]
        )
        tenants = GaugeMetricFamily(
            "headway:queue_tenants", "Tenants with a request that waits in flow control.", labels=["band"]
        )
        age = GaugeMetricFamily(
            "headway:router_state_age_seconds", "Age of a replica's last report; of the 32 oldest.", labels=["replica"]
        )
        for band in Band:
            largest = self._queue.largest(band, _MAX_TENANTS)
            rest = self._queue.num_requests(band) - sum(largest.values())
            tenants.add_metric([_name(band)], self._queue.num_tenants(band))
            for tenant, count in (*largest.items(), *([(_OTHER, rest)] if rest else [])):
                size.add_metric([_name(band), tenant], count)
            tokens.add_metric([_name(band)], self._queue.num_tokens(band))
        oldest = nlargest(MAX_ENGINES, ((age_s, name) for name, age_s in self._table.ages_s().items()))
        for age_s, replica_id in oldest:
            age.add_metric([replica_id], age_s)
        desired = GaugeMetricFamily("headway:autoscale_desired_replicas", "Desired number of model replicas.")
        drain = GaugeMetricFamily(
            "headway:autoscale_drain_seconds",
            "Waiting tokens without batch work / (replicas * measured tokens/s of one); infinite without replicas.",
        )
        if (decision := self._autoscaling.decision) is not None:
            desired.add_metric([], decision.desired_replicas)
            drain.add_metric([], float("inf") if decision.drain_s is None else decision.drain_s)
        yield from (size, tokens, tenants, age, desired, drain)


def _name(band: Band) -> str:
    return band.name.lower()
