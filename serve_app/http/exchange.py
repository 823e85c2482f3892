"""HTTP exchange: the state of a request and its response, and its cancellation by another request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from replicas.errors import RequestAborted, ServingError
from router.timeline import Part, Timeline, queued_s
from router.types import Headroom
from serve_app.errors import ErrorReply, is_expected, reply_to
from serve_app.keys.authenticator import ANONYMOUS, Principal
from serve_app.keys.rate_limits import KeyUse
from serve_app.openai.reply.prepared_completion import PreparedCompletion
from serve_app.openai.request.caller import Caller
from serve_app.tracing.context import TraceContext
from serve_app.tracing.tracer import Trace

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""Status of requests whose client disconnected; it appears only in logs and metrics."""

SCOPE_KEY = "headway.exchange"
_LENGTH = re.compile(r"[0-9]{1,18}")
QUIET_HANDLERS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/load", "/dashboard/events"})
"""Routes that are polled or read all the time: logged at debug level only, and not in the HTTP metrics, as in vLLM.
There the 503 of a model that loads or drains would look like failed requests."""


class Cancellation:
    """Cancellation of a request's work, which `within` interrupts; it is used on one event loop."""

    def __init__(self) -> None:
        self._error: ServingError | None = None
        self._limit: asyncio.Timeout | None = None

    @property
    def is_requested(self) -> bool:
        """True if the work was interrupted."""
        return self._error is not None

    def request(self, error: ServingError | None = None) -> None:
        """Interrupt the work now, and work that begins later at once; it ends with `error`, None: `RequestAborted`."""
        self._error = self._error or error or RequestAborted("the request was cancelled")
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    @contextlib.asynccontextmanager
    async def within(self) -> AsyncIterator[None]:
        """Run work that may be interrupted; one at a time.

        Raises:
            ServingError: the work was interrupted.
        """
        try:
            async with asyncio.timeout(0 if self.is_requested else None) as self._limit:
                yield
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            assert self._error is not None
            raise self._error from None
        finally:
            self._limit = None


class ReplyRecord(Protocol):
    """Record of a reply that is stored while it is made."""

    async def begun(self) -> None:
        """Wait until the begin is stored; the client sees nothing of the reply before.

        Raises:
            ServingError: it cannot be stored.
        """

    async def ended(self, reply: dict[str, Any]) -> None:
        """Store the end; the client sees it afterwards.

        Raises:
            ServingError: it cannot be stored.
        """

    def left(self) -> None:
        """Note that nothing more is sent: a reply without an end was cancelled."""


