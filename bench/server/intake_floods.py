"""Latency of requests beside bodies that cost much before any queue: `python -m bench.server.intake_floods`.

The HTTP application and the demo model run in one process, the clients that send heavy bodies in a second and the
client whose latency is measured in a third. That one has an interactive key and sends short chats, one after another,
first alone. Then three clients with a `batch` key send one kind of heavy body each, in turn:

- tokenize: POST /tokenize of 190,000 empty messages; tokenize_within: of as many as are accepted.
- parse: POST /v1/completions of 1,500,000 prompts; parse_within: of as many token ids as are accepted; parse_names: of
  as many names of fields as are accepted.
- echo: POST /v1/completions of 128 long prompts with `echo` and `logprobs`; echo_within: of prompts that are accepted.
- text: POST /v1/completions of a text of 4 MB with escapes.

Each of them sends its next body `--pause` seconds after the answer. Their process has the lowest priority (nice 19),
since elsewhere such clients take no processor from the server. Every kind is measured `--runs` times; the ratio
is the median of theirs. `--label` names the figures' part of the file, to which `--only` adds
its kind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx

from bench.record import RESULTS, percentile, write
from bench.server.local_server import KEYS, LocalServer
from replicas.protocol import Band
from serve_app.config import DEMO_MODEL_NAME
from serve_app.openai.request.validation import RequestLimits

NAME = "intake_floods"
NUM_CLIENTS, MAX_RATIO = 3, 2.0
_LIMIT_S, _GAP_S, _START_S, _NUM_WARM = 120.0, 0.02, 6.0, 10
_WORDS = "the quick brown fox jumps over the lazy dog "


@dataclass(frozen=True)
class Attack:
    """Heavy request."""

    path: str
    content: bytes


def attacks() -> dict[str, Attack]:
    """Return the heavy requests by name."""
    limits = RequestLimits()
    return {
        "tokenize": Attack("/tokenize", _messages(190_000)),
        "tokenize_within": Attack("/tokenize", _messages(limits.max_messages)),
        "parse": _prompts(b'"a"', 1_500_000),
        "parse_within": _prompts(b"1", limits.max_body_values - 10),
        "parse_names": _completion(b'"logit_bias":{%s}' % _names(limits.max_body_objects - 10)),
        "echo": _echo(_WORDS * 72),
        "echo_within": _echo(_WORDS * 16),
        "text": _completion(b'"prompt":"%s"' % (b"lazy dog\\n" * 400_000)),
    }


def _messages(number: int) -> bytes:
    return b'{"messages":[%s]}' % b",".join([b'{"role":"user","content":""}'] * number)


def _names(number: int) -> bytes:
    return b",".join(b'"%d":1' % index for index in range(number))


def _completion(fields: bytes) -> Attack:
    return Attack("/v1/completions", b'{"model":"%s",%s}' % (DEMO_MODEL_NAME.encode(), fields))


def _prompts(prompt: bytes, number: int) -> Attack:
    return _completion(b'"prompt":[%s]' % b",".join([prompt] * number))


def _echo(text: str) -> Attack:
    body = {"model": DEMO_MODEL_NAME, "prompt": [text] * 128, "echo": True, "logprobs": 5, "max_tokens": 1}
    return Attack("/v1/completions", json.dumps(body).encode())


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


async def probe(url: str, num: int) -> list[float]:
    """Return the TTFT of interactive chats, sent one after another, milliseconds."""
    found = []
    async with httpx.AsyncClient(base_url=url, timeout=_LIMIT_S) as http:
        for _ in range(_NUM_WARM + num):
            found.append(1000 * await ttft_s(http))
            await asyncio.sleep(_GAP_S)
    return found[_NUM_WARM:]


async def flood(url: str, name: str, pause_s: float) -> None:
    """Send a body again and again from each client until the input ends; then print the answers by status."""
    os.nice(19)
    attack, statuses = attacks()[name], Counter[str]()

    async def send_all(http: httpx.AsyncClient) -> None:
        while True:
            try:
                answer = await http.post(attack.path, content=attack.content, headers=_headers(Band.BATCH))
                statuses[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                statuses[type(error).__name__] += 1
            await asyncio.sleep(pause_s)

    async with httpx.AsyncClient(base_url=url, timeout=_LIMIT_S) as http:
        tasks = [asyncio.create_task(send_all(http)) for _ in range(NUM_CLIENTS)]
        print("sending", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(statuses))


def _client(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.server.intake_floods", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(server: LocalServer, num: int) -> dict[str, Any]:
    """Return the figures of interactive chats."""
    num_lines = len(server.lines)
    found = json.loads(_client("--probe", server.url, "--requests", str(num)).communicate()[0])
    stalls = [line["loop_stall_ms"] for line in server.lines[num_lines:]]
    return {
        "num_requests": len(found),
        "ttft_p50_ms": percentile(found, 50),
        "ttft_p99_ms": percentile(found, 99),
        "loop_stall_p50_ms": percentile(stalls, 50) if stalls else None,
        "loop_stall_max_ms": max(stalls, default=None),
        "load_average": os.getloadavg()[0],
    }


def run_once(server: LocalServer, name: str, num: int, pause_s: float) -> dict[str, Any]:
    """Return the figures of chats alone, and beside one kind of heavy body."""
    alone = measure(server, num)
    attacker = _client("--flood", server.url, "--only", name, "--pause", str(pause_s))
    assert attacker.stdout is not None and attacker.stdout.readline()
    time.sleep(_START_S)
    beside = measure(server, num)
    answers = json.loads(attacker.communicate()[0])
    ratio = beside["ttft_p99_ms"] / alone["ttft_p99_ms"]
    return {"alone": alone, "beside": beside, "answers": answers, "ttft_p99_ratio": ratio}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every kind of heavy body."""
    figures: dict[str, Any] = {}
    with LocalServer() as server:
        for name, attack in attacks().items():
            if options.only not in (None, name):
                continue
            runs = [run_once(server, name, options.requests, options.pause) for _ in range(options.runs)]
            ratio = statistics.median(each["ttft_p99_ratio"] for each in runs)
            figures[name] = {"body_mb": len(attack.content) / 1e6, "ttft_p99_ratio": ratio}
            figures[name] |= {"is_kept": ratio <= MAX_RATIO, "runs": runs}
            print(name, _line(runs), f"ratio {ratio:.2f}", flush=True)
    return figures


