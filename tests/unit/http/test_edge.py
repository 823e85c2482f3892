"""The edge: limits of headers and connections, probes in time, and OpenAI's error shape for Serve's own errors."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http.edge import CONNECTIONS_VARIABLE, EdgeLimits, EdgeMiddleware, edge_middleware, refuse_websocket
from testkit.http.api import refusal
from testkit.limits import LIMIT_S, until

LIMITS = EdgeLimits(max_headers=10, max_header_bytes=1000, max_connections_per_address=2, probe_limit_s=0.05)
Answer = Callable[[Request], Awaitable[ASGIApp]]


class Front:
    """An edge in front of an application that gives one answer to every request."""

    def __init__(self, answer: Answer, address: str = "192.0.2.7") -> None:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            self.seen.append(scope["path"])
            await (await answer(Request(scope)))(scope, receive, send)

        self.seen: list[str] = []
        self.edge = EdgeMiddleware(application, LIMITS)
        transport = httpx.ASGITransport(self.edge, client=(address, 5000))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test", headers={"user-agent": "test"})


def body_part(body: bytes, more_body: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more_body}


async def fine(request: Request) -> ASGIApp:
    return JSONResponse({"ok": True})


async def test_headers_beyond_a_limit_are_told_with_the_limit() -> None:
    front = Front(fine)
    assert (await front.http.get("/", headers={"x-large": "x" * 500})).json() == {"ok": True}
    many = await front.http.get("/", headers={f"x-{number}": "1" for number in range(20)})
    large = await front.http.get("/", headers={"x-large": "x" * 1000})
    for response, limit in ((many, "at most 10"), (large, "at most 1000")):
        assert refusal(response) == (431, "headers_too_large", None)
        assert limit in response.json()["error"]["message"] and response.headers["connection"] == "close"
    assert front.seen == ["/"]


async def test_an_address_has_so_many_open_requests() -> None:
    gate = asyncio.Event()

    async def held(request: Request) -> ASGIApp:
        await gate.wait()
        return JSONResponse({})

    for address, is_limited in (("192.0.2.7", True), ("127.0.0.1", False), ("::1", False), ("::ffff:127.0.0.1", False)):
        gate.clear()
        front = Front(held, address)
        held_back = [asyncio.create_task(front.http.get("/")) for _ in range(2)]
        await until(lambda front=front: len(front.seen) == 2)  # type: ignore[misc]
        third = asyncio.create_task(front.http.get("/"))
        if is_limited:
            assert refusal(await third) == (429, "too_many_connections", None)
        gate.set()
        assert [one.status_code for one in await asyncio.gather(*held_back)] == [200, 200]
        await third
        assert not front.edge.num_open
        assert (await front.http.get("/")).is_success


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (404, (503, "no_ready_replica", None)),
        (500, (502, "ingress_lost", None)),
        (503, (503, "no_ready_replica", None)),
        (408, (408, "request_timeout", None)),
    ],
)
async def test_serves_own_errors_have_the_shape_of_all_others(status: int, expected: tuple[Any, ...]) -> None:
    async def serves(request: Request) -> ASGIApp:
        return PlainTextResponse("Path '/v1/secret' not found.", status)

    message = (await Front(serves).http.post("/v1/messages/x")).json()
    assert (message["type"], message["error"]["details"]["error_code"]) == ("error", expected[1])
    response = await Front(serves).http.get("/v1/secret")
    assert refusal(response) == expected
    assert response.headers["content-type"] == "application/json" and "secret" not in response.text
    assert int(response.headers["content-length"]) == len(response.content)


async def raises(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("the actor died")


async def says_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    pass


async def stops_within_an_error(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"Internal", "more_body": True})


@pytest.mark.parametrize("app", [raises, says_nothing, stops_within_an_error])
@pytest.mark.parametrize("path", ["/v1/models", "/health"])
async def test_a_request_that_serve_does_not_answer_is_answered(app: ASGIApp, path: str) -> None:
    async def answer(request: Request) -> ASGIApp:
        return app

    front = Front(answer)
    assert refusal(await front.http.get(path)) == (502, "ingress_lost", None)
    assert not front.edge.num_open


async def test_the_applications_own_answers_pass_unchanged() -> None:
    async def own(request: Request) -> ASGIApp:
        if request.url.path == "/metrics":
            return PlainTextResponse("up 1")
        if request.url.path == "/stream":

            async def parts() -> Any:
                yield "a"
                yield "b"

            return StreamingResponse(parts(), media_type="text/event-stream")
        return JSONResponse({"error": {}}, 404, headers={"x-own": "1"})

    front = Front(own)
    assert (await front.http.get("/metrics")).text == "up 1"
    assert (await front.http.get("/stream")).text == "ab"
    response = await front.http.get("/nowhere")
    assert (response.status_code, response.json(), response.headers["x-own"]) == (404, {"error": {}}, "1")


async def test_serves_list_of_routes_is_closed() -> None:
    front = Front(fine)
    assert refusal(await front.http.get("/-/routes")) == (404, "not_found", None)
    assert (await front.http.get("/-/healthz")).is_success
    assert front.seen == ["/-/healthz"]


async def test_a_probe_that_no_ingress_answers_fails_in_time() -> None:
    cancelled = asyncio.Event()

    async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # as Serve does
            cancelled.set()
            await PlainTextResponse("cancelled", 499)(scope, receive, send)

    transport = httpx.ASGITransport(EdgeMiddleware(nobody, LIMITS))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for path in ("/health", "/health/live", "/health/ready"):
            cancelled.clear()
            assert refusal(await http.get(path)) == (503, "no_ready_replica", None)
            await asyncio.wait_for(cancelled.wait(), 5)


def test_serve_gets_the_limit_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTIONS_VARIABLE, "7")
    [middleware] = edge_middleware()
    app = middleware.cls(Starlette(), *middleware.args, **middleware.kwargs)
    assert isinstance(app, EdgeMiddleware)
    assert middleware.kwargs["limits"] == EdgeLimits(max_connections_per_address=7)


async def test_headers_that_steer_serve_do_not_reach_it() -> None:
    seen: list[list[str]] = []

    async def keep(request: Request) -> ASGIApp:
        seen.append([name for name in request.headers if name not in ("host", "user-agent", "accept-encoding")])
        return JSONResponse({"ok": True})

    front = Front(keep)
    steering = (
        "X-Request-Timeout-Seconds",
        "x-request-disconnect-disabled",
        "x_session_id",
        "serve-multiplexed-model-id",
    )
    for request_id, kept in ((b"mine", True), (b"\xff\xfe", False)):
        headers = [(name.encode(), b"\xff") for name in steering] + [
            (b"x-request-id", request_id),
            (b"accept", b"\xff"),
        ]
        await front.http.get("/", headers=headers)
        assert sorted(seen.pop()) == ["accept", "connection", *["x-request-id"] * kept]


async def test_a_websocket_is_refused_in_the_shape_of_all_errors() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/responses", "extensions": {"websocket.http.response": {}}}
    assert await refuse_websocket(scope, send) and not await refuse_websocket({"type": "websocket"}, send)
    start, body = sent
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 426)
    assert json.loads(body["body"])["error"]["code"] == "no_websockets"


@pytest.mark.parametrize(
    ("last", "passed"),
    [
        (body_part(b"end", more_body=False), body_part(b"", more_body=False)),
        ({"type": "http.disconnect"}, {"type": "http.disconnect"}),
    ],
    ids=["end", "disconnect"],
)
async def test_after_the_start_of_an_answer_that_ends_the_connection_only_the_end_of_the_body_passes(
    last: Message, passed: Message
) -> None:
    body = iter([*[body_part(b"part", more_body=True)] * 9, last])
    received: list[Message] = []

    async def next_part() -> Message:
        return next(body)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        received.append(await receive())
        await send({"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]})
        received.append(await receive())
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    async def send(message: Message) -> None:
        pass

    scope = {"type": "http", "path": "/", "headers": [], "client": ("192.0.2.7", 5000)}
    async with asyncio.timeout(LIMIT_S):
        await EdgeMiddleware(application, LIMITS)(scope, next_part, send)
    assert received == [body_part(b"part", more_body=True), passed]
