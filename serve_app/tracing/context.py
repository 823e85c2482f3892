"""Trace context of W3C: the place of a request in a trace, as headers carry it from process to process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Place in a trace: a span, and the data that tracing systems add to it."""

    traceparent: str
    tracestate: str | None = None

    @classmethod
    def of_headers(cls, headers: Mapping[str, str]) -> TraceContext | None:
        """Return the context in a request's headers; None: they have none that is valid."""
        if "traceparent" not in headers:
            return None
        return cls._of(read_headers(headers))

    @classmethod
    def of_span(cls, span: Span) -> TraceContext:
        """Return the context of the spans below `span`."""
        found = cls._of(set_span_in_context(span))
        assert found is not None
        return found

    @classmethod
    def of_columns(cls, traceparent: str | None, tracestate: str | None) -> TraceContext | None:
        """Return the context that two columns of a database hold; None: they hold none."""
        return None if traceparent is None else cls(traceparent, tracestate)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that hand the context on."""
        return {"traceparent": self.traceparent} | ({"tracestate": self.tracestate} if self.tracestate else {})

    @classmethod
    def _of(cls, context: Context) -> TraceContext | None:
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, context)
        return cls(carrier["traceparent"], carrier.get("tracestate")) if carrier else None


def read_headers(headers: Mapping[str, str]) -> Context:
    """Return the context in headers for the OpenTelemetry library; it is empty if they have none that is valid."""
    known = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    return TraceContextTextMapPropagator().extract(known, Context())
