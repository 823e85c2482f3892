"""Engines behind HTTP: `python -m bench.peers.http_server --kind openai --serve "COMMAND" --model NAME`.

The client streams the workload and records token arrival times. It shares the cores, as a gateway would.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil

from bench.peers import driver
from bench.peers.engine import Events, PeerEngine, PeerRequest
from testkit.serving.served import CannotStart, answers, end_processes, wait_for

_START_LIMIT_S, _STOP_LIMIT_S = 600.0, 20.0
_DATA, _DONE = b"data: ", b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """`/v1/completions` with a prompt of token ids and token ids in the answer (vLLM's `return_token_ids`)."""

    address: str
    """URL of requests."""
    model: str

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

    address: str
    """URL of requests."""

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


@dataclass(frozen=True, slots=True)
class HttpEngine(PeerEngine):
    """Running server, and a client that keeps at most `concurrency` streams open."""

    server: Server
    pid: int
    """First process of the server; the others descend from it."""
    stop: Callable[[], object]

    def run(self, requests: Sequence[PeerRequest], concurrency: int) -> Events:
        """Send all requests; at most `concurrency` streams are open at once."""
        return asyncio.run(_run(self.server, requests, concurrency))

    def pids(self) -> list[int]:
        """Return every process of the server; not this one, the client."""
        return [self.pid, *(process.pid for process in psutil.Process(self.pid).children(recursive=True))]

    def close(self) -> None:
        """Stop the server."""
        self.stop()


class WrongAnswer(Exception):
    """Refused request or broken stream."""


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


def start(arguments: argparse.Namespace) -> HttpEngine:
    """Start a server by the command `--serve`; it answers `/health` when it is ready."""
    url = f"http://127.0.0.1:{arguments.port}"
    server: Server = LlamaServer(f"{url}/completion")
    if arguments.kind == "openai":
        server = OpenAIServer(f"{url}/v1/completions", arguments.served)
    with open(arguments.log, "wb") as log:
        process = subprocess.Popen(shlex.split(arguments.serve), stdout=log, stderr=subprocess.STDOUT)

    def is_ready() -> bool:
        if process.poll() is not None:
            raise CannotStart(f"the server ended with {process.returncode}; see {arguments.log}")
        return answers(f"{url}/health")

    try:
        wait_for(is_ready, f"the server is ready, see {arguments.log}", _START_LIMIT_S, 0.5)
    except TimeoutError:
        process.kill()
        raise
    return HttpEngine(server, process.pid, lambda: end_processes([psutil.Process(process.pid)], _STOP_LIMIT_S))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a server."""
    parser.add_argument("--serve", required=True, help="command that serves on --port")
    parser.add_argument("--kind", choices=("openai", "llama"), default="openai")
    parser.add_argument("--served", default="m", help="the model's name in requests")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--log", default="peer-server.log")


if __name__ == "__main__":
    driver.main(start, "HTTP server", add_arguments)
