"""Cost of API keys with limits and of a prefix cache divided by tenants: `python -m bench.keys_cost`.

Two servers with the demo model, one without keys and one whose keys have all limits, get the same streamed chats, eight
at a time, in short turns of the order ABBA BAAB. The figure is processor time of the serving process for each request.
A quad is four turns, in which a slow drift of the machine cancels out.

Keys cost a fixed time for each request and none for its tokens. The quads therefore have chats of one token: their
difference is that of any chat, and other work disturbs it least. It is the median of the quads', with the confidence
interval of a median, which needs no normal distribution. The ratio is that of chats of 16 tokens, whose time is
measured on the server without keys; longer ones have a smaller ratio. HTTP and engine are one process here. Ray and its
proxy, on which keys have no effect, would only make the ratio smaller.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import httpx

from bench.local_server import KEYS, LocalServer
from bench.record import write
from replicas.protocol import Band
from serve_app.config import DEMO_MODEL_NAME

NAME, MAX_RATIO = "keys_cost", 1.02
_NUM_CLIENTS, _LIMIT_S, _NUM_WARM_QUADS = 8, 120.0, 10
_SHORT, _LONG, _NUM_LONG_TURNS = 1, 16, 12
_Z_95 = 1.96
"""Standard deviations on each side of a mean that enclose 95 % of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Quad:
    """Four turns, two of each server: processor time for a request, milliseconds."""

    with_cpu_ms: float
    without_cpu_ms: float

    @property
    def added_ms(self) -> float:
        """Time that keys add."""
        return self.with_cpu_ms - self.without_cpu_ms


async def offer(http: httpx.AsyncClient, num_requests: int, max_tokens: int) -> None:
    """Send streamed chats from several clients, and read them to their ends."""
    numbers = iter(range(num_requests))

    async def client() -> None:
        for number in numbers:
            messages = [{"role": "user", "content": f"{number}: tell me about the quick brown fox"}]
            body = {"model": DEMO_MODEL_NAME, "messages": messages, "max_tokens": max_tokens, "stream": True}
            answer = await http.post("/v1/chat/completions", json=body | {"ignore_eos": True})
            assert answer.status_code == 200 and "[DONE]" in answer.text, answer.text

    await asyncio.gather(*(client() for _ in range(_NUM_CLIENTS)))


def client_of(server: LocalServer) -> httpx.AsyncClient:
    """Return a client with a key, which a server without keys ignores."""
    headers = {"authorization": f"Bearer {KEYS[Band.STANDARD]}"}
    return httpx.AsyncClient(base_url=server.url, timeout=_LIMIT_S, headers=headers)


async def turn_ms(server: LocalServer, http: httpx.AsyncClient, num_requests: int, max_tokens: int) -> float:
    """Return the processor time of one request in a turn, milliseconds."""
    begin_s = server.cpu_s()
    await offer(http, num_requests, max_tokens)
    return 1000 * (server.cpu_s() - begin_s) / num_requests


async def measure(servers: dict[str, LocalServer], num_quads: int, num_requests: int) -> tuple[list[Quad], list[float]]:
    """Return the quads of short chats, after a few to warm up, and the times of long chats without keys."""
    quads, long_ms = [], []
    long_period = max(1, num_quads // _NUM_LONG_TURNS)
    async with client_of(servers["with"]) as with_keys, client_of(servers["without"]) as without:
        clients = {"with": with_keys, "without": without}
        for number in range(_NUM_WARM_QUADS + num_quads):
            first, second = ("with", "without") if number % 2 else ("without", "with")
            cpu_ms = dict.fromkeys(clients, 0.0)
            for name in (first, second, second, first):
                cpu_ms[name] += await turn_ms(servers[name], clients[name], num_requests, _SHORT) / 2
            quads.append(Quad(cpu_ms["with"], cpu_ms["without"]))
            if number % long_period == 0:
                long_ms.append(await turn_ms(servers["without"], without, num_requests, _LONG))
    return quads[_NUM_WARM_QUADS:], long_ms


def median_with_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and the limits of its confidence interval: the values of two ranks."""
    ordered = sorted(values)
    rank = max(0, math.floor((len(ordered) - _Z_95 * math.sqrt(len(ordered))) / 2))
    return statistics.median(ordered), ordered[rank], ordered[-1 - rank]


def figures_of(quads: list[Quad], long_ms: list[float]) -> dict[str, Any]:
    """Return the ratio with its confidence interval."""
    added_ms, low_ms, high_ms = median_with_interval([quad.added_ms for quad in quads])
    whole_ms = statistics.median(long_ms)
    return {
        "added_cpu_ms": added_ms,
        "added_cpu_ms_95_percent": [low_ms, high_ms],
        "cpu_ms_without": {
            f"{_SHORT}_token": statistics.median(quad.without_cpu_ms for quad in quads),
            f"{_LONG}_tokens": whole_ms,
        },
        "cpu_ratio": 1 + added_ms / whole_ms,
        "cpu_ratio_95_percent": [1 + low_ms / whole_ms, 1 + high_ms / whole_ms],
        "quads_added_ms": [round(quad.added_ms, 4) for quad in quads],
    }


def run(num_quads: int, num_requests: int) -> dict[str, Any]:
    """Return the figures."""
    with LocalServer({"NO_KEYS": "1"}) as without, LocalServer({"KEY_LIMITS": "1"}) as with_keys:
        servers = {"with": with_keys, "without": without}
        quads, long_ms = asyncio.run(measure(servers, num_quads, num_requests))
    return {"num_quads": num_quads, "num_requests_of_a_turn": num_requests, **figures_of(quads, long_ms)}


def main() -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quads", type=int, default=300, help="quads of turns, each in less than a second")
    parser.add_argument("--requests", type=int, default=32, help="requests of each turn")
    options = parser.parse_args()
    figures = run(options.quads, options.requests)
    low, high = figures["cpu_ratio_95_percent"]
    print(f"{figures['added_cpu_ms']:.3f} ms added to {figures['cpu_ms_without']}", end=": ")
    print(f"{figures['cpu_ratio']:.4f}, 95 % confidence {low:.4f} to {high:.4f}")
    print(write(NAME, figures), file=sys.stderr)
    return 0 if high <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
