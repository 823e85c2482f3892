"""HTTP client that streams the workload and records token arrival times. It shares the cores, as a gateway would."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.peers.engine import Events
from bench.peers.workload import PeerRequest

_DATA, _DONE = b"data: ", b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """`/v1/completions` with a prompt of token ids and token ids in the answer (vLLM's `return_token_ids`)."""

    url: str
    model: str

    @property
    def address(self) -> str:
        """URL of requests."""
        return f"{self.url}/v1/completions"

    def body(self, request: PeerRequest) -> dict[str, Any]:
        """Return the body of one request."""
        return {
            "model": self.model, "prompt": list(request.prompt), "max_tokens": request.num_output_tokens,
            "ignore_eos": True, "stream": True, "temperature": 0, "return_token_ids": True,
        }  # fmt: skip

    def num_tokens(self, chunk: dict[str, Any]) -> int:
        """Return the number of tokens in one chunk."""
        return sum(len(choice.get("token_ids") or ()) for choice in chunk.get("choices", ()))


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """llama.cpp's own `/completion`."""

    url: str

    @property
    def address(self) -> str:
        """URL of requests."""
        return f"{self.url}/completion"

    def body(self, request: PeerRequest) -> dict[str, Any]:
        """Return the body of one request."""
        return {
            "prompt": list(request.prompt), "n_predict": request.num_output_tokens, "ignore_eos": True, "stream": True,
            "temperature": 0, "cache_prompt": False, "return_tokens": True, "samplers": ["top_k"], "top_k": 1,
        }  # fmt: skip

    def num_tokens(self, chunk: dict[str, Any]) -> int:
        """Return the number of tokens in one chunk."""
        return len(chunk.get("tokens") or ())


Server = OpenAIServer | LlamaServer


class WrongAnswer(Exception):
    """Refused request or broken stream."""


def run(server: Server, requests: Sequence[PeerRequest], concurrency: int) -> Events:
    """Send all requests; at most `concurrency` streams are open at once."""
    return asyncio.run(_run(server, requests, concurrency))


async def _run(server: Server, requests: Sequence[PeerRequest], concurrency: int) -> Events:
    token_s: dict[int, list[float]] = {request.number: [] for request in requests}
    slots = asyncio.Semaphore(concurrency)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=1200)) as session:
        started_s = time.perf_counter()
        await asyncio.gather(*(_stream(session, server, slots, each, token_s[each.number]) for each in requests))
        return Events(token_s, started_s, time.perf_counter())


async def _stream(
    session: aiohttp.ClientSession, server: Server, slots: asyncio.Semaphore, request: PeerRequest, times: list[float]
) -> None:
    async with slots, session.post(server.address, json=server.body(request)) as response:
        if response.status != 200:
            raise WrongAnswer(f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(_DATA) and not line.startswith(_DONE):
                now, chunk = time.perf_counter(), json.loads(line[len(_DATA) :])
                if "error" in chunk:
                    raise WrongAnswer(str(chunk["error"]))
                times += [now] * server.num_tokens(chunk)
