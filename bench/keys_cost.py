"""Cost of API keys with limits and of a prefix cache divided by tenants: `python -m bench.keys_cost`.

Two servers with the demo model, one without keys and one whose keys have all limits, get the same streamed chats, eight
at a time, in short turns of the order ABBA BAAB. The figure is processor time of the serving process for each request.
A quad is four turns, in which a slow drift of the machine cancels out. The ratio is the geometric mean of the quads',
with a confidence interval from their spread. HTTP and engine are one process here. Ray and its proxy, on which keys
have no effect, would only make the ratio smaller.
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
_NUM_CLIENTS, _LIMIT_S, _NUM_WARM_QUADS = 8, 120.0, 3
_Z_95 = 1.96
"""Standard errors on each side of a mean that enclose 95 % of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Quad:
    """Four turns, two of each server: processor time for a request, milliseconds."""

    with_cpu_ms: float
    without_cpu_ms: float

    @property
    def log_ratio(self) -> float:
        """Logarithm of the time with keys in that without."""
        return math.log(self.with_cpu_ms / self.without_cpu_ms)


async def offer(http: httpx.AsyncClient, num_requests: int) -> None:
    """Send streamed chats from several clients, and read them to their ends."""
    numbers = iter(range(num_requests))

    async def client() -> None:
        for number in numbers:
            messages = [{"role": "user", "content": f"{number}: tell me about the quick brown fox"}]
            body = {"model": DEMO_MODEL_NAME, "messages": messages, "max_tokens": 16, "stream": True}
            answer = await http.post("/v1/chat/completions", json=body | {"ignore_eos": True})
            assert answer.status_code == 200 and "[DONE]" in answer.text, answer.text

    await asyncio.gather(*(client() for _ in range(_NUM_CLIENTS)))


def client_of(server: LocalServer) -> httpx.AsyncClient:
    """Return a client with a key, which a server without keys ignores."""
    headers = {"authorization": f"Bearer {KEYS[Band.STANDARD]}"}
    return httpx.AsyncClient(base_url=server.url, timeout=_LIMIT_S, headers=headers)


async def measure(servers: dict[str, LocalServer], num_quads: int, num_requests: int) -> list[Quad]:
    """Return the figures of all quads, after a few to warm up; every second one has the opposite order."""
    quads = []
    async with client_of(servers["with"]) as with_keys, client_of(servers["without"]) as without:
        clients = {"with": with_keys, "without": without}
        for number in range(_NUM_WARM_QUADS + num_quads):
            first, second = ("with", "without") if number % 2 else ("without", "with")
            cpu_s = dict.fromkeys(clients, 0.0)
            for name in (first, second, second, first):
                begin_s = servers[name].cpu_s()
                await offer(clients[name], num_requests)
                cpu_s[name] += servers[name].cpu_s() - begin_s
            num_of_each = 2 * num_requests / 1000
            quads.append(Quad(cpu_s["with"] / num_of_each, cpu_s["without"] / num_of_each))
    return quads[_NUM_WARM_QUADS:]


def figures_of(quads: list[Quad]) -> dict[str, Any]:
    """Return the ratio of all quads with its confidence interval."""
    logs = [quad.log_ratio for quad in quads]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    return {
        "without_cpu_ms": statistics.mean(quad.without_cpu_ms for quad in quads),
        "with_cpu_ms": statistics.mean(quad.with_cpu_ms for quad in quads),
        "cpu_ratio": math.exp(mean),
        "cpu_ratio_95_percent": [math.exp(mean - _Z_95 * error), math.exp(mean + _Z_95 * error)],
        "quad_ratios": [round(math.exp(each), 4) for each in logs],
    }


def run(num_quads: int, num_requests: int) -> dict[str, Any]:
    """Return the figures."""
    with LocalServer({"NO_KEYS": "1"}) as without, LocalServer({"KEY_LIMITS": "1"}) as with_keys:
        servers = {"with": with_keys, "without": without}
        quads = asyncio.run(measure(servers, num_quads, num_requests))
    return {"num_quads": num_quads, "num_requests_of_a_turn": num_requests, **figures_of(quads)}


def main() -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quads", type=int, default=150, help="quads of turns, in about two seconds each")
    parser.add_argument("--requests", type=int, default=24, help="requests of each turn")
    options = parser.parse_args()
    figures = run(options.quads, options.requests)
    low, high = figures["cpu_ratio_95_percent"]
    print(f"{figures['with_cpu_ms']:.3f} ms with, {figures['without_cpu_ms']:.3f} ms without", end=": ")
    print(f"{figures['cpu_ratio']:.4f}, 95 % confidence {low:.4f} to {high:.4f}")
    print(write(NAME, figures), file=sys.stderr)
    return 0 if high <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
