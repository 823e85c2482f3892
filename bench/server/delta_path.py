"""CPU time of one ingress per delta of its streams: `python -m bench.server.delta_path`.

The real HTTP application and router, in one process, over a replica that gives each stream one delta per step and
computes nothing. The streams are driven like in an ASGI server, without sockets. A bare floor runs in turn with it: as
many coroutines that wait for the same steps and send bytes of the same length. The cost above the floor is the path of
a delta: client adapter, dispatcher, load table, reply format, JSON, middleware.

`python -m bench.server.delta_path --served [--against CHECKOUT]` serves the application on Ray over an engine that
takes a GPU's time and computes nothing, here and from another checkout by turns. It prints the processor time per token
of the ingress, the proxy (Serve's and HAProxy), and the replica without its engine's thread.

`python -m bench.server.delta_path --served 800 --throughput --ingresses 1 2 --deltas 100 num_replicas=4
cpus_per_replica=0.01 max_num_seqs=200 step_times=slow-gpu-70b` serves one ingress and two by turns. Every stream must
have the same text from both. Where the ingresses are the limit, two of them on cores of their own are faster by
`speed_up`: twice the processor time of a token with one, over that with two.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import re
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

from bench.record import write
from bench.serving import TIMED, serving
from bench.timed_app import ENGINE_THREAD
from replicas.protocol import (
    EngineMetrics,
    FinishReason,
    GenerateRequest,
    IngressShare,
    ModelCard,
    ReplicaStats,
    TokenDelta,
    Usage,
)
from serve_app.config import HeadwayConfig
from serve_app.http_app import Backends, IngressSettings, create_api
from serve_app.monitoring.http import HttpMetrics
from testkit.http.local_service import LocalRouting
from testkit.serving.served import Served

_MODEL = "demo"
_TEXT = " word"


class Steps:
    """Steps of an engine: each step wakes all waiting streams."""

    def __init__(self) -> None:
        self._next = asyncio.get_running_loop().create_future()

    async def wait(self) -> None:
        """Wait for the next step."""
        await self._next

    def step(self) -> None:
        """Wake all waiting streams."""
        done, self._next = self._next, asyncio.get_running_loop().create_future()
        done.set_result(None)


@dataclass(frozen=True, slots=True)
class ScriptedReplica:
    """Replica in this process that gives every stream one delta per step; see `router.types.ReplicaClient`."""

    steps: Steps
    num_streams: int
    num_deltas: int

    async def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """Yield `num_deltas` deltas: the first at once, each other one with a step."""
        for start in range(self.num_deltas):
            if start:
                await self.steps.wait()
            reason = FinishReason.LENGTH if start == self.num_deltas - 1 else None
            usage = Usage(len(request.prompt_token_ids), start + 1, 0)
            yield TokenDelta(
                request.request_id, start, (7,), _TEXT, usage, finish_reason=reason, stats=self._stats(start)
            )

    async def poll_stats(self) -> list[ReplicaStats]:
        """Return the report of the one replica."""
        return [self._stats(0)]

    async def poll_metrics(self) -> list[EngineMetrics]:
        """Return no metrics."""
        return []

    async def drain(self, replica_id: str) -> bool:
        return False

    async def describe(self) -> ModelCard:
        """Return a card with limits that admit every request."""
        return ModelCard(_MODEL, 4096, 2**31, 16, 10**6, 1.0, self.num_streams, "none", "scripted")

    def _stats(self, num_steps: int) -> ReplicaStats:
        return ReplicaStats(
            replica_id="replica",
            node_id="node",
            pid=1,
            taken_unix_s=float(num_steps),
            num_slots=2 * self.num_streams,  # so many that no request waits, even with slots kept for other ingresses
            num_blocks=10**6,
            num_free_blocks=10**6,
            num_running_by_band=(0, self.num_streams, 0),
            num_waiting_by_band=(0, 0, 0),
            waiting_tokens=0,
            generated_tokens_per_s=0.0,
            is_draining=False,
            outstanding_tokens=1000,
            by_ingress=(IngressShare("", (0, self.num_streams, 0), 1000),),
            block_size=16,
        )


@dataclass(slots=True)
class Client:
    """Client side of an ASGI exchange: it sends a request and counts the parts of the answer."""

    body: bytes
    has_sent: bool = False
    num_parts: int = 0
    num_bytes: int = 0
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> dict[str, Any]:
        """Return the body; wait for ever on later calls."""
        if self.has_sent:
            await asyncio.Event().wait()
        self.has_sent = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: Any) -> None:
        """Count a part of the answer."""
        if message["type"] == "http.response.body" and message["body"]:
            self.num_parts += 1
            self.num_bytes += len(message["body"])
            self.has_begun.set()


@dataclass(frozen=True)
class Turn:
    """Cost of a run of steps of all streams."""

    deltas_per_s: float
    cpu_us_per_delta: float


Serve = Callable[[Client], Coroutine[None, None, None]]


async def timed(serve: Serve, steps: Steps, num_streams: int, num_deltas: int, body: bytes) -> tuple[Turn, Client]:
    """Time the steps from the first delta of the last stream until every stream has ended."""
    clients = [Client(body) for _ in range(num_streams)]
    running = [asyncio.create_task(serve(client)) for client in clients]
    await asyncio.gather(*(client.has_begun.wait() for client in clients))
    started_s, cpu_s = time.perf_counter(), time.process_time()
    while not all(task.done() for task in running):
        seen = sum(client.num_parts for client in clients)
        steps.step()
        for _ in range(100):
            await asyncio.sleep(0)
            if sum(client.num_parts for client in clients) - seen >= num_streams:
                break
    cpu_s, took_s = time.process_time() - cpu_s, time.perf_counter() - started_s
    assert all(client.num_parts >= num_deltas for client in clients), "a stream is not whole"
    count = num_streams * (num_deltas - 1)
    return Turn(count / took_s, cpu_s / count * 1e6), clients[0]


def ingress(steps: Steps, num_streams: int, num_deltas: int) -> Serve:
    """Return the application over the scripted replica."""
    metrics = HttpMetrics(_MODEL)
    dispatcher = LocalRouting(ScriptedReplica(steps, num_streams, num_deltas), metrics).dispatcher
    settings = IngressSettings(model=HeadwayConfig(model="headway-demo").model_path, served_model_name=_MODEL)
    app = create_api(settings, Backends(dispatcher), metrics=metrics)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }

    async def serve(client: Client) -> None:
        await app(dict(scope), client.receive, client.send)

    return serve


def floor(steps: Steps, num_deltas: int, part: bytes) -> Serve:
    """Return coroutines that wait for the same steps and send parts of the same length."""

    async def serve(client: Client) -> None:
        for start in range(num_deltas):
            if start:
                await steps.wait()
            await client.send({"type": "http.response.body", "body": part, "more_body": True})

    return serve


async def measure(num_streams: int, num_deltas: int, num_turns: int) -> dict[str, Any]:
    """Run application and floor in turn."""
    chat = {"model": _MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
    body = json.dumps({**chat, "max_tokens": num_deltas}).encode()
    of_ingress, of_floor, num_bytes = [], [], 100
    for _ in range(num_turns):
        steps = Steps()
        turn, client = await timed(ingress(steps, num_streams, num_deltas), steps, num_streams, num_deltas, body)
        of_ingress.append(turn)
        num_bytes = client.num_bytes // client.num_parts
        steps = Steps()
        bare, _ = await timed(floor(steps, num_deltas, b"x" * num_bytes), steps, num_streams, num_deltas, body)
        of_floor.append(bare)
    return {
        "num_streams": num_streams,
        "bytes_per_delta": num_bytes,
        "ingress": _median(of_ingress),
        "floor": _median(of_floor),
        "turns": {"ingress": [asdict(turn) for turn in of_ingress], "floor": [asdict(turn) for turn in of_floor]},
    }


def _median(turns: list[Turn]) -> dict[str, float]:
    return {
        "deltas_per_s": round(median(turn.deltas_per_s for turn in turns), 1),
        "cpu_us_per_delta": round(median(turn.cpu_us_per_delta for turn in turns), 2),
    }


@dataclass(frozen=True)
class Shares:
    """Processor time of each part, microseconds per token, over one load."""

    ingress: float
    proxy: float
    replica_outside_engine: float
    engine_thread: float
    rest_of_ray: float
    token_path: float
    """Sum of the first three."""
    tokens_per_s: float
    chunks_per_token: float


_PARTS = {
    re.compile(r"ray::ServeReplica:\w+:Ingress"): "ingress",
    re.compile(r"ray::ProxyActor|\S*/haproxy$"): "proxy",
    re.compile(r"ray::ServeReplica:\w+:Model"): "replica",
}
"""Parts by the beginnings of their processes' names; the application has another name in an old checkout."""


