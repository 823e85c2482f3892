"""Edge of a server that `headway serve` has started: middleware in Ray Serve's HTTP proxies.

Serve takes it from the function that `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names (`MIDDLEWARE_PATH`). It sees a
request once its headers are complete; Serve's HTTP server has no limit before that (docs/limits.md).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections import Counter
from dataclasses import dataclass

from pydantic_core import to_json
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import ErrorReply
from serve_app.http.unread_bodies import PAUSE_S

logger = logging.getLogger(__name__)

MIDDLEWARE_PATH = "serve_app.http.edge:edge_middleware"
CONNECTIONS_VARIABLE = "HEADWAY_MAX_CONNECTIONS_PER_ADDRESS"
"""Environment variable of the proxies with the limit of that name; without it there is no such limit."""
_PROBES = frozenset({"/health", "/health/live", "/health/ready"})
_ROUTES = "/-/routes"
_MIN_ERROR = 400
_STEERING = frozenset({
    b"x_request_timeout_seconds", b"x_request_disconnect_disabled", b"x_session_id", b"serve_multiplexed_model_id"
})  # fmt: skip
"""Headers, with `_` for `-`, by which clients of Serve choose replicas, end requests, or keep them after they leave."""


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Limits of the requests that a proxy passes on."""

    max_headers: int = 100
    max_header_bytes: int = 16384
    """Most bytes of all header names and values together."""
    max_connections_per_address: int | None = None
    """Most open requests from one address, except this machine's. None: no limit, as where all requests come from one
    load balancer."""
    probe_limit_s: float = 5.0
    """Longest time until a health probe is answered, seconds. Without a running ingress Serve would not answer it."""


NO_APPLICATION = ErrorReply(
    503,
    "the server has no application to ask yet; it is starting, or the application is not deployed",
    "service_unavailable_error",
    "no_ready_replica",
    headers=(("retry-after", "1"),),
)
"""Reply in place of Serve's 404. The application has every path, so that 404 means that the proxy knows none."""
INGRESS_LOST = ErrorReply(
    502,
    "the process that served the request has ended",
    "server_error",
    "ingress_lost",
    headers=(("retry-after", "1"),),
)
"""Reply in place of Serve's 500, and where Serve gives no answer. The application answers its own errors, so that both
mean that its process died."""
NO_INGRESS = ErrorReply(
    503,
    "no ingress is ready to answer",
    "service_unavailable_error",
    "no_ready_replica",
    headers=(("retry-after", "5"),),
)
"""Reply where no ingress process runs, or none answers a probe in time."""
NO_WEBSOCKETS = ErrorReply(
    426,
    "there are no WebSockets here; send a POST, and read the stream as server-sent events",
    "invalid_request_error",
    "no_websockets",
)
ROUTES_CLOSED = ErrorReply(404, f"no route matches {_ROUTES}", "not_found_error", "not_found")


def too_many_connections(limit: int) -> ErrorReply:
    """Return the 429 for an address with too many connections."""
    message = f"your address has {limit} open connections or requests, the most that are accepted"
    headers = (("retry-after", "1"), ("connection", "close"))
    return ErrorReply(429, message, "rate_limit_error", "too_many_connections", headers=headers)


def too_many_headers(message: str) -> ErrorReply:
    """Return the 431 for headers beyond a limit, which the message names."""
    return ErrorReply(431, message, "invalid_request_error", "headers_too_large", headers=(("connection", "close"),))


def edge_middleware() -> list[Middleware]:
    """Return the middleware of one proxy; Serve calls this in the proxy's process."""
    given = os.environ.get(CONNECTIONS_VARIABLE)
    limits = EdgeLimits() if given is None else EdgeLimits(max_connections_per_address=int(given))
    return [Middleware(EdgeMiddleware, limits=limits)]


