"""Tracer of one process: begins traces, and makes the spans of a request when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)

from serve_app.tracing.context import TraceContext, read_headers
from serve_app.tracing.settings import TracingSettings

if TYPE_CHECKING:
    from serve_app.tracing.span_sender import SpanSender

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute | None]
"""Attributes by name; those that are None are left out."""

_MAX_SPANS = 256
"""Spans below a trace's first one; a request that was preempted or moved again and again has no more."""


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
    """Trace of one request in this process: its first span, and those below it, which are made when the request ends.

    There are at most `_MAX_SPANS` below the first one.
    """

    def __init__(self, first: Span, start: Moment, sender: SpanSender) -> None:
        """`first` is the first span, which has begun at `start`."""
        self.first = first
        self.is_recorded = first.is_recording()
        """True if the trace is sampled."""
        self._sender = sender
        self._unix_offset_s = start.unix_s - start.monotonic_s
        self._spans: list[Span] = []
        self._num_left_out = 0

    @property
    def trace_id(self) -> str:
        """Id of the trace, 32 hexadecimal digits."""
        return format_trace_id(self.first.get_span_context().trace_id)

    @property
    def context(self) -> TraceContext:
        """Context of further work of the request, for other processes."""
        return TraceContext.of_span(self.first)

    def add(
        self, name: str, parent: Span, times: SpanTimes, attributes: Attributes | None = None,
        kind: SpanKind = SpanKind.INTERNAL, error_type: str | None = None,
    ) -> Span:  # fmt: skip
        """Add a span that has ended, and return it; `error_type` None: it ended well.

        Beyond the limit it only counts the span and returns the parent.
        """
        if len(self._spans) == _MAX_SPANS:
            self._num_left_out += 1
            return parent
        above = set_span_in_context(parent, Context())
        span = self._sender.maker.start_span(name, above, kind, start_time=self._unix_ns(times.start_s))
        self._end(span, times.end_s, attributes or {}, error_type)
        return span

    def end(self, end_s: float, attributes: Attributes, error_type: str | None = None) -> None:
        """End the first span, and send all; `error_type` None: the request ended well."""
        if self.is_recorded:
            counted = {**attributes, "headway.num_spans_left_out": self._num_left_out or None}
            self._end(self.first, end_s, counted, error_type)
            self._sender.put(self._spans)

    def _end(self, span: Span, end_s: float, attributes: Attributes, error_type: str | None) -> None:
        known = {key: value for key, value in attributes.items() if value is not None}
        if error_type is not None:
            known["error.type"] = error_type
            span.set_status(StatusCode.ERROR)
        span.set_attributes(known)
        span.end(self._unix_ns(end_s))
        self._spans.append(span)

    def _unix_ns(self, moment_s: float) -> int:
        return int((moment_s + self._unix_offset_s) * 1e9)


class Tracer:
    """Tracer of one process; without an endpoint it traces nothing.

    A request's trace begins when it arrives, which decides if it is sampled. All other spans are made when it ends, so
    a running request costs nothing. The spans of ended requests wait in a bounded queue for the thread that sends them.
    """

    def __init__(self, settings: TracingSettings, service: str, instance_id: str) -> None:
        """`service` names the kind of process, `instance_id` this one."""
        self.has_prompts = settings.trace_prompts
        self._sender: SpanSender | None = None
        if settings.url is not None:
            # Imported here: most processes trace nothing, and the library takes a while to import.
            from serve_app.tracing.span_sender import SpanSender, span_maker

            self._sender = SpanSender(settings.url, span_maker(settings.trace_sampling_ratio, service, instance_id))

    def begin(self, name: str, headers: Mapping[str, str], arrival: Moment) -> Trace | None:
        """Begin the trace of a request that has arrived with these headers; None: nothing is traced."""
        return self._begin(name, SpanKind.SERVER, arrival, headers)

    def begin_call(self, name: str, parent: TraceContext, start: Moment) -> Trace | None:
        """Begin the span of a call to another server, below a span of another process."""
        return self._begin(name, SpanKind.CLIENT, start, parent.headers)

    def begin_work(self, name: str, parent: TraceContext | None, start: Moment) -> Trace | None:
        """Begin the trace of asynchronous work, below the span that asked for it."""
        return self._begin(name, SpanKind.CONSUMER, start, _headers(parent))

    def begin_linked_work(self, name: str, cause: TraceContext | None, start: Moment) -> Trace | None:
        """Begin a trace of its own for one of many pieces of asynchronous work; it links to the span that asked."""
        asked = get_current_span(read_headers(_headers(cause))).get_span_context()
        return self._begin(name, SpanKind.CONSUMER, start, {}, asked)

    def close(self) -> None:
        """Send the spans that wait, for a bounded time; this blocks the calling thread."""
        if self._sender is not None:
            self._sender.close()

    def _begin(
        self, name: str, kind: SpanKind, start: Moment, parent: Mapping[str, str], cause: SpanContext | None = None
    ) -> Trace | None:
        if self._sender is None:
            return None
        links = [] if cause is None else [Link(cause)]  # The library leaves out a link that is not valid.
        unix_ns = int(start.unix_s * 1e9)
        first = self._sender.maker.start_span(name, read_headers(parent), kind, None, links, unix_ns)
        # It is not valid where the variable `OTEL_SDK_DISABLED` is set.
        return Trace(first, start, self._sender) if first.get_span_context().is_valid else None


def _headers(context: TraceContext | None) -> Mapping[str, str]:
    return {} if context is None else context.headers
