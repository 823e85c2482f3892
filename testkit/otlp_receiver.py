"""OTLP receiver of traces: a real HTTP server that decodes what it gets with OpenTelemetry's own messages."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """Span as it came over the wire."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Id of the span above it; empty: there is none."""
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool
    links: tuple[str, ...]
    """Traces that it links to."""
    service: str


@dataclass
class OtlpReceiver:
    """Receiver that keeps the spans it gets, and answers with `status`."""

    port: int = 0
    status: int = 200
    gate: threading.Event = field(default_factory=threading.Event)
    """The receiver answers while it is set, as it is at first."""
    num_posts: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)
    spans: list[ReceivedSpan] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/traces"

    def named(self, name: str) -> list[ReceivedSpan]:
        """Return the spans of this name, the earliest first."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ns)

    def below(self, parent: ReceivedSpan) -> list[ReceivedSpan]:
        """Return the spans directly below one, the earliest first."""
        children = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(children, key=lambda span: (span.start_ns, span.end_ns))

    def root(self, trace_id: str) -> ReceivedSpan:
        """Return the only span of a trace whose parent was not received, after checking that all others hang below."""
        ids = {span.span_id for span in self.spans if span.trace_id == trace_id}
        [root] = [span for span in self.spans if span.trace_id == trace_id and span.parent_id not in ids]
        return root

    def tree(self, parent: ReceivedSpan) -> tuple[Any, ...]:
        """Return the names of a span and of all below it, nested."""
        return (parent.name, *(self.tree(child) for child in self.below(parent)))


@contextlib.contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Yield a receiver that runs in a thread."""
    receiver = OtlpReceiver()
    receiver.gate.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.num_posts += 1
            receiver.gate.wait()
            receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
            if receiver.status == 200:
                assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
                receiver.spans += _spans(ExportTraceServiceRequest.FromString(body))
            self.send_response(receiver.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.gate.set()
            server.shutdown()
            thread.join()


def _spans(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for of_resource in request.resource_spans:
        resource = {each.key: _value(each.value) for each in of_resource.resource.attributes}
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield ReceivedSpan(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=span.kind,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes={each.key: _value(each.value) for each in span.attributes},
                    is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                    links=tuple(link.trace_id.hex() for link in span.links),
                    service=resource["service.name"],
                )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    assert kind is not None
    return getattr(value, kind)
