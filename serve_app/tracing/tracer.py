"""Tracer of one process: begins traces, and writes the spans of a request when it ends."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, SpanFlags, Status
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from serve_app.tracing.attributes import Attributes, add_attributes
from serve_app.tracing.context import TraceContext, read_headers
from serve_app.tracing.settings import TracingSettings

if TYPE_CHECKING:
    from serve_app.tracing.span_sender import SpanSender

_MAX_SPANS = 256
"""Spans below a trace's first one; a request that was preempted or moved again and again has no more."""
_FLAGS = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | TraceFlags.SAMPLED
_REMOTE_PARENT = SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
_RATIO_BITS = 64
"""Lowest bits of a trace's id, which decide if it is sampled, as in the samplers of OpenTelemetry."""


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


@dataclass(frozen=True, slots=True)
class Origin:
    """Start of a trace in this process, and the spans of other processes before it."""

    kind: SpanKind
    start: Moment
    parent: SpanContext | None = None
    """Span above the first one."""
    cause: SpanContext | None = None
    """Span of another trace that asked for this one."""


class Trace:
    """Trace of one request in this process: its first span, and those below it, which are made when the request ends.

    The spans are OTLP messages from the start, at most `_MAX_SPANS` below the first one.
    """

    def __init__(self, name: str, origin: Origin, context: SpanContext, sender: SpanSender, rng: random.Random) -> None:
        """`context` is the place of the first span; `name` is its name."""
        self.name = name
        self.span_id = context.span_id.to_bytes(8, "big")
        """Id of the first span."""
        self._origin = origin
        self._context = context
        self._sender = sender
        self._rng = rng
        self._unix_offset_s = origin.start.unix_s - origin.start.monotonic_s
        self._messages = ScopeSpans()
        self._trace_id = context.trace_id.to_bytes(16, "big")
        self._state = context.trace_state.to_header()
        self._num_left_out = 0

    @property
    def is_recorded(self) -> bool:
        """True if the trace is sampled."""
        return self._context.trace_flags.sampled

    @property
    def trace_id(self) -> str:
        """Id of the trace, 32 hexadecimal digits."""
        return self._trace_id.hex()

    @property
    def context(self) -> TraceContext:
        """Context of further work of the request, for other processes."""
        return TraceContext.of_span(self._context)

    def add(
        self, name: str, parent_id: bytes, times: SpanTimes, attributes: Attributes | None = None,
        kind: SpanKind = SpanKind.INTERNAL, error_type: str | None = None,
    ) -> bytes:  # fmt: skip
        """Add a span that has ended, and return its id; `error_type` None: it ended well.

        Beyond the limit it only counts the span and returns the parent's id.
        """
        if len(self._messages.spans) == _MAX_SPANS:
            self._num_left_out += 1
            return parent_id
        span_id = self._rng.randbytes(8)
        self._write(name, span_id, parent_id, times, attributes, kind, error_type)
        return span_id

    def end(self, end_s: float, attributes: Attributes, error_type: str | None = None) -> None:
        """End the first span, and send all; `error_type` None: the request ended well."""
        if not self.is_recorded:
            return
        origin, times = self._origin, SpanTimes(self._origin.start.monotonic_s, end_s)
        parent_id = b"" if origin.parent is None else origin.parent.span_id.to_bytes(8, "big")
        attributes = {**attributes, "headway.num_spans_left_out": self._num_left_out or None}
        self._write(self.name, self.span_id, parent_id, times, attributes, origin.kind, error_type)
        first = self._messages.spans[-1]
        if origin.parent is not None:
            first.flags |= _REMOTE_PARENT
        if origin.cause is not None:
            link = first.links.add()
            link.trace_id = origin.cause.trace_id.to_bytes(16, "big")
            link.span_id = origin.cause.span_id.to_bytes(8, "big")
            link.trace_state = origin.cause.trace_state.to_header()
            link.flags = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | _REMOTE_PARENT | origin.cause.trace_flags
        self._sender.put(self._messages.SerializeToString())

    def _write(
        self, name: str, span_id: bytes, parent_id: bytes, times: SpanTimes, attributes: Attributes | None,
        kind: SpanKind, error_type: str | None,
    ) -> None:  # fmt: skip
        span = self._messages.spans.add()
        span.trace_id = self._trace_id
        span.span_id = span_id
        span.parent_span_id = parent_id
        span.trace_state = self._state
        span.flags = _FLAGS
        span.name = name
        span.kind = kind.value + 1  # The protocol counts kinds from 1.
        span.start_time_unix_nano = self._unix_ns(times.start_s)
        span.end_time_unix_nano = self._unix_ns(times.end_s)
        if attributes is not None:
            add_attributes(span.attributes, attributes)
        if error_type is not None:
            add_attributes(span.attributes, {"error.type": error_type})
            span.status.code = Status.STATUS_CODE_ERROR

    def _unix_ns(self, moment_s: float) -> int:
        return int((moment_s + self._unix_offset_s) * 1e9)


