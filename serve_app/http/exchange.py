"""HTTP exchange: its ids, log lines and metrics, and an answer to every request."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replicas.clock import Clock
from router.types import Headroom
from serve_app.auth import Principal
from serve_app.errors import ErrorReply, is_expected, reply_to
from serve_app.errors import Headers as HeaderPairs
from serve_app.http.responses import json_response
from serve_app.metrics import HttpMetrics
from serve_app.openai.request.priority import hints_from
from serve_app.openai.request.validation import Caller
from serve_app.openai.service import PreparedCompletion

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""Status of requests whose client disconnected; it appears only in logs and metrics."""

_SCOPE_KEY = "headway.exchange"
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,128}")
_LENGTH = re.compile(r"[0-9]{1,18}")
_QUIET_HANDLERS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/load"})
"""Paths that are polled all the time and therefore logged at debug level only."""


@dataclass(slots=True)
class Exchange:
    """State of one request and its response; one task owns it."""

    request_id: str
    """Id from the client's `x-request-id` if it is usable, else `sequence_id`."""
    sequence_id: str
    """Unique id made here, from which the ids of sequences are made; a client's id need not be unique."""
    method: str
    path: str
    arrival_unix_s: float
    started_s: float
    """Arrival of the request, monotonic seconds."""
    status: int = 0
    """Status of the response; 0 until the response has begun."""
    request_bytes: int = 0
    """Bytes of the request's body that were read; the client's `content-length` may be wrong."""
    response_bytes: int = 0
    headers_s: float | None = None
    """Start of the response, monotonic seconds."""
    prepared: PreparedCompletion | None = None
    """Completion of the request; None: the request failed before one was prepared, or asked for none."""
    headroom: Callable[[], Headroom] | None = None
    """Function that returns the room left in the request's band now; None: the request has no band."""
    error: ErrorReply | None = None
    """Error sent to the client, as the response or at the end of a stream."""
    details: dict[str, object] = field(default_factory=dict)
    """Fields that an endpoint adds to the final log line: ids and counts, never the client's text."""

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
        if self.prepared is not None:
            first, progress = self.prepared.requests[0], self.prepared.progress
            fields |= {
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
    exchange: Exchange = request.scope[_SCOPE_KEY]
    return exchange


def caller_of(request: Request, principal: Principal) -> Caller:
    """Return a request's sender, with its arrival time and the hints in its headers.

    Raises:
        InvalidRequest: a header has an invalid value.
    """
    exchange = exchange_of(request)
    return Caller(exchange.sequence_id, exchange.arrival_unix_s, principal, hints_from(request.headers))


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
    return json_response(reply.body, reply.status, dict(reply.headers))


class ExchangeMiddleware:
    """Middleware that opens an exchange for each request, answers errors, and logs and counts the finished exchange."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        server_sets_request_id: bool,
        clock: Clock,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._server_sets_request_id = server_sets_request_id
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and answer the error if the application raises one before the response has begun."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = self._open(scope, headers)
        scope[_SCOPE_KEY] = exchange
        response_send = self._counting_send(exchange, headers, send)
        try:
            await self._app(scope, _counting_receive(exchange, receive), response_send)
        except asyncio.CancelledError:
            exchange.status = CLIENT_CLOSED
            raise
        except Exception as error:
            if exchange.status:
                raise  # the server then cuts the connection, so that a partial answer does not look whole
            response = error_response(exchange, error)
            await response(scope, receive, response_send)
        finally:
            self._close(exchange, scope)

    def _open(self, scope: Scope, headers: Headers) -> Exchange:
        given = headers.get("x-request-id", "")
        sequence_id = uuid.uuid4().hex
        exchange = Exchange(
            request_id=given if _PRINTABLE.fullmatch(given) else sequence_id,
            sequence_id=sequence_id,
            method=scope["method"],
            path=scope["path"],
            arrival_unix_s=self._clock.unix(),
            started_s=self._clock.monotonic(),
        )
        fields = {"request_id": exchange.request_id, "http_method": exchange.method, "path": exchange.path}
        logger.log(_log_level(exchange), "request started", extra=fields)
        return exchange

    def _counting_send(self, exchange: Exchange, request_headers: Headers, send: Send) -> Send:
        """Return a `send` that adds response headers and notes status, time and bytes in the exchange."""
        is_announced = self._server_sets_request_id and request_headers.get("x-request-id") == exchange.request_id

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status, exchange.headers_s = message["status"], self._clock.monotonic()
                headers = MutableHeaders(scope=message)
                if not is_announced:
                    headers["x-request-id"] = exchange.request_id
                headers["openai-processing-ms"] = str(round((exchange.headers_s - exchange.started_s) * 1000))
                if exchange.headroom is not None:
                    headers.update(dict(rate_limit_headers(exchange.headroom())))
            elif message["type"] == "http.response.body":
                exchange.response_bytes += len(message.get("body", b""))
            await send(message)

        return counting_send

    def _close(self, exchange: Exchange, scope: Scope) -> None:
        now_s = self._clock.monotonic()
        if exchange.error is not None and exchange.error.refused_by is not None:
            self._metrics.refused(exchange.error.refused_by)
        self._metrics.observe(
            handler=getattr(scope.get("route"), "path", "none"),
            method=exchange.method,
            status=exchange.status,
            duration_s=now_s - exchange.started_s,
            request_bytes=exchange.request_bytes,
            response_bytes=exchange.response_bytes,
        )
        logger.log(_log_level(exchange), "request finished", extra=exchange.describe(now_s))


def _counting_receive(exchange: Exchange, receive: Receive) -> Receive:
    """Return a `receive` that counts bytes; its failure, as when Serve cancels the call, counts as a disconnect."""

    async def counting_receive() -> Message:
        try:
            message = await receive()
        except Exception:
            return {"type": "http.disconnect"}
        exchange.request_bytes += len(message.get("body", b""))
        return message

    return counting_receive


def _log_level(exchange: Exchange) -> int:
    return logging.DEBUG if exchange.path in _QUIET_HANDLERS else logging.INFO


def rate_limit_headers(headroom: Headroom) -> HeaderPairs:
    """Return the `x-ratelimit-*` headers: the limits of the band's queue, its room, and when all of it is free."""
    headers = [
        ("x-ratelimit-limit-requests", str(headroom.max_requests)),
        ("x-ratelimit-limit-tokens", str(headroom.max_tokens)),
        ("x-ratelimit-remaining-requests", str(headroom.num_requests_left)),
        ("x-ratelimit-remaining-tokens", str(headroom.num_tokens_left)),
    ]
    if headroom.reset_s is not None:
        reset = duration_text(headroom.reset_s)
        headers += [("x-ratelimit-reset-requests", reset), ("x-ratelimit-reset-tokens", reset)]
    return tuple(headers)


def duration_text(seconds: float) -> str:
    """Return a duration rounded up, such as `0s`, `20ms`, `8.64s`, `6m0s` or `1h2m3s`."""
    # Less than a microsecond is floating-point error, not time to round up.
    milliseconds = math.ceil(round(seconds * 1000, 3))
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, whole_seconds = divmod(math.ceil(milliseconds / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{whole_seconds}s" if hours else f"{minutes}m{whole_seconds}s"
