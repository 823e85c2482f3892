"""One HTTP exchange: its id, its log lines, its metrics, and an answer whatever happens."""

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
from serve_app.endpoints.responses import json_response
from serve_app.errors import ErrorReply, is_foreseen, reply_to
from serve_app.errors import Headers as HeaderPairs
from serve_app.metrics import HttpMetrics
from serve_app.openai.service import Generation
from serve_app.openai.urgency import hints_from
from serve_app.openai.validation import Caller

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""The status of requests whose client went away; it is only ever logged."""

_SCOPE_KEY = "headway.exchange"
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,128}")
_LENGTH = re.compile(r"[0-9]{1,18}")
_QUIET_HANDLERS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/load"})
"""Polled all the time: logged at debug level only."""


@dataclass(slots=True)
class Exchange:
    """A request and what becomes of it; one task owns it."""

    request_id: str
    """The client's, if it sent a usable one."""
    sequence_id: str
    """Ours, and unique, which a client's need not be: what is generated is named after it."""
    method: str
    path: str
    arrival_unix_s: float
    started_s: float
    """Monotonic."""
    status: int = 0
    """0 until the response has begun."""
    request_bytes: int = 0
    """Of the body, as far as it was read: what a client says of its size proves nothing."""
    response_bytes: int = 0
    headers_s: float | None = None
    """When the response began, monotonic."""
    generation: Generation | None = None
    """What was generated, if it came so far."""
    headroom: Callable[[], Headroom] | None = None
    """What may still wait in the request's band, now; None: it never had one."""
    error: ErrorReply | None = None
    """What the client was told instead of, or at the end of, an answer."""
    details: dict[str, object] = field(default_factory=dict)
    """What an endpoint adds to the line that is logged at the end: ids, counts, no text of the client's."""

    def describe(self, now_s: float) -> dict[str, object]:
        """The fields of the line that is logged when the exchange ends."""
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
        if self.generation is not None:
            first, progress = self.generation.requests[0], self.generation.progress
            fields |= {
                "response_id": self.generation.id,
                "stream": self.generation.body.stream,
                "num_sequences": len(self.generation.requests),
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
    """The exchange that `ExchangeMiddleware` has opened for a request."""
    exchange: Exchange = request.scope[_SCOPE_KEY]
    return exchange


def caller_of(request: Request, principal: Principal) -> Caller:
    """Who sent a request, as those who generate for it need to know.

    Raises:
        InvalidRequest: a header has a value it cannot have.
    """
    exchange = exchange_of(request)
    return Caller(exchange.sequence_id, exchange.arrival_unix_s, principal, hints_from(request.headers))


def content_length(headers: Headers) -> int:
    """What a request says of its size, bytes; 0 where it says nothing that makes sense."""
    length = headers.get("content-length", "")
    return int(length) if _LENGTH.fullmatch(length) else 0


def fail(exchange: Exchange, error: BaseException) -> ErrorReply:
    """What the client is told of `error`, noted in the exchange; an error nobody foresaw is logged in full."""
    if not is_foreseen(error):
        logger.error("request failed", extra={"request_id": exchange.request_id}, exc_info=error)
    exchange.error = reply_to(error, exchange.request_id)
    return exchange.error


def error_response(exchange: Exchange, error: BaseException) -> Response:
    """The error object for `error` as a response."""
    reply = fail(exchange, error)
    return json_response(reply.body, reply.status, dict(reply.headers))


class ExchangeMiddleware:
    """Opens an exchange for every request, and closes it with a log line, metrics and, if all else failed, a 500."""

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
        """Pass a request on and see it through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = self._open(scope, headers)
        scope[_SCOPE_KEY] = exchange
        response_send = self._watch(exchange, headers, send)
        try:
            await self._app(scope, _hear(exchange, receive), response_send)
        except asyncio.CancelledError:
            exchange.status = CLIENT_CLOSED
            raise
        except Exception as error:
            if exchange.status:
                raise  # the server must cut the connection, or half an answer would look whole
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

    def _watch(self, exchange: Exchange, request_headers: Headers, send: Send) -> Send:
        """`send`, which completes the headers and notes what goes through it."""
        is_announced = self._server_sets_request_id and request_headers.get("x-request-id") == exchange.request_id

        async def watched(message: Message) -> None:
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

        return watched

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


def _hear(exchange: Exchange, receive: Receive) -> Receive:
    """`receive`, which counts bytes; a failure to hear the client (Serve cancels the call) is its disconnect."""

    async def received() -> Message:
        try:
            message = await receive()
        except Exception:
            return {"type": "http.disconnect"}
        exchange.request_bytes += len(message.get("body", b""))
        return message

    return received


def _log_level(exchange: Exchange) -> int:
    return logging.DEBUG if exchange.path in _QUIET_HANDLERS else logging.INFO


def rate_limit_headers(headroom: Headroom) -> HeaderPairs:
    """The `x-ratelimit-*` headers: what may wait in the band, how much more may, and when nothing would any more."""
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
    """`0s`, `20ms`, `8.64s`, `6m0s` or `1h2m3s`; never less than `seconds`."""
    # What is less than a microsecond is the error of a floating-point number.
    milliseconds = math.ceil(round(seconds * 1000, 3))
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, whole_seconds = divmod(math.ceil(milliseconds / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{whole_seconds}s" if hours else f"{minutes}m{whole_seconds}s"
