"""Structured outputs of Headway and of a peer: `python -m bench.peers.structured --model DIR --serve "COMMAND"`.

One client sends the same requests to both servers, one server after the other. `--serve` starts the peer on port 18080
with the model's name `peer`. Of each server:

1. Verdicts on random schemas: a finished document meets the whole schema, or breaks it; it is cut by length; the schema
   is refused with a 400; anything else is an error.
2. Output tokens a second of requests under an endless grammar, over those of the same requests without one, by turns.
   Tokens are drawn from the whole distribution: a model's default top-p or penalty would cost time of its own.
3. Processor time of a schema that the server meets for the first time, beyond that of a schema that it knows.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from bench.peers import headway_service, http_server
from bench.peers.http_server import HttpEngine
from bench.record import write
from testkit.json_schemas import BY_HAND, Schema, fault_of, random_schema

_MODEL = "peer"
_NUM_AT_ONCE = 16
_LIMIT_S = 600.0
_ENDLESS: Schema = {
    "type": "array",
    "minItems": 5000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["a", "b", "c"]}},
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of the experiment."""

    schemas: tuple[Schema, ...]
    num_tokens: int
    """Output tokens of a request whose speed is measured."""
    num_new: int
    """Schemas whose first use is measured."""
    rounds: int


class Client:
    """Client of one server."""

    def __init__(self, engine: HttpEngine, http: httpx.AsyncClient) -> None:
        self._engine = engine
        self._http = http
        self._slots = asyncio.Semaphore(_NUM_AT_ONCE)

    async def measure(self, requests: Requests) -> dict[str, Any]:
        """Return the figures of the server."""
        await self._throughput(requests, None)  # Warms up.
        verdicts = Counter(await asyncio.gather(*map(self._verdict, requests.schemas)))
        ratios, plain = [], []
        for _ in range(requests.rounds):
            without = await self._throughput(requests, None)
            ratios.append(await self._throughput(requests, _ENDLESS) / without)
            plain.append(without)
        return {
            "verdicts": verdicts,
            "tokens_per_s": plain,
            "with_over_without": ratios,
            "new_schema_cpu_ms": 1e3 * await self._first_use_s(requests.num_new),
        }

    async def _ask(self, schema: Schema | None, **fields: Any) -> httpx.Response:
        body: dict[str, Any] = {"model": _MODEL, "messages": [{"role": "user", "content": "Describe a person."}]}
        if schema is not None:
            wanted = {"name": "case", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        path = f"{self._engine.server.address.rpartition('/v1/')[0]}/v1/chat/completions"
        async with self._slots:
            return await self._http.post(path, json=body | fields)

    async def _verdict(self, schema: Schema) -> str:
        try:
            answer = await self._ask(schema, max_tokens=200, temperature=1.0, seed=1)
        except httpx.TransportError as error:
            return type(error).__name__
        if answer.status_code != 200:
            return "refused" if answer.status_code == 400 else f"status {answer.status_code}"
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] == "length":
            return "cut by length"
        return "valid" if fault_of(choice["message"]["content"] or "", schema) is None else "invalid"

    async def _throughput(self, requests: Requests, schema: Schema | None) -> float:
        """Return the output tokens a second of two full batches."""
        count = requests.num_tokens
        sampling = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
        fields = sampling | {"max_tokens": count, "ignore_eos": True}
        begun_s = time.perf_counter()
        answers = await asyncio.gather(*(self._ask(schema, seed=seed, **fields) for seed in range(2 * _NUM_AT_ONCE)))
        wall_s = time.perf_counter() - begun_s
        num_tokens: int = sum(answer.raise_for_status().json()["usage"]["completion_tokens"] for answer in answers)
        return num_tokens / wall_s

    async def _first_use_s(self, count: int) -> float:
        """Return the mean of the processor seconds that the first use of a schema takes beyond the second."""
        rng = random.Random(11)
        differences_s = []
        for number in range(count):
            schema = _ordinary(rng, number)
            first_s = await self._processor_s(schema)
            differences_s.append(first_s - await self._processor_s(schema))
        return statistics.mean(differences_s)  # The kernel counts in hundredths of a second: a median would be coarse.

    async def _processor_s(self, schema: Schema) -> float:
        begun_s = _processor_s(self._engine.pids())
        (await self._ask(schema, max_tokens=1, temperature=0)).raise_for_status()
        return _processor_s(self._engine.pids()) - begun_s


def _processor_s(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total


def _ordinary(rng: random.Random, number: int) -> Schema:
    """Return an object of 10 to 50 properties of plain types."""
    kinds: tuple[Schema, ...] = (
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "string"}},
    )
    names = [f"field_{number}_{index}" for index in range(rng.randint(10, 50))]
    properties = {name: rng.choice(kinds) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


async def _measured(engine: HttpEngine, requests: Requests) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=_LIMIT_S, limits=httpx.Limits(max_connections=_NUM_AT_ONCE)) as http:
        return await Client(engine, http).measure(requests)


def _table(figures: dict[str, dict[str, Any]]) -> Table:
    table = Table("server", "verdicts", "tokens/s without", "with / without", "CPU ms of a new schema")
    for name, each in figures.items():
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(each["verdicts"].items()))
        numbers = (each["tokens_per_s"], "{:.0f}"), (each["with_over_without"], "{:.2f}")
        medians = [form.format(statistics.median(values)) for values, form in numbers]
        table.add_row(name, verdicts, *medians, f"{each['new_schema_cpu_ms']:.1f}")
    return table


def main() -> None:
    """Measure both servers, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    http_server.add_arguments(parser)
    headway_service.add_arguments(parser)
    parser.set_defaults(served=_MODEL, dtype="bf16", threads=2, conc=_NUM_AT_ONCE, batches="1")
    parser.add_argument("--model", required=True, help="directory of a checkpoint with a chat template")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--new", type=int, default=60, help="schemas whose first use is measured")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rng = random.Random(5)
    schemas = [*BY_HAND, *(random_schema(rng) for _ in range(arguments.schemas))][: arguments.schemas]
    requests = Requests(tuple(schemas), arguments.num_tokens, arguments.new, arguments.rounds)
    figures: dict[str, dict[str, Any]] = {}
    for name, start in (("headway", headway_service.start), ("peer", http_server.start)):
        engine = start(arguments)
        try:
            figures[name] = asyncio.run(_measured(engine, requests))
        finally:
            engine.close()
        print(name, figures[name], flush=True)
        print(write("peers_structured", {"peer_command": arguments.serve, "servers": figures}))
    Console(width=180).print(_table(figures))


if __name__ == "__main__":
    main()