@dataclass(frozen=True)
class Variant:
    """Application to serve by turns with others."""

    checkout: str | None = None
    """Directory of its code; None: this code."""
    num_ingresses: int = 1


async def load(url: str, num_streams: int, num_tokens: int) -> tuple[int, str]:
    """Read `num_streams` streams at once; return the number of their chunks, and a digest of the texts."""
    fields = {"model": _MODEL, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=2**18) as session:

        async def read(number: int) -> tuple[int, str]:
            async with session.post(f"{url}/v1/completions", json={**fields, "prompt": f"stream {number}"}) as response:
                body = await response.read()
            assert response.status == 200 and body.endswith(b"data: [DONE]\n\n"), body[-300:]
            events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
            return len(events), "".join(choice["text"] for event in events for choice in event["choices"])

        answers = await asyncio.gather(*map(read, range(num_streams)))
    digest = hashlib.sha256(json.dumps([text for _, text in answers]).encode()).hexdigest()
    return sum(num_chunks for num_chunks, _ in answers), digest


def cpu_seconds(served: Served) -> dict[str, float]:
    """Return the processor time of each part so far."""
    found = dict.fromkeys((*_PARTS.values(), "engine", "rest"), 0.0)
    for process in served.descendants():
        with contextlib.suppress(psutil.Error, IndexError):
            times, command = process.cpu_times(), process.cmdline()[0]
            part = next((part for name, part in _PARTS.items() if name.match(command)), "rest")
            found[part] += times.user + times.system
            if part == "replica":
                of_engine = _engine_thread_s(process)
                found["replica"] -= of_engine
                found["engine"] += of_engine
    return found