def _line(runs: list[dict[str, Any]]) -> str:
    cells = []
    for each in runs:
        alone, beside = each["alone"], each["beside"]
        p50 = f"p50 {alone['ttft_p50_ms']:.0f}>{beside['ttft_p50_ms']:.0f}"
        p99 = f"p99 {alone['ttft_p99_ms']:.0f}>{beside['ttft_p99_ms']:.0f}"
        cells.append(f"{p50} {p99} stall {beside['loop_stall_max_ms']} load {beside['load_average']:.1f}")
    return "; ".join(cells)


def main() -> int:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150, help="interactive requests of each phase")
    parser.add_argument("--pause", type=float, default=0.25, help="seconds between a heavy client's bodies")
    parser.add_argument("--runs", type=int, default=2, help="measurements of each kind")
    parser.add_argument("--only", choices=sorted(attacks()), help="one kind of heavy body")
    parser.add_argument("--label", default="figures", help="name of this run in the file of results")
    for role in ("--probe", "--flood"):
        parser.add_argument(role, metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe is not None:
        print(json.dumps(asyncio.run(probe(options.probe, options.requests))))
        return 0
    if options.flood is not None:
        asyncio.run(flood(options.flood, options.only, options.pause))
        return 0
    figures = run(options)
    path = RESULTS / f"{NAME}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    former = {name: value for name, value in known.items() if name not in ("command", "environment")}
    print(write(NAME, former | {options.label: former.get(options.label, {}) | figures}), file=sys.stderr)
    return 0 if all(each["is_kept"] for each in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
