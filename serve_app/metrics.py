"""Prometheus metrics of HTTP, flow control and routing in this process, and the page of all processes' metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from replicas.engine.stats import START_TIME, one_two_five
from replicas.errors import InvalidRequest
from replicas.protocol import Band, EngineMetrics, HistogramMetric, Metric, MetricKind
from router.balancing.load_table import LoadTable
from router.flow.flow_queue import FlowQueue
from router.scaling.autoscaling_loop import AutoscalingLoop
from router.timeline import Part, Seconds
from router.types import LatencyTargets, Outcome, Reason, Slo
from serve_app.engine_totals import EngineTotals
from serve_app.jobs.api.records import JobsCounts

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})

_REFUSAL_REASONS = (
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "max_tenant_queued_reqs",
    "max_tenant_queued_tokens",
    "max_predicted_wait",
    "deadline",
    "key_requests_per_minute",
    "key_tokens_per_minute",
    "key_max_concurrent_requests",
)
"""Reasons whose series exist from the start, so that the first refusal shows as an increase."""

_DURATION_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_NUM_CHOICES_BUCKETS = (1, 2, 5, 10, 20)
_OUTPUT_BUCKETS = one_two_five(10**6)
_MIGRATIONS = ("resumed", "restarted", "failed")
_MAX_TENANTS = 100
"""Most tenants of a band with a series of their own; the others are one series."""
MAX_ENGINES = 32
"""Most engines that the page shows one by one; above, it shows their sums."""
_SUMMED_AT_ONCE = 16
_OTHER = "other"


class HttpMetrics:
    """HTTP metrics of this ingress, with the names and labels of prometheus-fastapi-instrumentator."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._requests = Counter(
            "http_requests",
            "HTTP requests answered, by route, method and class of status; without /health, /metrics and /load.",
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
        self.outputs = OutputMetrics(self.registry, model_name)
        self._parts = Counter(
            "headway:request_part_seconds",
            "Seconds that completions spent in each part of their time (see router.timeline.Part); of several "
            "sequences the one that ended last.",
            ["band", "part"],
            registry=self.registry,
        )
        for band in Band:
            for part in Part:
                self._parts.labels(_name(band), part.value)
        for reason in _REFUSAL_REASONS:
            self._refusals.labels(model_name, reason)

    def observe(
        self, *, handler: str, method: str, status: int, duration_s: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Count one answered request.

        Clients must not be able to create series: `handler` is the route, and unknown methods share the label `other`.
        """
        method = method if method in _METHODS else _OTHER
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._duration.labels(handler, method).observe(duration_s)
        self._request_size.labels(handler).observe(request_bytes)
        self._response_size.labels(handler).observe(response_bytes)

    def spent(self, band: Band, seconds: Seconds) -> None:
        """Count the parts of a completion's time."""
        for part, part_s in seconds.items():
            if part_s > 0:
                self._parts.labels(_name(band), part.value).inc(part_s)

    def refused(self, reason: str) -> None:
        """Count a request refused for lack of room; `reason` is that of the error."""
        self._refusals.labels(self._model_name, reason).inc()


class OutputMetrics:
    """Metrics of completions: numbers and lengths of choices, keywords that no grammar enforces, malformed calls."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._not_enforced = Counter(
            "headway:unenforced_keywords",
            "Keywords of requests' JSON Schemas that no grammar enforces; x-headway-not-enforced names them.",
            ["model_name"],
            registry=registry,
        ).labels(model_name)
        self._malformed_calls = Counter(
            "headway:malformed_tool_calls", "Tool calls that were malformed or cut off.", ["model_name"],
            registry=registry,
        ).labels(model_name)  # fmt: skip
        self._num_choices = Histogram(
            "vllm:request_params_n",
            "Choices (`n`) of a prompt, once all of them have ended.",
            ["model_name"],
            buckets=_NUM_CHOICES_BUCKETS,
            registry=registry,
        ).labels(model_name)
        self._longest = Histogram(
            "vllm:request_max_num_generation_tokens",
            "Output tokens of the longest choice of a prompt, once all of them have ended.",
            ["model_name"],
            buckets=_OUTPUT_BUCKETS,
            registry=registry,
        ).labels(model_name)

    def count(self, *, num_not_enforced: int, num_malformed_calls: int) -> None:
        """Count one request's keywords that its grammar does not enforce, and the malformed calls of its output."""
        self._not_enforced.inc(num_not_enforced)
        self._malformed_calls.inc(num_malformed_calls)

    def chosen(self, num_choices: int, longest_outputs: Iterable[int]) -> None:
        """Count prompts of a request: the choices of each, and the output tokens of its longest choice."""
        for num_tokens in longest_outputs:
            self._num_choices.observe(num_choices)
            self._longest.observe(num_tokens)


class CountsCollector(Collector):
    """Collector of metrics that a part of this process counts itself."""

    def __init__(self, counts: Callable[[], Iterable[Metric]]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Family]:
        """Return one family per metric name."""
        return plain_families(self._counts())


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

    def finished(self, band: Band, ttft_s: float | None, duration_s: float, num_tokens: int) -> None:
        """Count a request that ended well, its tokens and the latency targets that it met."""
        self._finished.labels(_name(band)).inc()
        self._finished_tokens.labels(_name(band)).inc(num_tokens)
        attained = self._targets[band].attained(ttft_s, duration_s, num_tokens)
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


def engines_shown(engines: Iterable[EngineMetrics], wanted: int | None) -> dict[str, list[EngineMetrics]]:
    """Return the engines of each value of the label `engine`: one for each engine, or the value `all` for many.

    An engine's value is its index, from "0", in the sorted ids of the replicas that answered, so that all ingresses
    number the replicas in the same way. `wanted`: the one value to show; None: all.

    Raises:
        InvalidRequest: there is no engine `wanted`.
    """
    ordered = sorted(engines, key=lambda engine: engine.replica_id)
    if wanted is not None:
        if wanted >= len(ordered):
            answered = f"the engines are 0 to {len(ordered) - 1}" if ordered else "no engine has answered"
            raise InvalidRequest(f"engine is {wanted}; {answered}", "engine")
        return {str(wanted): [ordered[wanted]]}
    if len(ordered) > MAX_ENGINES:
        return {"all": ordered}
    return {str(index): [engine] for index, engine in enumerate(ordered)}


def engine_parts(shown: Mapping[str, Sequence[EngineMetrics]], model_name: str) -> Iterator[bytes]:
    """Yield one family for each metric name of the engines; each sample has the labels `model_name` and `engine`.

    Some parts are empty, so that the maker of a page can let others run between two of them.
    """
    families: dict[str, Family] = {}
    for name, engines in shown.items():
        totals = EngineTotals()
        for start in range(0, len(engines), _SUMMED_AT_ONCE):
            totals.add(*engines[start : start + _SUMMED_AT_ONCE])
            yield b""
        labels, metrics = {"model_name": model_name, "engine": name}, tuple(totals.metrics())
        start_unix_s = next((metric.value for metric in metrics if metric.name == START_TIME), None)
        for metric in metrics:
            _add_metric(families, metric, labels, start_unix_s)
        for histogram in totals.histograms():
            family = families.setdefault(histogram.name, HistogramMetricFamily(histogram.name, histogram.help))
            _add_histogram(family, histogram, labels, start_unix_s)
    for family in families.values():
        yield generate_latest(_Page((family,)))


def plain_families(metrics: Iterable[Metric]) -> Iterable[Family]:
    """Return one family per metric name, whose samples have the metrics' own labels."""
    families: dict[str, Family] = {}
    for metric in metrics:
        _add_metric(families, metric, {})
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


def ingress_families(registry: CollectorRegistry, jobs: Iterable[Family]) -> Iterator[Family]:
    """Yield this ingress's families, each with the samples of the jobs workers' families of the same name."""
    of_jobs: dict[str, list[Family]] = {}
    for family in jobs:
        of_jobs.setdefault(family.name, []).append(family)
    for family in registry.collect():
        for others in of_jobs.get(family.name, ()):
            family.samples += others.samples
        yield family


@dataclass(frozen=True, slots=True)
class _Page(Collector):
    families: Iterable[Family]

    def collect(self) -> Iterable[Family]:
        return self.families


_NO_COUNTS = JobsCounts()


def exposition(
    engines: Iterable[EngineMetrics], model_name: str, http: HttpMetrics, jobs: JobsCounts = _NO_COUNTS
) -> bytes:
    """Return the page for Prometheus, in its text format."""
    return b"".join(page_parts(engines_shown(engines, None), model_name, http, jobs))


def page_parts(
    shown: Mapping[str, Sequence[EngineMetrics]], model_name: str, http: HttpMetrics, jobs: JobsCounts = _NO_COUNTS
) -> Iterator[bytes]:
    """Yield the page in parts, some of them empty, so that its maker can let others run between two of them."""
    yield from engine_parts(shown, model_name)
    num_engines = sum(map(len, shown.values()))
    answered = GaugeMetricFamily("headway:engines", "Engines that answered the scrape.", num_engines)
    for families in ([answered], plain_families(jobs.own), ingress_families(http.registry, jobs.router)):
        for family in families:
            yield generate_latest(_Page((family,)))


def _add_metric(
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


def _add_histogram(
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
