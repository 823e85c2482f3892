"""Most chunks a second that the load generator reads: `python -m bench.server.load_ceiling`.

A trivial server in its own process sends chunks to 32 streams as fast as it can, with one write for each chunk.
They are read by the client of `headway bench` (aiohttp) and, for comparison, by httpx with httpx-sse. The two
processes share the machine; chunks per second of processor time are those of the reading process alone.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from statistics import median

import aiohttp
import httpx
from httpx_sse import EventSource

from bench.record import write
from serve_app.benchmark.client import READ_BUFFER_BYTES, Client
from serve_app.benchmark.rows import Row

NUM_STREAMS, NUM_CHUNKS, ROUNDS = 32, 2000, 5
_CHOICE = {"index": 0, "text": " word", "finish_reason": None, "token_ids": [17]}
_CHUNK = b"data: " + json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [_CHOICE]}).encode() + b"\n\n"
_PART = b"%x\r\n%s\r\n" % (len(_CHUNK), _CHUNK)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
Read = Callable[[str], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Medians over the rounds of one library."""

    library: str
    chunks_per_s: float
    chunks_per_cpu_s: float


def main() -> None:
    """Measure both libraries by turns, print and record."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = multiprocessing.get_context("fork").Process(target=_serve, args=(listener,), daemon=True)
        server.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            ceilings = asyncio.run(_measure(url))
        finally:
            server.terminate()
            server.join()
    for ceiling in ceilings:
        print(
            f"{ceiling.library}: {ceiling.chunks_per_s:,.0f} chunks/s, {ceiling.chunks_per_cpu_s:,.0f} per CPU second"
        )
    write(
        "load_ceiling", {"num_streams": NUM_STREAMS, "num_chunks": NUM_CHUNKS, "ceilings": list(map(asdict, ceilings))}
    )


async def _measure(url: str) -> list[Ceiling]:
    libraries: dict[str, Read] = {"aiohttp": _read_with_aiohttp, "httpx, httpx-sse": _read_with_httpx}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in libraries}
    for _ in range(ROUNDS):
        for name, read in libraries.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            num_chunks = await read(url)
            assert num_chunks == NUM_STREAMS * NUM_CHUNKS
            found[name].append(
                (num_chunks / (time.perf_counter() - wall_s), num_chunks / (time.process_time() - cpu_s))
            )
    return [Ceiling(name, median(a for a, _ in rates), median(b for _, b in rates)) for name, rates in found.items()]


async def _read_with_aiohttp(url: str) -> int:
    rows = [Row(index, 1, NUM_CHUNKS, 0.0) for index in range(NUM_STREAMS)]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=READ_BUFFER_BYTES) as session:
        client = Client(session, url, time.monotonic)
        await asyncio.gather(*(client.run(b"{}", row) for row in rows))
    return sum(row.num_tokens for row in rows)


async def _read_with_httpx(url: str) -> int:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, trust_env=False, timeout=60.0) as client:

        async def read() -> int:
            num_chunks = 0
            async with client.stream("POST", url, content=b"{}") as response:
                async for event in EventSource(response).aiter_sse():
                    num_chunks += len(event.json()["choices"][0]["token_ids"])
            return num_chunks

        return sum(await asyncio.gather(*(read() for _ in range(NUM_STREAMS))))


def _serve(listener: socket.socket) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_HEAD)
        for _ in range(NUM_CHUNKS):
            writer.write(_PART)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def serve() -> None:
        await (await asyncio.start_server(answer, sock=listener)).serve_forever()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
