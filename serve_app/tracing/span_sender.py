"""OpenTelemetry's maker of spans, and its exporter behind a bounded queue of the spans of ended requests."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import cast

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span
from opentelemetry.trace import Tracer as SpanMaker
from requests.utils import get_environ_proxies

logger = logging.getLogger(__name__)

_MAX_TEXT_CHARS = 65_536
"""Longest text of an attribute; the rest is cut off."""
_MAX_QUEUED_SPANS = 16_384
"""Spans that wait to be sent, of some 3 KiB each; beyond it requests leave none, and the log says how many."""
_MAX_BATCH_SPANS = 2048
_SEND_PERIOD_S = 2.0
_SEND_LIMIT_S = 10.0
"""Longest time for one batch with its repetitions, seconds."""
_CLOSE_LIMIT_S = 3.0
"""Longest wait of a process that stops for its last spans to be sent, seconds."""


class SpanSender:
    """Thread that exports the spans of ended requests, in batches of two seconds or `_MAX_BATCH_SPANS`.

    A request's spans are exported in one batch or left out together. OpenTelemetry's `BatchSpanProcessor` knows single
    spans only, so the queue is here, and the provider has no processor.
    """

    def __init__(self, url: str, maker: SpanMaker) -> None:
        """`maker` makes the spans that `put` gets."""
        self.maker = maker
        self._url = url
        self._exporter = _exporter(url)
        self._lock = threading.Lock()
        self._queue: deque[Sequence[Span]] = deque()
        self._num_spans = 0
        self._num_left_out = 0
        """Requests whose spans found no room since the last warning."""
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[Span]) -> None:
        """Have the spans of a request sent, unless the queue is full."""
        with self._lock:
            if self._num_spans + len(spans) > _MAX_QUEUED_SPANS:
                self._num_left_out += 1
                return
            self._queue.append(spans)
            self._num_spans += len(spans)
            is_due = self._num_spans >= _MAX_BATCH_SPANS
        if is_due:
            self._wake.set()

    def close(self) -> None:
        """Send the spans that wait, for at most `_CLOSE_LIMIT_S`; this blocks the calling thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join(_CLOSE_LIMIT_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(_SEND_PERIOD_S)
            self._wake.clear()
            is_last = self._closing.is_set()
            while batch := self._take():
                self._send(batch)

    def _take(self) -> list[Span]:
        """Take the next batch out of the queue; empty: there is none."""
        batch: list[Span] = []
        with self._lock:
            while self._queue and len(batch) < _MAX_BATCH_SPANS:
                batch += self._queue.popleft()
            self._num_spans -= len(batch)
            num_left_out, self._num_left_out = self._num_left_out, 0
        if num_left_out:
            logger.warning("the queue of spans was full: %d requests have none", num_left_out)
        return batch

    def _send(self, batch: list[Span]) -> None:
        # The exporter catches its errors, repeats where the protocol says so, and logs the reason.
        if self._exporter.export(cast("list[ReadableSpan]", batch)) is not SpanExportResult.SUCCESS:
            logger.warning("%d spans were not received by %s", len(batch), self._url)


def span_maker(ratio: float, service: str, instance_id: str) -> SpanMaker:
    """Return a maker of spans, of a provider of its own: the global one is Ray's or another library's.

    A span below one of a caller is sampled as that is; `ratio` is the share of the others. The attributes of the
    variable `OTEL_RESOURCE_ATTRIBUTES` are among those of the resource, since the library reads it.
    """
    release = _version()
    resource = Resource.create(
        {
            "service.name": service,
            "service.namespace": "headway",
            "service.version": release,
            "service.instance.id": instance_id,
        }
    )
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(ratio)),
        resource=resource,
        shutdown_on_exit=False,
        span_limits=SpanLimits(max_span_attribute_length=_MAX_TEXT_CHARS),
    )
    return provider.get_tracer("headway", release)


def _exporter(url: str) -> SpanExporter:
    """Return an exporter, which reads OpenTelemetry's variables for headers, compression and certificates."""
    session = requests.Session()
    # By default, requests would send the credentials of ~/.netrc, and REQUESTS_CA_BUNDLE would win over OpenTelemetry's
    # variable.
    session.trust_env = False
    session.proxies.update(get_environ_proxies(url))
    # Without a file, requests would trust certifi's authorities and not those that the machine trusts.
    machine = ssl.get_default_verify_paths()
    given = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE") or os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE")
    certificates = given or machine.cafile or machine.capath
    return OTLPSpanExporter(url, certificate_file=certificates, timeout=_SEND_LIMIT_S, session=session)


def _version() -> str:
    try:
        return version("headway-serve")
    except PackageNotFoundError:
        return "0"
