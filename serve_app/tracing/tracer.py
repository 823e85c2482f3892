"""Tracer of one process: begins and ends spans, and sends them over OTLP in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

from serve_app.tracing.context import TraceContext, read_headers
from serve_app.tracing.settings import TracingSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Attributes = Mapping[str, AttributeValue | None]
"""Attributes of a span; those that are None are left out."""

_MAX_QUEUED_SPANS = 8192
"""Spans that wait to be sent; beyond it the oldest are dropped, and the log says so."""
_MAX_BATCH_SPANS = 512
_SEND_PERIOD_S = 2.0
_SEND_LIMIT_S = 10.0
"""Longest time for one batch with its repetitions, seconds."""
_CLOSE_LIMIT_S = 3.0
"""Longest wait of a process that stops for its last spans to be sent, seconds."""
_MAX_TEXT_CHARS = 65_536
"""Longest text of an attribute; the library cuts what is longer."""


@dataclass(frozen=True, slots=True)
class SpanTimes:
    """Start and end of a span, monotonic seconds."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Moment:
    """Moment on both clocks of a process."""

    unix_s: float
    monotonic_s: float


class Trace:
    """Trace of one request in this process: its first span, under which the others are made when the request ends."""

    def __init__(self, tracer: trace.Tracer, span: Span, unix_offset_s: float) -> None:
        """`unix_offset_s`: unix time less monotonic time at the request's arrival, seconds."""
        self._tracer = tracer
        self.span = span
        self._unix_offset_s = unix_offset_s

    @property
    def is_recorded(self) -> bool:
        """True if the trace is sampled."""
        return self.span.is_recording()

    @property
    def trace_id(self) -> str:
        """Id of the trace, 32 hexadecimal digits."""
        return trace.format_trace_id(self.span.get_span_context().trace_id)

    @property
    def context(self) -> TraceContext:
        """Context of further work of the request, for other processes."""
        return TraceContext.of_span(self.span)

    def add(
        self, name: str, parent: Span, times: SpanTimes, attributes: Attributes, kind: SpanKind = SpanKind.INTERNAL,
        error_type: str | None = None,
    ) -> Span:  # fmt: skip
        """Add a span that has ended; `error_type` None: it ended well."""
        span = self._tracer.start_span(
            name,
            set_span_in_context(parent),
            kind,
            {key: value for key, value in attributes.items() if value is not None},
            start_time=self._unix_ns(times.start_s),
        )
        _end(span, self._unix_ns(times.end_s), error_type)
        return span

    def end(self, end_s: float, attributes: Attributes, error_type: str | None = None) -> None:
        """End the first span; `error_type` None: the request ended well."""
        self.span.set_attributes({key: value for key, value in attributes.items() if value is not None})
        _end(self.span, self._unix_ns(end_s), error_type)

    def _unix_ns(self, moment_s: float) -> int:
        return int((moment_s + self._unix_offset_s) * 1e9)


class Tracer:
    """Tracer of one process; without an endpoint it traces nothing.

    A request's first span begins when it arrives, which decides if it is sampled. All others are made when it ends, so
    a running request costs nothing. Ended spans wait in a bounded queue for the thread that sends them.
    """

    def __init__(self, settings: TracingSettings, service: str, instance_id: str) -> None:
        """`service` names the kind of process, `instance_id` this one."""
        self.has_prompts = settings.trace_prompts
        self._provider = None if settings.url is None else _provider(settings, service, instance_id)
        self._tracer = None if self._provider is None else self._provider.get_tracer("headway", _version())

    def begin(self, name: str, headers: Mapping[str, str], arrival: Moment) -> Trace | None:
        """Begin the trace of a request that has arrived with these headers; None: nothing is traced."""
        return self._begin(name, read_headers(headers), arrival, SpanKind.SERVER)

    def begin_call(self, name: str, parent: TraceContext, start: Moment) -> Trace | None:
        """Begin the span of a call to another server, below a span of another process."""
        return self._begin(name, read_headers(parent.headers), start, SpanKind.CLIENT)

    def begin_work(self, name: str, parent: TraceContext | None, start: Moment) -> Trace | None:
        """Begin the trace of asynchronous work, below the span that asked for it."""
        return self._begin(name, read_headers({} if parent is None else parent.headers), start, SpanKind.CONSUMER)

    def begin_linked_work(self, name: str, cause: TraceContext | None, start: Moment) -> Trace | None:
        """Begin a trace of its own for one of many pieces of asynchronous work; it links to the span that asked."""
        causes = [] if cause is None else [trace.get_current_span(read_headers(cause.headers)).get_span_context()]
        return self._begin(name, Context(), start, SpanKind.CONSUMER, [Link(each) for each in causes])

    def close(self) -> None:
        """Send the spans that wait, for at most `_CLOSE_LIMIT_S`; this blocks the calling thread."""
        if self._provider is not None:
            # A thread that the end of the process does not wait for: the receiver may hang.
            closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
            closing.start()
            closing.join(_CLOSE_LIMIT_S)

    def _begin(
        self, name: str, context: Context, start: Moment, kind: SpanKind, links: list[Link] | None = None
    ) -> Trace | None:
        if self._tracer is None:
            return None
        span = self._tracer.start_span(name, context, kind, links=links, start_time=int(start.unix_s * 1e9))
        return Trace(self._tracer, span, start.unix_s - start.monotonic_s)


def _end(span: Span, end_ns: int, error_type: str | None) -> None:
    if error_type is not None:
        span.set_attribute("error.type", error_type)
        span.set_status(Status(StatusCode.ERROR))
    span.end(end_ns)


def _provider(settings: TracingSettings, service: str, instance_id: str) -> TracerProvider:
    """Create the library's provider of tracers, with its thread.

    The variables of OpenTelemetry (`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME`)
    apply, since the library reads them.
    """
    # Imported here: it takes a third of a second, and most processes trace nothing.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = Resource.create(
        {
            "service.name": service,
            "service.namespace": "headway",
            "service.version": _version(),
            "service.instance.id": instance_id,
        }
    )
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.trace_sampling_ratio)),
        resource=resource,
        span_limits=SpanLimits(max_span_attribute_length=_MAX_TEXT_CHARS),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            OTLPSpanExporter(settings.url, timeout=_SEND_LIMIT_S),
            max_queue_size=_MAX_QUEUED_SPANS,
            schedule_delay_millis=_SEND_PERIOD_S * 1000,
            max_export_batch_size=_MAX_BATCH_SPANS,
        )
    )
    return provider


def _version() -> str:
    try:
        return version("headway-serve")
    except PackageNotFoundError:
        return "0"
