"""Cost of API keys with limits and of a prefix cache divided by tenants: `python -m bench.keys_cost`.

Two servers with the demo model, one without keys and one whose keys have all limits, get the same streamed chats by
turns, eight at a time. The figure is processor time of the serving process for each request, which other programs on
the machine hardly change, and the requests per second beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from typing import Any

import httpx

from bench.local_server import KEYS, LocalServer
from bench.record import write
from replicas.protocol import Band
from serve_app.config import DEMO_MODEL_NAME

NAME, MAX_RATIO = "keys_cost", 1.02
_NUM_CLIENTS, _LIMIT_S = 8, 120.0


async def offer(url: str, num_requests: int) -> None:
    """Send streamed chats from several clients, and read them to their ends."""
    headers = {"authorization": f"Bearer {KEYS[Band.STANDARD]}"}
    numbers = iter(range(num_requests))
    async with httpx.AsyncClient(base_url=url, timeout=_LIMIT_S, headers=headers) as http:

        async def client() -> None:
            for number in numbers:
                messages = [{"role": "user", "content": f"{number}: tell me about the quick brown fox"}]
                body = {"model": DEMO_MODEL_NAME, "messages": messages, "max_tokens": 16, "stream": True}
                answer = await http.post("/v1/chat/completions", json=body | {"ignore_eos": True})
                assert answer.status_code == 200 and "[DONE]" in answer.text, answer.text

        await asyncio.gather(*(client() for _ in range(_NUM_CLIENTS)))


def measure(server: LocalServer, num_requests: int) -> dict[str, float]:
    """Return the figures of one turn."""
    cpu_s, begin_s = server.cpu_s(), time.monotonic()
    asyncio.run(offer(server.url, num_requests))
    wall_s = time.monotonic() - begin_s
    return {"cpu_ms": 1000 * (server.cpu_s() - cpu_s) / num_requests, "requests_per_s": num_requests / wall_s}


def run(num_turns: int, num_requests: int) -> dict[str, Any]:
    """Return the figures of all turns, after one of each server to warm up."""
    with LocalServer({"NO_KEYS": "1"}) as without, LocalServer({"KEY_LIMITS": "1"}) as with_keys:
        turns = [
            {"without": measure(without, num_requests), "with": measure(with_keys, num_requests)}
            for _ in range(1 + num_turns)
        ][1:]
    ratios = [turn["with"]["cpu_ms"] / turn["without"]["cpu_ms"] for turn in turns]
    for turn, ratio in zip(turns, ratios, strict=True):
        print(turn, f"{ratio:.3f}", flush=True)
    return {
        "without_cpu_ms": statistics.median(turn["without"]["cpu_ms"] for turn in turns),
        "with_cpu_ms": statistics.median(turn["with"]["cpu_ms"] for turn in turns),
        "cpu_ratio": statistics.median(ratios),
        "turns": turns,
    }


def main() -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--requests", type=int, default=200, help="requests of each turn")
    options = parser.parse_args()
    figures = run(options.turns, options.requests)
    print(
        f"{figures['with_cpu_ms']:.2f} ms with, {figures['without_cpu_ms']:.2f} ms without: {figures['cpu_ratio']:.3f}"
    )
    print(write(NAME, figures), file=sys.stderr)
    return 0 if figures["cpu_ratio"] <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