class EdgeMiddleware:
    """Middleware that refuses what exceeds the limits, and gives Serve's own errors the shape of the API's.

    Invariant: `num_open` counts the open requests of each address that has any.
    """

    def __init__(self, app: ASGIApp, limits: EdgeLimits) -> None:
        self.num_open: Counter[str] = Counter()
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] == "websocket" and await refuse_websocket(scope, send):
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _answer(refusal, scope, send)
            return
        scope = {**scope, "headers": [header for header in scope["headers"] if _passes(*header)]}
        address = _address_of(scope)
        self.num_open[address] += 1
        try:
            answer = _Answer(scope, send)
            receive = answer.receiving(receive)
            if scope["path"] in _PROBES:
                await self._probe(scope, receive, answer)
            else:
                await self._app(scope, receive, answer.send)
            await answer.give_up(INGRESS_LOST)
        except Exception:
            if answer.has_begun:
                raise
            logger.warning("Serve could not pass a request on", exc_info=True)
            await answer.give_up(INGRESS_LOST)
        finally:
            self.num_open[address] -= 1
            if not self.num_open[address]:
                del self.num_open[address]

    async def _probe(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        """Pass a probe on, and answer it after a time limit."""
        probe = asyncio.ensure_future(self._app(scope, receive, answer.send))
        try:
            await asyncio.wait({probe}, timeout=self._limits.probe_limit_s)
            if probe.done():
                await probe
            else:
                await answer.give_up(NO_INGRESS)
        finally:
            probe.cancel()

    def _refusal(self, scope: Scope) -> ErrorReply | None:
        if scope["path"] == _ROUTES:
            return ROUTES_CLOSED
        headers, limits = scope["headers"], self._limits
        if len(headers) > limits.max_headers:
            return too_many_headers(
                f"the request has {len(headers)} headers; at most {limits.max_headers} are accepted"
            )
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if num_bytes > limits.max_header_bytes:
            return too_many_headers(
                f"the headers have {num_bytes} bytes; at most {limits.max_header_bytes} are accepted"
            )
        limit, address = limits.max_connections_per_address, _address_of(scope)
        if limit is not None and self.num_open[address] >= limit and not _is_loopback(address):
            return too_many_connections(limit)
        return None


class _Answer:
    """Answer to one request on its way to the client. An error of Serve's own, in plain text, is replaced.

    After `give_up` nothing of the application's answer is sent. After the start of an answer that ends the connection
    the rest of the body is dropped here, slowly: Serve's proxy receives whether or not the application reads, and keeps
    what it has received. The end of the body and a disconnect are passed on, and the application ends its answer.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self.has_begun = False
        self._is_given_up = self._is_last = False
        self._replacement: ErrorReply | None = None

    async def send(self, message: Message) -> None:
        if self._is_given_up:
            return
        if message["type"] == "http.response.start":
            self._replacement = _replacement_of(message)
            self._is_last = _value_of(message, b"connection") == b"close"
        if self._replacement is None:
            self.has_begun = True
            await self._send(message)
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            await self.give_up(self._replacement)

    def receiving(self, receive: Receive) -> Receive:
        """Return `receive` without the rest of the body after the start of an answer that ends the connection."""

        async def receive_until_last() -> Message:
            message = await receive()
            while self._is_last and message.get("more_body"):
                await asyncio.sleep(PAUSE_S)
                message = await receive()
            return {**message, "body": b""} if self._is_last and message["type"] == "http.request" else message

        return receive_until_last

    async def give_up(self, reply: ErrorReply) -> None:
        """Answer with `reply`, unless an answer has begun."""
        self._is_given_up = True
        if not self.has_begun:
            self.has_begun = True
            await _answer(reply, self._scope, self._send)


def _passes(name: bytes, value: bytes) -> bool:
    """Return True for a header that Serve may see: none that steers it, and no request id that it cannot read."""
    plain = name.lower().replace(b"-", b"_")
    return plain not in _STEERING and (plain != b"x_request_id" or value.isascii())


def _replacement_of(start: Message) -> ErrorReply | None:
    """Return the reply in place of an error in plain text, which is Serve's own; None: the answer is another."""
    status: int = start["status"]
    if status < _MIN_ERROR or not _value_of(start, b"content-type").startswith(b"text/plain"):
        return None
    if status == 404:
        return NO_APPLICATION
    if status == 408:
        return ErrorReply(408, "the request took longer than its time limit", "timeout_error", "request_timeout")
    return INGRESS_LOST if status == 500 else NO_INGRESS


def _value_of(start: Message, name: bytes) -> bytes:
    """Return the value of a header of an answer; empty: it has none."""
    return next((bytes(value) for known, value in start["headers"] if bytes(known).lower() == name), b"")


async def refuse_websocket(scope: Scope, send: Send) -> bool:
    """Answer the opening of a WebSocket with a 426 in OpenAI's shape; return False if the HTTP server cannot."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        return False
    await _answer(NO_WEBSOCKETS, scope, send, "websocket.http.response")
    return True


async def _answer(reply: ErrorReply, scope: Scope, send: Send, message: str = "http.response") -> None:
    body = to_json(reply.body_at(scope["path"]))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in reply.headers]
    await send({"type": f"{message}.start", "status": reply.status, "headers": headers})
    await send({"type": f"{message}.body", "body": body})


def _address_of(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


def _is_loopback(address: str) -> bool:
    """Return True for this machine's addresses, behind which may be a proxy with many clients."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return True
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback
