"""Validity of structured outputs: `python -m bench.structured.structured_outputs [--schemas 1000]`.

Schemas by hand and random ones, of which a part has seeds that are drawn anew in each run, are each sent once to the
bundled demo model at temperature 1.5, half of them with `strict`. A document that ends must validate with jsonschema
against the schema less the keywords that the answer's header names. A schema may also be refused with a 400 that names
one of its keywords. The program fails if anything else happens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import torch

from bench.record import write
from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions
from serve_app.http_app import IngressSettings
from testkit.http.local_service import local_service
from testkit.json_schemas import BY_HAND, Schema, fault_of, random_schema, without

DEMO = Path(__file__).resolve().parents[2] / "replicas" / "demo"
MODEL = "demo"
_MAX_TOKENS = 200
_NUM_AT_ONCE = 24
_LIMIT_S = 300.0


@dataclass(slots=True)
class Verdicts:
    """Counts of a run's answers, and what should not have happened."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Refusals by the keyword or reason that they name."""
    not_enforced: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, Any]] = field(default_factory=list)

    def judge(self, case: Case, answer: httpx.Response) -> None:
        """Count an answer."""
        if answer.status_code == 400:
            message = answer.json()["error"]["message"]
            reason = reason_of(message, case.schema)
            self.counts["refused"] += 1
            self.refused[reason or message] += 1
            if reason is None:
                self.faults.append({"schema": case.schema, "fault": message})
            return
        fault = self._fault(case, answer)
        if fault is not None:
            self.counts["wrong"] += 1
            self.faults.append({"schema": case.schema, "seed": case.seed, "fault": fault})

    def _fault(self, case: Case, answer: httpx.Response) -> str | None:
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text[:300]}"
        (choice,) = answer.json()["choices"]
        pointers = [unquote(each) for each in answer.headers.get("x-headway-not-enforced", "").split(", ") if each]
        self.not_enforced.update(pointer.rsplit("/", 1)[1] for pointer in pointers)
        if pointers and case.is_strict:
            return f"strict, but {pointers} are not enforced"
        if choice["finish_reason"] == "length":
            self.counts["cut by length"] += 1
            return None
        fault = fault_of(choice["text"], without(case.schema, pointers))
        self.counts["valid"] += fault is None
        return None if fault is None else f"{fault}: {choice['text']!r}"


@dataclass(frozen=True, slots=True)
class Case:
    """Schema of one request."""

    schema: Schema
    seed: int
    is_strict: bool

    def body(self) -> dict[str, Any]:
        """Return the request."""
        wanted = {"name": "case", "schema": self.schema, "strict": self.is_strict}
        return {
            "model": MODEL, "prompt": "def main():\n    return ", "max_tokens": _MAX_TOKENS, "temperature": 1.5,
            "seed": self.seed, "response_format": {"type": "json_schema", "json_schema": wanted},
        }  # fmt: skip


def reason_of(message: str, schema: Schema) -> str | None:
    """Return the keyword that a refusal names, or `unsatisfiable`; None: it names no reason."""
    pointers = re.findall(r"`(/[^`]*)`", message)
    if pointers:
        return str(pointers[0].rsplit("/", 1)[1])
    if "Unsatisfiable" in message or "no output meets it" in message:
        return "unsatisfiable"
    named = [word for word in re.findall(r"[$A-Za-z]+", message.partition(" ")[2]) if word in _keywords(schema)]
    named += [word for word in ("numbers", "properties", "expressions") if word in message]
    return named[-1] if named else None


def _keywords(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        return set(schema).union(*map(_keywords, schema.values()))
    return set().union(*map(_keywords, schema)) if isinstance(schema, list) else set()


def cases(number: int, held_out_seed: int | None) -> list[Case]:
    """Return the cases: those by hand, and random ones, a fifth of them from `held_out_seed`."""
    fixed, held_out = random.Random(7), random.Random(held_out_seed)
    made = [Case(schema, index, False) for index, schema in enumerate(BY_HAND[:number])]
    for index in range(len(made), number):
        rng = held_out if held_out_seed is not None and index % 5 == 0 else fixed
        made.append(Case(random_schema(rng), rng.getrandbits(31), rng.random() < 0.5))
    return made


async def judged(made: list[Case]) -> Verdicts:
    """Send the cases to the demo model, several at once, and judge the answers."""
    options = ReplicaOptions(
        ModelOptions(str(DEMO), num_threads=1), RunnerOptions(kv_cache_bytes=2**26), EngineLimits(max_num_seqs=24)
    )
    settings = IngressSettings(model=str(DEMO), served_model_name=MODEL)
    verdicts, slots = Verdicts(), asyncio.Semaphore(_NUM_AT_ONCE)

    async def ask(http: httpx.AsyncClient, case: Case) -> None:
        async with slots:
            verdicts.judge(case, await http.post("/v1/completions", json=case.body()))

    async with (
        local_service(options, settings) as local,
        httpx.AsyncClient(base_url=local.url, timeout=_LIMIT_S) as http,
        asyncio.TaskGroup() as group,
    ):
        for case in made:
            group.create_task(ask(http, case))
    return verdicts


def main() -> int:
    """Ask, judge, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--held-out-seed", type=int, help="seed of a fifth of the schemas; none: a new one")
    parser.add_argument("--name", default="structured_outputs", help="name of the result in bench/results")
    arguments = parser.parse_args()
    seed = random.SystemRandom().getrandbits(31) if arguments.held_out_seed is None else arguments.held_out_seed
    torch.set_num_threads(1)
    verdicts = asyncio.run(judged(cases(arguments.schemas, seed)))
    print(dict(verdicts.counts), dict(verdicts.refused), dict(verdicts.not_enforced), sep="\n")
    for fault in verdicts.faults:
        print(fault)
    figures = {
        "schemas": arguments.schemas, "held_out_seed": seed, "counts": verdicts.counts, "refused": verdicts.refused,
        "not_enforced": verdicts.not_enforced, "faults": verdicts.faults,
    }  # fmt: skip
    print(write(arguments.name, figures))
    return 1 if verdicts.faults else 0


if __name__ == "__main__":
    sys.exit(main())
