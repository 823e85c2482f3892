"""HTTP exchange: its ids, log lines and metrics, and an answer to every request."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replicas.clock import Clock
from router.types import Headroom
from serve_app.auth import ANONYMOUS, Principal
from serve_app.errors import ErrorReply, is_expected, reply_to
from serve_app.http.access_log import AccessLog
from serve_app.http.edge import refuse_websocket
from serve_app.metrics import HttpMetrics
from serve_app.openai.request.caller import Caller
from serve_app.openai.service import PreparedCompletion
from serve_app.rate_limits import Allowance, KeyUse

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""Status of requests whose client disconnected; it appears only in logs and metrics."""

Routes = Mapping[str, Callable[[Request], Awaitable[Response]]]
"""Handlers by method and path, such as `GET /v1/files`; the first match is used."""

_SCOPE_KEY = "headway.exchange"
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,128}")
_MAX_LISTED_CHARS = 2048
_LENGTH = re.compile(r"[0-9]{1,18}")
_QUIET_HANDLERS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/load"})
"""Routes that are polled all the time: logged at debug level only, and not in the HTTP metrics, as in vLLM. There the
503 of a model that loads or drains would look like failed requests."""


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
    headroom: Callable[[], Headroom] | None = None
    """Function that returns the room left in the request's band now; None: the request has no band."""
    key_use: KeyUse | None = None
    """Use of the API key's limits, in which the request is counted while it is open; None: it has none."""
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
            first_s = progress.first_delta_s
            fields |= {
                "model": self.prepared.body.model,
                "ttft_s": None if first_s is None else round(first_s - self.started_s, 6),
                "queue_s": None if progress.queue_s is None else round(progress.queue_s, 6),
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


def json_response(value: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with a JSON object, also one described as a TypedDict."""
    return Response(to_json(value), status, headers, "application/json")


def tenant_of(request: Request) -> str:
    """Return the tenant whose API key a request has."""
    return exchange_of(request).principal.tenant


def caller_of(request: Request) -> Caller:
    """Return the sender of a request.

    Raises:
        InvalidRequest: a header has an invalid value.
    """
    exchange = exchange_of(request)
    return Caller.of(exchange.sequence_id, exchange.arrival_unix_s, exchange.principal, request.headers)


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
        access_log: AccessLog | None = None,
    ) -> None:
        """Create the middleware; `access_log` gets a line for each exchange that is not a probe."""
        self._app = app
        self._access_log = access_log
        self._metrics = metrics
        self._server_sets_request_id = server_sets_request_id
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and answer the error if the application raises one before the response has begun."""
        if scope["type"] == "websocket" and await refuse_websocket(scope, send):
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = self._open(scope, headers)
        scope = {**scope, _SCOPE_KEY: exchange}  # a copy: the server reads the method of its own
        response_send = self._counting_send(exchange, headers, send)
        try:
            await self._app(scope, _counting_receive(exchange, receive), response_send)
        except asyncio.CancelledError:
            exchange.status = CLIENT_CLOSED
            raise
        except Exception as error:
            if exchange.status:
                fail(exchange, error)
                raise  # the server then cuts the connection, so that a partial answer does not look whole
            await error_response(exchange, error)(scope, receive, response_send)
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
                headers.update(_rate_limit_headers(exchange))
                if exchange.prepared is not None and exchange.prepared.not_enforced:
                    headers["x-headway-not-enforced"] = _listed(exchange.prepared.not_enforced)
            elif message["type"] == "http.response.body":
                if exchange.method == "HEAD":
                    message = {**message, "body": b""}
                exchange.response_bytes += len(message.get("body", b""))
            await send(message)

        return counting_send

    def _close(self, exchange: Exchange, scope: Scope) -> None:
        now_s = self._clock.monotonic()
        if exchange.prepared is not None:
            self._metrics.outputs.count(
                num_not_enforced=len(exchange.prepared.not_enforced),
                num_malformed_calls=exchange.prepared.format.num_malformed_calls,
            )
        if exchange.key_use is not None:
            if exchange.prepared is not None:
                exchange.key_use.charge(exchange.prepared.progress.completion_tokens)
            exchange.key_use.end()
        if exchange.error is not None and exchange.error.refused_by is not None:
            self._metrics.refused(exchange.error.refused_by)
        handler = getattr(scope.get("route"), "path", "none")
        fields = exchange.describe(now_s)
        logger.log(_log_level(exchange), "request finished", extra=fields)
        if handler in _QUIET_HANDLERS:
            return
        self._metrics.observe(
            handler=handler,
            method=exchange.method,
            status=exchange.status,
            duration_s=now_s - exchange.started_s,
            request_bytes=exchange.request_bytes,
            response_bytes=exchange.response_bytes,
        )
        if self._access_log is not None:
            self._access_log.write({"time_unix_s": self._clock.unix(), **fields})


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


def _listed(places: Sequence[str]) -> str:
    """Return JSON pointers as a header's value: percent-encoded, with the number of those that have no room in it."""
    value = ""
    for index, place in enumerate(places):
        item = quote(place, safe="/~$")
        if len(value) + len(item) > _MAX_LISTED_CHARS:
            return f"{value} and {len(places) - index} more"
        value += f", {item}" if value else item
    return value


def _log_level(exchange: Exchange) -> int:
    return logging.DEBUG if exchange.path in _QUIET_HANDLERS else logging.INFO


def _rate_limit_headers(exchange: Exchange) -> dict[str, str]:
    """Return the `x-ratelimit-*` headers: of the band's queue and of the API key, the limit that leaves less."""
    use = exchange.key_use
    requests = [] if use is None else [use.requests()]
    tokens = [] if use is None else [use.tokens()]
    if exchange.headroom is not None:
        room = exchange.headroom()
        requests.append(Allowance(room.max_requests, room.num_requests_left, room.reset_s))
        tokens.append(Allowance(room.max_tokens, room.num_tokens_left, room.reset_s))
    return _allowance_headers("requests", requests) | _allowance_headers("tokens", tokens)


def _allowance_headers(kind: str, allowances: Sequence[Allowance | None]) -> dict[str, str]:
    known = [allowance for allowance in allowances if allowance is not None]
    if not known:
        return {}
    least = min(known, key=lambda allowance: allowance.num_left)
    headers = {f"x-ratelimit-limit-{kind}": str(least.limit), f"x-ratelimit-remaining-{kind}": str(least.num_left)}
    if least.reset_s is not None:
        headers[f"x-ratelimit-reset-{kind}"] = duration_text(least.reset_s)
    return headers


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
