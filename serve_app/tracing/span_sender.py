"""Thread that posts the spans of ended requests to an OTLP receiver."""

from __future__ import annotations

import gzip
import logging
import os
import ssl
import threading
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from typing import cast

import httpx
import tenacity
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.util.re import parse_env_headers

from serve_app.tracing.attributes import Attributes, add_attributes

logger = logging.getLogger(__name__)

_MAX_QUEUED_BYTES = 16 * 2**20
"""Size of the spans that wait to be sent; beyond it requests leave none, and the log says how many."""
_MAX_BATCH_BYTES = 2**20
_SEND_PERIOD_S = 2.0
_SEND_LIMIT_S = 10.0
"""Longest time for one batch with its repetitions, seconds."""
_CLOSE_LIMIT_S = 3.0
"""Longest wait of a process that stops for its last spans to be sent, seconds."""
_REPEATABLE = (429, 502, 503, 504)
"""Statuses after which a client of OTLP repeats a batch."""
_FIRST_WAIT_S = 0.25
"""Wait before the first repetition, seconds; each one after it waits about twice as long."""


class _TryAgain(Exception):
    """Answer of a receiver that wants the batch again later."""


class SpanSender:
    """Thread that posts the spans of ended requests, in batches of two seconds or one MiB.

    The spans of a request are an encoded `ScopeSpans`. A batch is their concatenation, which protobuf reads as one
    message with the spans of all.
    """

    def __init__(self, url: str, service: str, instance_id: str) -> None:
        """`service` names the kind of process, `instance_id` this one."""
        self._url = url
        self._frame = _frame(service, instance_id)
        self._http = _client()
        self._is_compressed = _variable("COMPRESSION") == "gzip"
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_left_out = 0
        """Requests whose spans found no room since the last warning."""
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, spans: bytes) -> None:
        """Have the spans of a request sent, unless the queue is full."""
        with self._lock:
            if self._num_bytes + len(spans) > _MAX_QUEUED_BYTES:
                self._num_left_out += 1
                return
            self._queue.append(spans)
            self._num_bytes += len(spans)
            is_due = self._num_bytes >= _MAX_BATCH_BYTES
        if is_due:
            self._wake.set()

    def close(self) -> None:
        """Send the spans that wait, for at most `_CLOSE_LIMIT_S`; this blocks the calling thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join(_CLOSE_LIMIT_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(_SEND_PERIOD_S)
            self._wake.clear()
            is_last = self._closing.is_set()
            while batch := self._take():
                self._send(batch)
        self._http.close()

    def _take(self) -> bytes:
        """Take the next batch out of the queue; empty: there is none."""
        batch, num_bytes = [], 0
        with self._lock:
            while self._queue and num_bytes < _MAX_BATCH_BYTES:
                batch.append(self._queue.popleft())
                num_bytes += len(batch[-1])
            self._num_bytes -= num_bytes
            num_left_out, self._num_left_out = self._num_left_out, 0
        if num_left_out:
            logger.warning("the queue of spans was full: %d requests have none", num_left_out)
        return b"".join(batch)

    def _send(self, batch: bytes) -> None:
        message = ExportTraceServiceRequest()
        message.CopyFrom(self._frame)
        message.resource_spans[0].scope_spans[0].MergeFromString(batch)
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((_TryAgain, httpx.TransportError)),
            wait=tenacity.wait_exponential(_FIRST_WAIT_S) + tenacity.wait_random(0, _FIRST_WAIT_S),
            stop=tenacity.stop_after_delay(_SEND_LIMIT_S) | tenacity.stop_when_event_set(self._closing),
            sleep=tenacity.sleep_using_event(self._closing),
            reraise=True,
        )
        try:
            attempts(self._post, message.SerializeToString())
        except Exception as error:
            # Whatever it is, the next batches must be sent.
            logger.warning("spans were not received by %s: %s: %s", self._url, type(error).__name__, error)

    def _post(self, content: bytes) -> None:
        headers = {"content-type": "application/x-protobuf"}
        if self._is_compressed:
            content, headers["content-encoding"] = gzip.compress(content), "gzip"
        status = self._http.post(self._url, content=content, headers=headers)
        if status.status_code in _REPEATABLE:
            raise _TryAgain(f"status {status.status_code}")
        status.raise_for_status()


def _frame(service: str, instance_id: str) -> ExportTraceServiceRequest:
    """Return a message without spans, with the attributes of this process.

    Those of the variable `OTEL_RESOURCE_ATTRIBUTES` are among them, since the library reads it.
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
    message = ExportTraceServiceRequest()
    of_resource = message.resource_spans.add()
    add_attributes(of_resource.resource.attributes, cast("Attributes", resource.attributes))
    of_scope = of_resource.scope_spans.add()
    of_scope.scope.name, of_scope.scope.version = "headway", release
    return message


def _client() -> httpx.Client:
    """Return a client with the headers and certificates of OpenTelemetry's variables."""
    verified = ssl.create_default_context(cafile=_variable("CERTIFICATE"))
    certificate = _variable("CLIENT_CERTIFICATE")
    if certificate is not None:
        verified.load_cert_chain(certificate, _variable("CLIENT_KEY"))
    headers = parse_env_headers(_variable("HEADERS") or "", liberal=True)
    return httpx.Client(headers=headers, verify=verified, timeout=_SEND_LIMIT_S)


def _variable(name: str) -> str | None:
    """Return a variable of OpenTelemetry for OTLP; the one for traces wins."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")


def _version() -> str:
    try:
        return version("headway-serve")
    except PackageNotFoundError:
        return "0"
