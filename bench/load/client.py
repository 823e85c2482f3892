"""HTTP client that sends one request and records its response."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from bench.load.retries import retry_delay_s
from bench.load.rows import Row

_EVENT_END = b"\n\n"


class Client:
    """Client with one connection pool; each request is a stream."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        clock: Callable[[], float],
        has_retries: bool,
        rng: random.Random,
    ) -> None:
        """Keep the session; `clock` gives seconds since the start of the run."""
        self._session = session
        self._url = f"{url}/v1/completions"
        self._clock = clock
        self._has_retries = has_retries
        self._rng = rng

    async def run(self, body: bytes, row: Row) -> None:
        """Send until there is an answer or no retry is left; fill in `row`, also when cancelled."""
        row.sent_s = self._clock()
        try:
            delay_s = await self._attempt(body, row)
            while delay_s is not None:
                await asyncio.sleep(delay_s)
                delay_s = await self._attempt(body, row)
        finally:
            row.end_s = self._clock()

    async def _attempt(self, body: bytes, row: Row) -> float | None:
        """Make one attempt; return the seconds until the next one, or None."""
        row.num_attempts += 1
        row.last_sent_s = self._clock()
        row.status = row.error_code = None
        headers: dict[str, str] = {}
        try:
            async with self._session.post(
                self._url, data=body, headers={"content-type": "application/json"}
            ) as response:
                row.status = response.status
                headers = {name.lower(): value for name, value in response.headers.items()}
                row.replica_id = headers.get("x-model-replica")
                if response.status < 300:
                    await self._read(response.content, row)
                    return None
                row.error_code = _error_code(await response.text())
        except (aiohttp.ClientError, TimeoutError) as error:
            row.error_code = f"client:{type(error).__name__}"
            if row.status is not None:
                return None
        return retry_delay_s(row.status, headers, row.num_attempts, self._rng) if self._has_retries else None

    async def _read(self, content: aiohttp.StreamReader, row: Row) -> None:
        async for event in _events(content):
            if event == b"[DONE]":
                continue
            self._note(json.loads(event), row)

    def _note(self, chunk: dict[str, Any], row: Row) -> None:
        if "error" in chunk:
            row.error_code = str(chunk["error"].get("code"))
            return
        for choice in chunk["choices"]:
            token_ids = choice.get("token_ids") or ()
            if token_ids:
                row.chunk_s.append(self._clock())
                row.chunk_tokens.append(len(token_ids))
                row.token_ids.extend(token_ids)
            row.finish_reason = choice["finish_reason"] or row.finish_reason


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event; skip comments."""
    buffer = b""
    async for piece in content.iter_any():
        buffer += piece
        *events, buffer = buffer.split(_EVENT_END)
        for event in events:
            if event.startswith(b"data: "):
                yield event[6:]


def _error_code(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return text[:80]
