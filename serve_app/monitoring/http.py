"""Prometheus metrics of HTTP and of completions in this process."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from replicas.engine.stats import one_two_five
from replicas.protocol import Band
from router.timeline import Part, Seconds

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
_NUM_CHOICES_BUCKETS = (1, 2, 5, 10, 20)
_OUTPUT_BUCKETS = one_two_five(10**6)


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
                self._parts.labels(band.name.lower(), part.value)
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

    def spent(self, band: Band, seconds: Seconds) -> None:
        """Count the parts of a completion's time."""
        for part, part_s in seconds.items():
            if part_s > 0:
                self._parts.labels(band.name.lower(), part.value).inc(part_s)

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
