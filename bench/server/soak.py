"""Memory of an ingress under mixed requests for some minutes: `python -m bench.server.soak --seconds 400`.

The HTTP application and the demo model run in one process, with these clients: short chats, streamed and whole, of
which a third disconnects early; bodies of `--body-mb` now and then, of texts, of messages and of token ids. Every ten
seconds a line has the process's memory and its descriptors, threads and tasks. The slope of memory is fitted to the
lines after `--warm-up` seconds.

`--environment MALLOC_ARENA_MAX=2` sets a variable of the serving process. `--label` names the figures' part of the
file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections import Counter
from typing import Any

import httpx
import numpy as np

from bench.record import RESULTS, write
from bench.server.local_server import KEYS, LocalServer
from replicas.protocol import Band
from serve_app.config import DEMO_MODEL_NAME

NAME = "soak"
_LIMIT_S, _REPORT_S, _NUM_CHATS, _NUM_LARGE = 120.0, 10, 3, 2


def _large_bodies(num_bytes: int) -> list[tuple[str, bytes]]:
    """Return paths and bodies of about so many bytes."""
    message = b'{"role":"user","content":"' + b"a b " * 1000 + b'"},'
    texts = b",".join([b'"' + b"lazy dog " * 120 + b'"'] * (num_bytes // 1100))
    return [
        ("/tokenize", b'{"prompt":"' + b"the quick fox " * (num_bytes // 14) + b'"}'),
        ("/v1/chat/completions", b'{"model":"x","messages":[' + message * (num_bytes // len(message)) + b"1]}"),
        ("/detokenize", b'{"tokens":[' + b"1234," * (num_bytes // 5) + b"1]}"),
        ("/v1/completions", b'{"model":"%s","prompt":[' % DEMO_MODEL_NAME.encode() + texts + b"]}"),
    ]


class Soak:
    """Clients of one server."""

    def __init__(self, url: str, body_mb: float, pause_s: float) -> None:
        self._url = url
        self._pause_s = pause_s
        self._large = _large_bodies(int(body_mb * 1e6))
        self._rng = random.Random(1)
        self.answers: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        """Send requests for so many seconds."""
        async with httpx.AsyncClient(base_url=self._url, timeout=_LIMIT_S) as http:
            clients = [self._chats(http) for _ in range(_NUM_CHATS)] + [self._bodies(http) for _ in range(_NUM_LARGE)]
            tasks = [asyncio.create_task(client) for client in clients]
            _, pending = await asyncio.wait(tasks, timeout=seconds)
            for task in pending:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(outcome, asyncio.CancelledError):
                    raise RuntimeError("a client has ended") from (outcome or None)

    async def _chats(self, http: httpx.AsyncClient) -> None:
        """Send short requests one after another; leave a third of them before their end."""
        headers = {"authorization": f"Bearer {KEYS[Band.INTERACTIVE]}"}
        while True:
            messages = [{"role": "user", "content": f"Tell me about {self._rng.random()}"}]
            body = {
                "model": DEMO_MODEL_NAME,
                "messages": messages,
                "max_tokens": 24,
                "stream": self._rng.random() < 0.7,
            }
            limit_s = self._rng.uniform(0.01, 0.3) if self._rng.random() < 0.33 else _LIMIT_S
            try:
                async with asyncio.timeout(limit_s):
                    answer = await http.post("/v1/chat/completions", json=body, headers=headers)
                self.answers[f"chat {answer.status_code}"] += 1
            except TimeoutError:
                self.answers["chat left"] += 1
            await asyncio.sleep(0.05)

    async def _bodies(self, http: httpx.AsyncClient) -> None:
        """Send large bodies one after another."""
        headers = {"authorization": f"Bearer {KEYS[Band.BATCH]}", "content-type": "application/json"}
        while True:
            path, content = self._rng.choice(self._large)
            answer = await http.post(path, content=content, headers=headers)
            self.answers[f"{path} {answer.status_code}"] += 1
            await asyncio.sleep(self._rng.uniform(0, 2 * self._pause_s))


def slope(lines: list[dict[str, Any]], name: str) -> float:
    """Return the change of a value in a minute, fitted to its reports."""
    times = np.array([line["time_s"] for line in lines]) / 60
    return float(np.polyfit(times - times[0], [line[name] for line in lines], 1)[0])


async def _report(server: LocalServer) -> None:
    while True:
        await asyncio.sleep(_REPORT_S)
        print(json.dumps(server.lines[-1]), flush=True)


async def soak(server: LocalServer, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one run."""
    clients = Soak(server.url, options.body_mb, options.pause)
    reporting = asyncio.create_task(_report(server))
    await clients.run(options.seconds)
    reporting.cancel()
    begin_s = server.lines[0]["time_s"] + options.warm_up
    lines = [line for line in server.lines if line["time_s"] >= begin_s]
    names = ("rss_mb", "heap_used_mb", "heap_free_mb", "mapped_mb", "python_blocks", "descriptors", "threads", "tasks")
    return {
        "seconds": options.seconds,
        "environment_of_server": options.environment,
        "first": server.lines[0],
        "max_rss_mb": max(line["rss_mb"] for line in server.lines),
        "last": server.lines[-1],
        "per_minute": {name: round(slope(lines, name), 2) for name in names},
        "answers": dict(clients.answers),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--warm-up", type=float, default=60.0, help="seconds before the slope is fitted")
    parser.add_argument("--body-mb", type=float, default=8.0, help="size of a large body")
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between a client's large bodies")
    parser.add_argument("--environment", action="append", default=[], help="NAME=VALUE for the serving process")
    parser.add_argument("--label", default="figures", help="name of this run in the file of results")
    options = parser.parse_args()
    environment = dict(entry.split("=", 1) for entry in options.environment)
    with LocalServer(environment) as server:
        figures = asyncio.run(soak(server, options))
    print(json.dumps(figures, indent=2))
    path = RESULTS / f"{NAME}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    former = {name: value for name, value in known.items() if name not in ("command", "environment")}
    print(write(NAME, former | {options.label: figures}), file=sys.stderr)


if __name__ == "__main__":
    main()
