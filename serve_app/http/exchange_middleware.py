"""Middleware of every HTTP exchange: its ids, path, log lines and metrics, and an answer to every request."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replicas.timing.clock import Clock
from router.timeline import Timeline
from serve_app.errors import is_of_messages
from serve_app.http.access_log import AccessLog
from serve_app.http.edge import refuse_websocket
from serve_app.http.exchange import CLIENT_CLOSED, QUIET_HANDLERS, SCOPE_KEY, Exchange, error_response, fail
from serve_app.http.request_registry import RequestRegistry
from serve_app.keys.rate_limits import Allowance
from serve_app.monitoring.http import HttpMetrics
from serve_app.tracing.request_spans import HttpEnd, add_request
from serve_app.tracing.tracer import Moment, Tracer

logger = logging.getLogger(__name__)

_PRINTABLE = re.compile(r"[\x20-\x7e]{1,128}")
_MAX_LISTED_CHARS = 2048


@dataclass(frozen=True, slots=True)
class ExchangeObservers:
    """Observers of finished exchanges."""

    metrics: HttpMetrics
    registry: RequestRegistry
    tracer: Tracer
    access_log: AccessLog | None
    """Gets a line for each exchange that is not a probe; None: no line is written."""
    slow_request_s: float | None
    """Duration from which a completion is logged as slow, seconds; None: none is."""
    toy_model: str | None = None
    """Name of a model whose answers are of no use, for a header of each completion; None: it is a real model."""


class ExchangeMiddleware:
    """Middleware that opens an exchange for each request, answers errors, and logs and counts the finished exchange.

    A path with a trailing slash is served like the path without it, and HEAD like GET, without the body.
    """

    def __init__(
        self,
        app: ASGIApp,
        observers: ExchangeObservers,
        server_sets_request_id: bool,
        clock: Clock,
    ) -> None:
        self._app = app
        self._observers = observers
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
        method = "GET" if exchange.method == "HEAD" else exchange.method
        # a copy: the server reads the method of its own
        scope = {**scope, SCOPE_KEY: exchange, "method": method, "path": _without_slash(scope)}
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
        unique_id = uuid.uuid4().hex
        arrival = Moment(self._clock.unix(), self._clock.monotonic())
        exchange = Exchange(
            request_id=given if _PRINTABLE.fullmatch(given) else unique_id,
            unique_id=unique_id,
            method=scope["method"],
            path=scope["path"],
            arrival_unix_s=arrival.unix_s,
            timeline=Timeline(arrival.monotonic_s),
        )
        if exchange.path not in QUIET_HANDLERS:
            exchange.trace = self._observers.tracer.begin(exchange.method, headers, arrival)
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
                if is_of_messages(exchange.path):
                    headers["request-id"] = exchange.request_id
                headers["openai-processing-ms"] = str(round((exchange.headers_s - exchange.started_s) * 1000))
                headers.update(_rate_limit_headers(exchange))
                if exchange.ignored_fields:
                    headers["x-headway-ignored"] = ", ".join(exchange.ignored_fields)
                if exchange.ignored_tools:
                    headers["x-headway-ignored-tools"] = _listed(exchange.ignored_tools)
                if exchange.prepared is not None and self._observers.toy_model is not None:
                    headers["x-headway-toy-model"] = f"{self._observers.toy_model} is for tests; serve another model"
                if exchange.prepared is not None and exchange.prepared.not_enforced:
                    headers["x-headway-not-enforced"] = _listed(exchange.prepared.not_enforced)
            elif message["type"] == "http.response.body":
                if exchange.method == "HEAD":
                    message = {**message, "body": b""}
                exchange.response_bytes += len(message.get("body", b""))
            await send(message)

        return counting_send

    def _close(self, exchange: Exchange, scope: Scope) -> None:
        now_s, metrics = self._clock.monotonic(), self._observers.metrics
        exchange.end(now_s)
        self._observers.registry.end(exchange)
        if exchange.prepared is not None:
            metrics.outputs.count(
                num_not_enforced=len(exchange.prepared.not_enforced),
                num_malformed_calls=exchange.prepared.format.num_malformed_calls,
            )
            metrics.outputs.chosen(exchange.prepared.body.n, exchange.prepared.longest_outputs)
            metrics.spent(exchange.prepared.requests[0].band, exchange.slowest.seconds(now_s))
            self._log_slow(exchange, now_s - exchange.started_s)
        if exchange.key_use is not None:
            if exchange.prepared is not None:
                exchange.key_use.charge(exchange.prepared.progress.completion_tokens)
            exchange.key_use.end()
        if exchange.error is not None and exchange.error.refused_by is not None:
            metrics.refused(exchange.error.refused_by)
        route: str | None = getattr(scope.get("route"), "path", None)
        handler = route or "none"
        fields = exchange.describe(now_s)
        self._end_trace(exchange, route, now_s)
        logger.log(_log_level(exchange), "request finished", extra=fields)
        if handler in QUIET_HANDLERS:
            return
        metrics.observe(
            handler=handler,
            method=exchange.method,
            status=exchange.status,
            duration_s=now_s - exchange.started_s,
            request_bytes=exchange.request_bytes,
            response_bytes=exchange.response_bytes,
        )
        if self._observers.access_log is not None:
            self._observers.access_log.write({"time_unix_s": self._clock.unix(), **fields})

    def _end_trace(self, exchange: Exchange, route: str | None, now_s: float) -> None:
        if exchange.trace is None or not exchange.trace.is_recorded:
            return
        add_request(exchange.trace, exchange.timeline, exchange.prepared, self._observers.tracer.has_prompts)
        code = None if exchange.error is None else exchange.error.code
        end = HttpEnd(exchange.method, route, exchange.path, exchange.request_id, exchange.status, code, ended_s=now_s)
        end.end(exchange.trace)

    def _log_slow(self, exchange: Exchange, duration_s: float) -> None:
        """Log a slow completion, with the part that took longest."""
        limit_s, seconds = self._observers.slow_request_s, exchange.slowest.seconds(0.0)
        if limit_s is None or duration_s < limit_s:
            return
        part = max(seconds, key=seconds.__getitem__)
        logger.warning(
            "slow request: %.3f s, of them %.3f s %s", duration_s, seconds[part], part.value,
            extra={"request_id": exchange.request_id, "duration_s": round(duration_s, 6), "slowest_part": part.value},
        )  # fmt: skip


def _without_slash(scope: Scope) -> str:
    """Return the path without a slash at its end; a slash that is percent-encoded belongs to an id and stays."""
    path: str = scope["path"]
    raw_path: bytes = scope.get("raw_path") or path.encode()
    has_slash = len(path) > 1 and path.endswith("/") and raw_path.endswith(b"/")
    return path[:-1] if has_slash else path


def _counting_receive(exchange: Exchange, receive: Receive) -> Receive:
    """Return a `receive` that counts bytes."""

    async def counting_receive() -> Message:
        message = await receive()
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
    return logging.DEBUG if exchange.path in QUIET_HANDLERS else logging.INFO


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
