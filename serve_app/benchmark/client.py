"""HTTP client that sends one request, reads its stream, and records the response."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from serve_app.benchmark.rows import Row

READ_BUFFER_BYTES = 2**18
_MAX_MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True)
class Client:
    """Client with one connection pool; each request is a stream of completions or chat completions."""

    session: aiohttp.ClientSession
    url: str
    """URL of the endpoint."""
    clock: Callable[[], float]
    """Seconds since the start of the run."""

    async def run(self, body: bytes, row: Row) -> Mapping[str, str]:
        """Send one attempt and read the response to its end; fill in `row`, also when cancelled.

        Returns the response's headers in lower case; none if no response came.
        """
        row.num_attempts += 1
        row.last_sent_s = self.clock()
        row.sent_s = row.last_sent_s if row.sent_s is None else row.sent_s
        row.status = row.error_code = row.error_message = None
        headers: dict[str, str] = {}
        try:
            async with self.session.post(self.url, data=body, headers={"content-type": "application/json"}) as response:
                row.status = response.status
                headers = {name.lower(): value for name, value in response.headers.items()}
                row.replica_id = headers.get("x-model-replica")
                if response.status < 300:
                    await self._read(response.content, row)
                else:
                    _note_error(await response.text(), row)
        except (aiohttp.ClientError, TimeoutError) as error:
            row.error_code = f"client:{type(error).__name__}"
            row.error_message = str(error) or "the time-out has passed"
        finally:
            row.end_s = self.clock()
        return headers

    async def _read(self, content: aiohttp.StreamReader, row: Row) -> None:
        async for events in _events(content):
            now_s = self.clock()
            for event in events:
                if event == b"[DONE]":
                    continue
                try:
                    _note_chunk(json.loads(event), now_s, row)
                except (ValueError, KeyError, TypeError, AttributeError):
                    row.error_code, row.error_message = "client:MalformedEvent", event[:_MAX_MESSAGE_CHARS].decode()


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[list[bytes]]:
    """Yield the data of the server-sent events that have arrived together; skip comments."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if events:
            yield events


def _note_chunk(chunk: dict[str, Any], now_s: float, row: Row) -> None:
    if chunk.get("error"):
        _note_error(json.dumps(chunk), row)
        return
    if usage := chunk.get("usage"):
        row.usage_prompt_tokens = usage.get("prompt_tokens")
        row.usage_output_tokens = usage.get("completion_tokens")
    for choice in chunk.get("choices") or ():
        row.finish_reason = choice.get("finish_reason") or row.finish_reason
        token_ids = choice.get("token_ids") or ()
        if not token_ids and not _has_output(choice):
            continue
        row.token_ids.extend(token_ids)
        if not row.chunk_s or row.chunk_s[-1] != now_s:
            row.chunk_s.append(now_s)
            row.chunk_tokens.append(0)
        row.chunk_tokens[-1] += len(token_ids) or 1


def _has_output(choice: Mapping[str, Any]) -> bool:
    """Return True if a choice has text of any kind; the first chunk of a chat often has a role alone."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(value for name, value in delta.items() if name != "role"))


def _note_error(text: str, row: Row) -> None:
    """Note the code and the message of an error, of OpenAI's shape or another."""
    row.error_code, row.error_message = text[:80], text[:_MAX_MESSAGE_CHARS]
    try:
        error = json.loads(text)["error"]
        row.error_message = str(error["message"])
        row.error_code = str(error["code"])
    except (ValueError, KeyError, TypeError):
        return
