"""Streamed completions of many clients, read in a thread beside the test."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from httpx_sse import SSEError

from serve_app.cli.clients.events import aread_events
from testkit.limits import LIMIT_S


@dataclass(eq=False)
class Stream:
    """State of one streamed request; the clients' thread writes it, the test reads it."""

    request_id: str
    status: int | None = None
    replica_id: str | None = None
    """Replica that gave the first tokens."""
    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    """Text by choice."""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    """Error of the server, or of the transport."""
    is_done: bool = False
    """True if the server has sent `[DONE]`."""
    reading: Future[None] | None = None
    """Task that reads the stream."""

    @property
    def num_characters(self) -> int:
        """Number of characters of all choices."""
        return sum(len(text) for text in list(self.texts.values()))

    @property
    def is_over(self) -> bool:
        """True if nothing more will come."""
        return self.reading is not None and self.reading.done()

    def close(self) -> None:
        """Disconnect the client."""
        assert self.reading is not None
        self.reading.cancel()

    def take(self, event: dict[str, Any]) -> None:
        """Record one event of the stream."""
        if "error" in event:
            self.error = str(event["error"])
        for choice in event.get("choices", ()):
            self.texts[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                self.finish_reasons[choice["index"]] = choice["finish_reason"]


class Clients:
    """Many clients on one event loop, which runs in a thread of its own."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._http = httpx.AsyncClient(
            base_url=url, timeout=LIMIT_S, limits=httpx.Limits(max_connections=None), trust_env=False
        )
        self._streams: list[Stream] = []
        self.begun: list[Stream] = []
        """Streams in the order of their first text."""

    def open(self, body: dict[str, Any], **headers: str) -> Stream:
        """Send one streamed completion; return it before any response."""
        stream = Stream(f"stream-{len(self._streams)}-of-{id(self)}")
        self._streams.append(stream)
        stream.reading = asyncio.run_coroutine_threadsafe(self._read(stream, body, headers), self._loop)
        return stream

    def close(self) -> None:
        """Disconnect every client."""
        for stream in self._streams:
            stream.close()
        asyncio.run_coroutine_threadsafe(self._http.aclose(), self._loop).result(LIMIT_S)

    async def _read(self, stream: Stream, body: dict[str, Any], headers: dict[str, str]) -> None:
        headers = {"x-request-id": stream.request_id, **headers}
        try:
            async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                stream.status = response.status_code
                stream.replica_id = response.headers.get("x-model-replica")
                async for event in aread_events(response):
                    stream.take(event)
                    if stream.texts and stream not in self.begun:
                        self.begun.append(stream)
                stream.is_done = True
        except SSEError:  # A refusal, which `status` has.
            return
        except httpx.TransportError as error:
            stream.error = stream.error or repr(error)


@contextmanager
def clients(url: str) -> Iterator[Clients]:
    """Yield clients; disconnect them afterwards."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="clients", daemon=True)
    thread.start()
    many = Clients(url, loop)
    try:
        yield many
    finally:
        many.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