def _engine_thread_s(process: psutil.Process) -> float:
    for thread in process.threads():
        if Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text().strip() == ENGINE_THREAD:
            return float(thread.user_time + thread.system_time)
    return 0.0


def served_turn(options: argparse.Namespace, variant: Variant, arguments: dict[str, str]) -> tuple[Shares, str]:
    """Serve one application and put the load on it; return the processor time per token, and the texts' digest."""
    num_streams, num_tokens = options.served, options.deltas
    fields = {"served_model_name": _MODEL, "max_num_seqs": num_streams, **arguments}
    if variant.num_ingresses > 1:
        fields["num_ingress_replicas"] = variant.num_ingresses
    with serving(TIMED, fields, options.throughput, variant.checkout) as served:
        asyncio.run(load(served.url, num_streams, 8))
        before, started_s = cpu_seconds(served), time.perf_counter()
        num_chunks, digest = asyncio.run(load(served.url, num_streams, num_tokens))
        took_s, after = time.perf_counter() - started_s, cpu_seconds(served)
    count = num_streams * num_tokens
    spent = {part: (after[part] - before[part]) / count * 1e6 for part in after}
    shares = Shares(
        ingress=round(spent["ingress"], 1),
        proxy=round(spent["proxy"], 1),
        replica_outside_engine=round(spent["replica"], 1),
        engine_thread=round(spent["engine"], 1),
        rest_of_ray=round(spent["rest"], 1),
        token_path=round(spent["ingress"] + spent["proxy"] + spent["replica"], 1),
        tokens_per_s=round(count / took_s, 1),
        chunks_per_token=round(num_chunks / count, 3),
    )
    return shares, digest


def measure_served(options: argparse.Namespace) -> None:
    """Serve the variants by turns, print the processor time per token, and write it."""
    if len(options.ingresses) > 1:
        variants = {f"ingresses_{number}": Variant(num_ingresses=number) for number in options.ingresses}
    else:
        variants = {"before": Variant(options.against)} if options.against else {}
        variants["after"] = Variant(num_ingresses=options.ingresses[0])
    arguments = dict(each.split("=", 1) for each in options.arguments)
    turns: dict[str, list[Shares]] = {name: [] for name in variants}
    texts: dict[str | None, str] = {}
    for _ in range(options.turns):
        for name, variant in variants.items():
            shares, digest = served_turn(options, variant, arguments)
            turns[name].append(shares)
            # The timed replicas of another checkout may draw other tokens.
            assert texts.setdefault(variant.checkout, digest) == digest, "the texts differ"
            print(name, shares, file=sys.stderr)
    medians = {
        name: {part.name: round(median(getattr(turn, part.name) for turn in taken), 2) for part in fields_of(Shares)}
        for name, taken in turns.items()
    }
    figures: dict[str, Any] = {
        "num_streams": options.served,
        "is_throughput_profile": options.throughput,
        "tokens_per_stream": options.deltas,
        "arguments": arguments,
        "medians": medians,
    }
    name = "token_path_throughput" if options.throughput else "token_path"
    if len(options.ingresses) > 1:
        name = "token_path_ingresses"
        least, most = min(options.ingresses), max(options.ingresses)
        of_least, of_most = (medians[f"ingresses_{number}"]["ingress"] for number in (least, most))
        figures["speed_up"] = round(most / least * of_least / of_most, 2)
    print(json.dumps(figures, indent=1))
    if options.out is None:
        write(name, {**figures, "turns": {name: [asdict(turn) for turn in taken] for name, taken in turns.items()}})


def main() -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--deltas", type=int, default=300, help="deltas of each stream")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a file for the figures alone, instead of a result")
    parser.add_argument("--served", type=int, metavar="STREAMS", help="serve on Ray, with so many streams")
    parser.add_argument("--throughput", action="store_true", help="HAProxy in front and Serve's throughput flags")
    parser.add_argument("--against", help="directory of another checkout, served by turns with this one")
    parser.add_argument("--ingresses", type=int, nargs="+", default=[1], help="numbers of ingresses, served by turns")
    parser.add_argument("arguments", nargs="*", metavar="key=value", help="fields of `bench.timed_app`'s configuration")
    options = parser.parse_args()
    if options.against and len(options.ingresses) > 1:
        parser.error("--against compares checkouts, and --ingresses numbers of ingresses: give one of them")
    if options.served:
        measure_served(options)
        return
    logging.disable(logging.INFO)
    rows = [asyncio.run(measure(count, options.deltas, options.turns)) for count in options.streams]
    for row in rows:
        print({key: value for key, value in row.items() if key != "turns"}, file=sys.stderr)
    figures = {"deltas_per_stream": options.deltas, "rows": rows}
    if options.out is None:
        write("delta_path", figures)
    else:
        options.out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
