"""Bodies that are refused: the rest of them is dropped for a bounded time, and the connection ends."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http import unread_bodies
from serve_app.http.edge import EdgeLimits, EdgeMiddleware
from serve_app.http.unread_bodies import UnreadBodyMiddleware
from testkit.http.api import MakeApi, refusal, serving
from testkit.limits import LIMIT_S

MANY_VALUES = b'{"model":"tiny","prompt":[' + b'"a",' * 300_000
PATH = "/v1/completions"


class ServesProxy:
    """Application that receives as Serve's proxies do: on and on, whether or not the one behind it asks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kept = asyncio.Queue[Message]()

        async def receive_all() -> None:
            message: Message = {"type": "http.request"}
            while message["type"] == "http.request":
                message = await receive()
                kept.put_nowait(message)

        receiving = asyncio.create_task(receive_all())
        await self._app(scope, kept.get, send)
        receiving.cancel()


@pytest.fixture(params=["alone", "behind the edge"])
async def url(make_api: MakeApi, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    app = make_api().app
    if request.param == "behind the edge":
        app = EdgeMiddleware(ServesProxy(app), EdgeLimits())
    async with serving(app) as url:
        yield url


class Connection:
    """Connection of a client that sends a body of a given length, and reads only when it is asked to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str, path: str, length: str) -> "Connection":
        host, port = url.removeprefix("http://").split(":")
        connection = cls(*await asyncio.open_connection(host, int(port)))
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{length}\r\n\r\n"
        await connection.send(head.encode())
        return connection

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(LIMIT_S):
            self._writer.write(data)
            await self._writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the answer."""
        async with asyncio.timeout(LIMIT_S):
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            headers = dict(line.split(": ", 1) for line in lines[1:] if line)
            return int(lines[0].split()[1]), headers, await self._reader.readexactly(int(headers["content-length"]))

    async def is_closed(self) -> bool:
        """Return True if the server ends the connection, False if it answers one more request."""
        try:
            await self.send(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            async with asyncio.timeout(LIMIT_S):
                return not await self._reader.read(1)
        except OSError:
            return True

    async def end(self) -> bytes:
        """Return all that the server sends before it ends the connection."""
        async with asyncio.timeout(LIMIT_S):
            return await self._reader.read()

    def close(self) -> None:
        self._writer.close()


@pytest.mark.parametrize(
    ("path", "length", "beginning", "status"),
    [
        (PATH, f"content-length: {2**40}", b"", 413),
        (PATH, f"content-length: {8 * 2**20}", MANY_VALUES, 400),
        (PATH, "transfer-encoding: chunked", b"%x\r\n%s\r\n" % (len(MANY_VALUES), MANY_VALUES), 400),
        ("/unknown", f"content-length: {8 * 2**20}", b"", 404),
    ],
    ids=["length", "values", "chunks", "path"],
)
async def test_the_answer_comes_before_the_body_has_arrived_and_ends_the_connection(
    url: str, path: str, length: str, beginning: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_bodies, "_LINGER_S", 0.2)
    connection = await Connection.open(url, path, length)
    await connection.send(beginning)
    found, headers, _ = await connection.answer()
    assert (found, headers["connection"]) == (status, "close")
    assert not await connection.end()
    connection.close()


def send_then_read(url: str, num_bytes: int) -> tuple[int, bytes]:
    """Send a body with blocking calls until it is sent or fails; return the bytes sent and the answer's begin."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {num_bytes}\r\n\r\n"
    num_sent = 0
    with socket.create_connection((host, int(port)), LIMIT_S) as connection:
        connection.sendall(head.encode())
        with contextlib.suppress(ConnectionError):
            while num_sent < num_bytes:
                num_sent += connection.send(bytes(2**20))
        return num_sent, connection.recv(2**16)


async def test_a_client_that_sends_all_before_it_reads_gets_the_answer_and_is_cut(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_bodies, "_LINGER_S", 0.5)
    num_sent, answer = await asyncio.to_thread(send_then_read, url, 2**30)
    assert num_sent < 2**29
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_an_asynchronous_client_that_sends_all_before_it_reads_gets_the_answer(url: str) -> None:
    async with httpx.AsyncClient(timeout=LIMIT_S) as http:
        response = await http.post(url + PATH, content=bytes(40 * 2**20), headers={"content-type": "application/json"})
    assert refusal(response) == (413, "request_too_large", None)


@pytest.mark.parametrize(
    ("length", "body"),
    [("content-length: 1000", bytes(1000)), ("transfer-encoding: chunked", b"3e8\r\n%s\r\n0\r\n\r\n" % bytes(1000))],
)
async def test_a_short_rest_of_a_body_does_not_cost_the_connection(url: str, length: str, body: bytes) -> None:
    connection = await Connection.open(url, "/unknown", length)
    await connection.send(body)
    assert (await connection.answer())[0] == 404
    assert not await connection.is_closed()
    connection.close()


async def test_a_body_that_cannot_be_received_replaces_no_answer() -> None:
    sent: list[Message] = []

    async def fail() -> Message:
        raise RuntimeError("the proxy is gone")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"transfer-encoding", b"chunked")]}
    await UnreadBodyMiddleware(PlainTextResponse("unknown", 404))(scope, fail, send)
    assert [message.get("status") for message in sent] == [404, None]
