"""Latency of interactive requests beside bodies that cost much before any queue: `python -m bench.intake_floods`.

The HTTP application and the demo model run in one process. A client with an interactive key sends short chats, one
after another, first alone. Then three clients with a `batch` key send one kind of heavy body each, in turn:

- tokenize: POST /tokenize of 190,000 empty messages.
- parse: POST /v1/completions of 1,500,000 prompts.
- echo: POST /v1/completions of 128 prompts with `echo` and `logprobs`.

Each of them sends its next body `--pause` seconds after the answer. `--label` names the figures' part of the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from bench.local_server import KEYS, LocalServer
from bench.record import RESULTS, percentile, write
from replicas.protocol import Band
from serve_app.config import DEMO_MODEL_NAME

NAME = "intake_floods"
NUM_CLIENTS, MAX_RATIO = 3, 2.0
_LIMIT_S, _GAP_S = 120.0, 0.1
_WORDS = "the quick brown fox jumps over the lazy dog "


def attacks() -> dict[str, tuple[str, bytes]]:
    """Return path and body of each attack, by name."""
    messages = b",".join([b'{"role":"user","content":""}'] * 190_000)
    prompts = b",".join([b'"a"'] * 1_500_000)
    echo = {"model": DEMO_MODEL_NAME, "prompt": [_WORDS * 72] * 128, "echo": True, "logprobs": 5, "max_tokens": 1}
    return {
        "tokenize": ("/tokenize", b'{"messages":[' + messages + b"]}"),
        "parse": ("/v1/completions", b'{"model":"%s","prompt":[' % DEMO_MODEL_NAME.encode() + prompts + b"]}"),
        "echo": ("/v1/completions", json.dumps(echo).encode()),
    }


def _headers(band: Band) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[band]}", "content-type": "application/json"}


async def ttft_s(http: httpx.AsyncClient) -> float:
    """Return the time from the sending of an interactive chat to its first piece of text."""
    messages = [{"role": "user", "content": "Hello, who are you?"}]
    body = {"model": DEMO_MODEL_NAME, "messages": messages, "max_tokens": 2, "stream": True, "priority": 0}
    sent_s, first_s = time.perf_counter(), None
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=_headers(Band.INTERACTIVE)) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if first_s is None and '"content":' in line:
                first_s = time.perf_counter()
    assert first_s is not None
    return first_s - sent_s


async def probe(http: httpx.AsyncClient, num: int) -> list[float]:
    """Return the TTFT of interactive chats, sent one after another, milliseconds."""
    found = []
    for _ in range(num):
        found.append(1000 * await ttft_s(http))
        await asyncio.sleep(_GAP_S)
    return found


async def flood(http: httpx.AsyncClient, path: str, content: bytes, pause_s: float, statuses: Counter[str]) -> None:
    """Send a body again and again; count the answers by status."""
    while True:
        try:
            answer = await http.post(path, content=content, headers=_headers(Band.BATCH))
            statuses[str(answer.status_code)] += 1
        except httpx.HTTPError as error:
            statuses[type(error).__name__] += 1
        await asyncio.sleep(pause_s)


async def measure(
    server: LocalServer, num: int, make: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]] | None
) -> dict[str, Any]:
    """Return the figures of interactive chats, beside clients that `make` runs; None: alone."""
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=_LIMIT_S, limits=limits) as http,
        httpx.AsyncClient(base_url=server.url, timeout=_LIMIT_S, limits=limits) as attacker,
    ):
        await probe(http, 3)
        attackers = [] if make is None else [make(attacker) for _ in range(NUM_CLIENTS)]
        tasks = [asyncio.create_task(each) for each in attackers]
        await asyncio.sleep(1.0 if tasks else 0.0)
        num_lines = len(server.lines)
        found = await probe(http, num)
        stalls = [line["loop_stall_ms"] for line in server.lines[num_lines:]]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "num_requests": len(found),
        "ttft_p50_ms": percentile(found, 50),
        "ttft_p99_ms": percentile(found, 99),
        "loop_stall_p50_ms": percentile(stalls, 50) if stalls else None,
        "loop_stall_max_ms": max(stalls, default=None),
        "load_average": os.getloadavg()[0],
    }


def run(num: int, pause_s: float, only: str | None) -> dict[str, Any]:
    """Return the figures of every attack, each with those of the undisturbed phase before it."""
    figures: dict[str, Any] = {}
    with LocalServer() as server:
        for name, (path, content) in attacks().items():
            if only not in (None, name):
                continue
            statuses: Counter[str] = Counter()

            async def attack(http: httpx.AsyncClient, path: str = path, content: bytes = content) -> None:
                await flood(http, path, content, pause_s, statuses)  # noqa: B023

            alone = asyncio.run(measure(server, num, None))
            beside = asyncio.run(measure(server, num, attack))
            ratio = beside["ttft_p99_ms"] / alone["ttft_p99_ms"]
            figures[name] = {
                "alone": alone,
                "beside": beside,
                "body_mb": len(content) / 1e6,
                "answers": dict(statuses),
                "ttft_p99_ratio": ratio,
                "is_kept": ratio <= MAX_RATIO,
            }
            print(json.dumps({name: figures[name]}, indent=2), flush=True)
    return figures


def main() -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help="interactive requests of each phase")
    parser.add_argument("--pause", type=float, default=0.25, help="seconds between a heavy client's bodies")
    parser.add_argument("--only", choices=sorted(attacks()), help="one kind of heavy body")
    parser.add_argument("--label", default="figures", help="name of this run in the file of results")
    options = parser.parse_args()
    figures = run(options.requests, options.pause, options.only)
    path = RESULTS / f"{NAME}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    former = {name: value for name, value in known.items() if name not in ("command", "environment")}
    print(write(NAME, former | {options.label: figures}), file=sys.stderr)
    return 0 if all(each["is_kept"] for each in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
