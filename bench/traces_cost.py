"""Cost of traces: `python -m bench.traces_cost`.

Two servers with the demo model, one without traces and one that traces every request, get the same streamed chats by
turns, from 200 clients at once. The figure is processor time of the serving process for each request, which other
programs on the machine hardly change. A request that is not traced has no spans, so tracing a tenth of the requests
costs a tenth, which turns of a few seconds could not show. The spans go to an OTLP receiver in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from typing import Any

import httpx

from bench.local_server import LocalServer
from bench.record import write
from serve_app.config import DEMO_MODEL_NAME
from testkit.otlp_receiver import OtlpReceiver, otlp_receiver

NAME, MAX_RATIO = "traces_cost", 1.01
_COMMON_SHARE = 0.1
"""Share of traced requests that the bound is for."""
_LIMIT_S = 300.0


async def offer(url: str, num_streams: int, num_requests: int, num_tokens: int) -> None:
    """Send streamed chats from many clients, and read them to their ends."""
    numbers = itertools.islice(itertools.count(), num_requests)
    # A connection that this loop takes up again too late has been closed by the server.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=_LIMIT_S, limits=limits, trust_env=False) as http:

        async def client() -> None:
            for number in numbers:
                messages = [{"role": "user", "content": f"{number}: tell me about the quick brown fox"}]
                body = {"model": DEMO_MODEL_NAME, "messages": messages, "max_tokens": num_tokens, "stream": True}
                answer = await http.post("/v1/chat/completions", json=body | {"ignore_eos": True})
                assert answer.status_code == 200 and "[DONE]" in answer.text, answer.text

        await asyncio.gather(*(client() for _ in range(num_streams)))


def measure(server: LocalServer, options: argparse.Namespace) -> float:
    """Return the processor time of a request in one turn, milliseconds."""
    cpu_s = server.cpu_s()
    asyncio.run(offer(server.url, options.streams, options.requests, options.tokens))
    time.sleep(3.0)  # The last spans are sent within two seconds.
    num_requests: int = options.requests
    return 1000 * (server.cpu_s() - cpu_s) / num_requests


def run(options: argparse.Namespace, receiver: OtlpReceiver) -> dict[str, Any]:
    """Return the figures of all turns, after one of each server to warm up; the order changes from turn to turn."""
    environment = {"NO_KEYS": "1"}
    traced = {**environment, "OTLP_ENDPOINT": receiver.url, "TRACE_RATIO": str(options.ratio)}
    turns = []
    with LocalServer(environment) as without, LocalServer(traced) as with_traces:
        servers = {"without": without, "with": with_traces}
        for number in range(1 + options.turns):
            order = list(servers.items())[:: 1 if number % 2 else -1]
            turn = {name: round(measure(server, options), 3) for name, server in order}
            print(turn, f"{turn['with'] / turn['without']:.4f}", flush=True)
            turns.append(turn)
    turns = turns[1:]
    cpu_ratio = statistics.median(turn["with"] / turn["without"] for turn in turns)
    num_traces = len({span.trace_id for span in receiver.spans})
    return {
        "num_streams": options.streams,
        "num_requests": options.requests,
        "num_tokens": options.tokens,
        "sampling_ratio": options.ratio,
        "num_traces": num_traces,
        "num_spans": len(receiver.spans),
        "without_cpu_ms": statistics.median(turn["without"] for turn in turns),
        "with_cpu_ms": statistics.median(turn["with"] for turn in turns),
        "cpu_ratio": round(cpu_ratio, 4),
        "cpu_ratio_at_10_percent": round(1 + (cpu_ratio - 1) * _COMMON_SHARE / options.ratio, 4),
        "turns": turns,
    }


def main() -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--streams", type=int, default=200, help="clients at once")
    parser.add_argument("--requests", type=int, default=600, help="requests of each turn")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of a request")
    parser.add_argument("--ratio", type=float, default=1.0, help="share of the requests that are traced")
    options = parser.parse_args()
    with otlp_receiver() as receiver:
        figures = run(options, receiver)
    print({name: value for name, value in figures.items() if name != "turns"})
    print(write(NAME, figures), file=sys.stderr)
    return 0 if figures["cpu_ratio_at_10_percent"] <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