@dataclass(slots=True)
class Exchange:
    """State of one request and its response; one task owns it."""

    request_id: str
    """Id from the client's `x-request-id` if it is usable, else `unique_id`."""
    unique_id: str
    """Unique id made here, from which the ids of sequences are made; a client's id need not be unique."""
    method: str
    path: str
    arrival_unix_s: float
    timeline: Timeline
    """Time of the request from its arrival to its preparation; each sequence of a completion then has its own."""
    trace: Trace | None = None
    """Trace of the request; None: nothing is traced."""
    principal: Principal = ANONYMOUS
    """Owner of the API key; set before an endpoint that requires a key is called."""
    status: int = 0
    """Status of the response; 0 until the response has begun."""
    request_bytes: int = 0
    """Bytes of the request's body that were read; the client's `content-length` may be wrong."""
    response_bytes: int = 0
    headers_s: float | None = None
    """Start of the response, monotonic seconds."""
    prepared: PreparedCompletion | None = None
    """Completion of the request; None: the request failed before one was prepared, or asked for none."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of the body that have no effect."""
    ignored_tools: tuple[str, ...] = ()
    """Tools of the body that this server cannot run; the model did not see them."""
    headroom: Callable[[], Headroom] | None = None
    """Function that returns the room left in the request's band now; None: the request has no band."""
    key_use: KeyUse | None = None
    """Use of the API key's limits, in which the request is counted while it is open; None: it has none."""
    error: ErrorReply | None = None
    """Error sent to the client, as the response or at the end of a stream."""
    cancellation: Cancellation = field(default_factory=Cancellation)
    record: ReplyRecord | None = None
    """Record of the reply; None: it is not stored."""
    details: dict[str, object] = field(default_factory=dict)
    """Fields that an endpoint adds to the final log line: ids and counts, never the client's text."""

    @property
    def started_s(self) -> float:
        """Arrival of the request, monotonic seconds."""
        return self.timeline.started_s

    @property
    def slowest(self) -> Timeline:
        """Timeline of the sequence that ended last; before the preparation that of the request."""
        return self.timeline if self.prepared is None else self.prepared.timeline

    def end(self, now_s: float) -> None:
        """Note the end of the response."""
        for timeline in (self.timeline, *(() if self.prepared is None else self.prepared.timelines)):
            timeline.ended(now_s)

    def describe(self, now_s: float) -> dict[str, object]:
        """Return the fields of the log line at the end of the exchange."""
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "http_method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_s": round(now_s - self.started_s, 6),
            "headers_after_s": None if self.headers_s is None else round(self.headers_s - self.started_s, 6),
            "request_bytes": self.request_bytes,
            "response_bytes": self.response_bytes,
            "error_code": None if self.error is None else self.error.code,
            **self.details,
        }
        if self.trace is not None and self.trace.is_recorded:
            fields["trace_id"] = self.trace.trace_id
        if self.prepared is not None:
            first, progress = self.prepared.requests[0], self.prepared.progress
            first_s, seconds = self.prepared.first_delta_s, self.prepared.timeline.seconds(now_s)
            fields |= {
                "model": self.prepared.body.model,
                "ttft_s": None if first_s is None else round(first_s - self.started_s, 6),
                "queue_s": round(queued_s(seconds), 6),
                "parts_s": {part.value: round(seconds[part], 6) for part in Part if seconds[part] > 0},
                "response_id": self.prepared.id,
                "stream": self.prepared.body.stream,
                "num_sequences": len(self.prepared.requests),
                "tenant": first.tenant,
                "band": first.band.name.lower(),
                "replica_id": progress.replica_id,
                "finish_reasons": progress.finish_reasons,
                "prompt_tokens": progress.prompt_tokens,
                "cached_tokens": progress.cached_tokens,
                "completion_tokens": progress.completion_tokens,
            }
        return fields


def exchange_of(request: Request) -> Exchange:
    """Return the exchange that `ExchangeMiddleware` opened for a request."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    return exchange


def json_response(value: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON object, also one described as a TypedDict."""
    return Response(to_json(value), status, headers, "application/json")


def trace_context_of(request: Request) -> TraceContext | None:
    """Return the trace context for work that a request asks for: its own span, or the caller's if it is not traced."""
    exchange = exchange_of(request)
    return TraceContext.of_headers(request.headers) if exchange.trace is None else exchange.trace.context


def tenant_of(request: Request) -> str:
    """Return the tenant whose API key a request has."""
    return exchange_of(request).principal.tenant


def caller_of(request: Request) -> Caller:
    """Return the sender of a request.

    Raises:
        InvalidRequest: a header has an invalid value.
    """
    exchange = exchange_of(request)
    return Caller.of(
        exchange.unique_id, exchange.arrival_unix_s, exchange.principal, request.headers, exchange.timeline
    )


def content_length(headers: Headers) -> int:
    """Return a request's `content-length`, bytes; 0 if it is missing or invalid."""
    length = headers.get("content-length", "")
    return int(length) if _LENGTH.fullmatch(length) else 0


def fail(exchange: Exchange, error: BaseException) -> ErrorReply:
    """Return the reply to `error` and note it in the exchange; log an unexpected error with its traceback."""
    if not is_expected(error):
        logger.error("request failed", extra={"request_id": exchange.request_id}, exc_info=error)
    exchange.error = reply_to(error, exchange.request_id)
    return exchange.error


def error_response(exchange: Exchange, error: BaseException) -> Response:
    """Return the response with the error object for `error`."""
    reply = fail(exchange, error)
    return json_response(reply.body_at(exchange.path, exchange.request_id), reply.status, dict(reply.headers))
