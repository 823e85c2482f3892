"""Trace context of W3C: the place of a request in a trace, as headers carry it from process to process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Place in a trace: a span, and the data that tracing systems add to it."""

    traceparent: str
    tracestate: str | None = None

    @classmethod
    def of_headers(cls, headers: Mapping[str, str]) -> TraceContext | None:
        """Return the context in a request's headers; None: they have none that is valid."""
        span = get_current_span(read_headers(headers))
        return cls.of_span(span) if span.get_span_context().is_valid else None

    @classmethod
    def of_span(cls, span: Span) -> TraceContext:
        """Return the context of the spans below `span`."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        return cls(carrier["traceparent"], carrier.get("tracestate"))

    @classmethod
    def of_columns(cls, traceparent: str | None, tracestate: str | None) -> TraceContext | None:
        """Return the context that two columns of a database hold; None: they hold none."""
        return None if traceparent is None else cls(traceparent, tracestate)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that hand the context on."""
        return {"traceparent": self.traceparent} | ({"tracestate": self.tracestate} if self.tracestate else {})


def read_headers(headers: Mapping[str, str]) -> Context:
    """Return OpenTelemetry's context with the span that headers name; it is empty if they name none that is valid."""
    known = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    return _PROPAGATOR.extract(known, Context())
