"""Receivers of webhooks: real HTTP servers on loopback addresses."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Received:
    """One received request, with the address and the connection that it came by."""

    address: str
    connection: int
    path: str
    headers: dict[str, str]
    body: str


@dataclass
class Receiver:
    """Server that keeps its requests and answers each with `answer`."""

    answer: Answer
    requests: list[Received] = field(default_factory=list)
    port: int = 0
    num_connections: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        number = self.num_connections
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.requests.append(await _read(head.decode(), reader, writer, number))
                await self.answer(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def _read(head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> Received:
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers["content-length"]))
    return Received(writer.get_extra_info("sockname")[0], connection, first.split()[1], headers, body.decode())


def status(code: int, *headers: str) -> Answer:
    """Return an answer of this status with an empty body."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {code} Whatever", "Content-Length: 0", *headers]
        writer.write("\r\n".join([*lines, "", ""]).encode())

    return answer


async def silence(writer: asyncio.StreamWriter) -> None:
    """Never answer."""
    await asyncio.Event().wait()


async def endless_body(writer: asyncio.StreamWriter) -> None:
    """Answer 200 with a body that never ends."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"400\r\n" + bytes(1024) + b"\r\n")
        await writer.drain()


async def endless_headers(writer: asyncio.StreamWriter) -> None:
    """Answer with headers that never end."""
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: " + b"x" * 1024 + b"\r\n")
        await writer.drain()


@asynccontextmanager
async def receiving(
    answer: Answer, addresses: tuple[str, ...] = ("127.0.0.1",), tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    """Run a receiver on one port of all the addresses."""
    receiver = Receiver(answer)
    server = await asyncio.start_server(receiver.handle, addresses[0], 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    others = [await asyncio.start_server(receiver.handle, other, receiver.port, ssl=tls) for other in addresses[1:]]
    try:
        yield receiver
    finally:
        for each in (server, *others):
            each.close()