class Tracer:
    """Tracer of one process; without an endpoint it traces nothing.

    A request's trace begins when it arrives, which decides if it is sampled. All spans are made when it ends, so a
    running request costs nothing. The spans of ended requests wait in a bounded queue for the thread that sends them.
    """

    def __init__(self, settings: TracingSettings, service: str, instance_id: str) -> None:
        """`service` names the kind of process, `instance_id` this one."""
        self.has_prompts = settings.trace_prompts
        self._rng = random.Random()
        self._num_sampled = round(settings.trace_sampling_ratio * 2**_RATIO_BITS)
        self._sender: SpanSender | None = None
        if settings.url is not None:
            # Imported here: most processes trace nothing, and the client takes a while to import.
            from serve_app.tracing.span_sender import SpanSender

            self._sender = SpanSender(settings.url, service, instance_id)

    def begin(self, name: str, headers: Mapping[str, str], arrival: Moment) -> Trace | None:
        """Begin the trace of a request that has arrived with these headers; None: nothing is traced."""
        return self._begin(name, Origin(SpanKind.SERVER, arrival, read_headers(headers)))

    def begin_call(self, name: str, parent: TraceContext, start: Moment) -> Trace | None:
        """Begin the span of a call to another server, below a span of another process."""
        return self._begin(name, Origin(SpanKind.CLIENT, start, read_headers(parent.headers)))

    def begin_work(self, name: str, parent: TraceContext | None, start: Moment) -> Trace | None:
        """Begin the trace of asynchronous work, below the span that asked for it."""
        return self._begin(name, Origin(SpanKind.CONSUMER, start, read_headers(_headers(parent))))

    def begin_linked_work(self, name: str, cause: TraceContext | None, start: Moment) -> Trace | None:
        """Begin a trace of its own for one of many pieces of asynchronous work; it links to the span that asked."""
        return self._begin(name, Origin(SpanKind.CONSUMER, start, cause=read_headers(_headers(cause))))

    def close(self) -> None:
        """Send the spans that wait, for a bounded time; this blocks the calling thread."""
        if self._sender is not None:
            self._sender.close()

    def _begin(self, name: str, origin: Origin) -> Trace | None:
        if self._sender is None:
            return None
        return Trace(name, origin, self._place(origin.parent), self._sender, self._rng)

    def _place(self, parent: SpanContext | None) -> SpanContext:
        """Return the place of a new span: in the trace of its parent, or in a new one."""
        span_id = self._rng.getrandbits(64)
        if parent is not None:
            return SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)
        trace_id = self._rng.getrandbits(128)
        is_sampled = trace_id % 2**_RATIO_BITS < self._num_sampled
        return SpanContext(trace_id, span_id, False, TraceFlags(TraceFlags.SAMPLED if is_sampled else 0))


def _headers(context: TraceContext | None) -> Mapping[str, str]:
    return {} if context is None else context.headers
