"""Streamed completions of many clients, read in a thread beside the test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import httpx

from testkit.limits import LIMIT_S


class Stream:
    """State of one streamed request; the clients' thread writes it, the test reads it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.status: int | None = None
        self.replica_id: str | None = None
        """The replica that gave the first tokens."""
        self.texts: defaultdict[int, str] = defaultdict(str)
        """Text by choice."""
        self.finish_reasons: dict[int, str] = {}
        self.error: str | None = None
        """The server's error, or the transport error."""
        self.is_done = False
        """True if the server has sent `[DONE]`."""
        self._reading: Future[None] | None = None

    @property
    def num_characters(self) -> int:
        """Number of characters of all choices."""
        return sum(len(text) for text in list(self.texts.values()))

    @property
    def is_over(self) -> bool:
        """True if nothing more will come."""
        return self._reading is not None and self._reading.done()

    def close(self) -> None:
        """Disconnect the client."""
        assert self._reading is not None
        self._reading.cancel()

    def read_on(self, reading: Future[None]) -> None:
        """Attach the task that reads the stream."""
        self._reading = reading

    def take(self, line: str) -> None:
        """Record one line of the event stream."""
        data = line.removeprefix("data: ")
        if data == line:
            return  # a comment, or the empty line after an event
        if data == "[DONE]":
            self.is_done = True
            return
        event: dict[str, Any] = json.loads(data)
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
        self._http = httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=httpx.Limits(max_connections=None))
        self._streams: list[Stream] = []
        self.begun: list[Stream] = []
        """Streams in the order of their first text."""

    def open(self, body: dict[str, Any]) -> Stream:
        """Send one streamed completion; return it before any response."""
        stream = Stream(f"stream-{len(self._streams)}-of-{id(self)}")
        self._streams.append(stream)
        stream.read_on(asyncio.run_coroutine_threadsafe(self._read(stream, body), self._loop))
        return stream

    def close(self) -> None:
        """Disconnect every client."""
        for stream in self._streams:
            stream.close()
        asyncio.run_coroutine_threadsafe(self._http.aclose(), self._loop).result(LIMIT_S)

    async def _read(self, stream: Stream, body: dict[str, Any]) -> None:
        headers = {"x-request-id": stream.request_id}
        try:
            async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                stream.status = response.status_code
                stream.replica_id = response.headers.get("x-model-replica")
                async for line in response.aiter_lines():
                    stream.take(line)
                    if stream.texts and stream not in self.begun:
                        self.begun.append(stream)
        except httpx.TransportError as error:
            stream.error = repr(error)


@contextmanager
def clients(url: str) -> Iterator[Clients]:
    """Yield clients; disconnect them afterwards."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="clients")
    thread.start()
    many = Clients(url, loop)
    try:
        yield many
    finally:
        many.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
