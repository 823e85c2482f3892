"""Structured outputs of killed replicas: `python -m bench.structured.structured_failover [--quick]`.

The demo model in float32 on two replicas. 24 streams at temperature 0.9 with seeds, half of them documents of a JSON
Schema, half required tool calls, are served twice: undisturbed, and with a replica killed by SIGKILL while each of its
streams is in mid-document. Then a batch of 300 structured lines with five such kills.

The bars: all streams complete, valid, and equal to the undisturbed ones; each line of the batch once, and valid.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.jobs.client import BatchClient, is_final, num_done
from bench.routing.report import Bar, Options, read_options, report
from serve_app.cli.clients.events import StreamCut, aread_events
from serve_app.config import DEMO_MODEL_NAME
from testkit.free_port import free_port
from testkit.json_schemas import fault_of
from testkit.serving.served import Served, serving, wait_for

_SETTINGS = {
    "num_replicas": 2, "dtype": "float32", "device": "cpu", "num_threads": 1, "cpus_per_replica": 0.5,
    "max_num_seqs": 12, "load_poll_period_s": 0.2,
}  # fmt: skip
_NUM_STREAMS = 24
_MIN_CHARACTERS = 60
_MIN_RUNNING = 4
_LIMIT_S = 600.0


def schema_of(number: int) -> dict[str, Any]:
    """Return a schema that no other number has, whose documents have some hundred tokens."""
    item = {
        "type": "object",
        "properties": {f"name_{number}": {"type": "string", "minLength": 40, "maxLength": 60},
                       "count": {"type": "integer", "minimum": 0, "maximum": 99},
                       "kind": {"enum": ["a", "b", f"kind {number}"]}},
        "required": [f"name_{number}", "count", "kind"],
        "additionalProperties": False,
    }  # fmt: skip
    items = {"type": "array", "items": item, "minItems": 5, "maxItems": 5}
    return {"type": "object", "properties": {"items": items}, "required": ["items"], "additionalProperties": False}


def body_of(number: int) -> dict[str, Any]:
    """Return the request of a stream: a document, or a call of a tool."""
    body: dict[str, Any] = {
        "model": DEMO_MODEL_NAME, "messages": [{"role": "user", "content": f"Describe number {number}."}],
        "max_tokens": 1200, "temperature": 0.9, "seed": number, "stream": True,
    }  # fmt: skip
    schema = schema_of(number)
    if number % 2:
        tool = {"type": "function", "function": {"name": f"tool_{number}", "parameters": schema, "strict": True}}
        return body | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    wanted = {"name": "case", "schema": schema, "strict": True}
    return body | {"response_format": {"type": "json_schema", "json_schema": wanted}}


@dataclass(slots=True)
class Answer:
    """Stream as a client sees it."""

    number: int
    replica_id: str | None = None
    text: str = ""
    """Document, or arguments of the call."""
    finish_reason: str | None = None
    error: str | None = None
    has_text: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, chunk: dict[str, Any]) -> None:
        """Add a chunk."""
        if "error" in chunk:
            self.error = json.dumps(chunk["error"])
            return
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self.text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                self.text += call["function"].get("arguments", "")
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if len(self.text) > _MIN_CHARACTERS or self.finish_reason is not None:
            self.has_text.set()

    @property
    def fault(self) -> str | None:
        """Reason why the stream is not as it should be; None: it is."""
        expected = "tool_calls" if self.number % 2 else "stop"
        if self.error is not None or self.finish_reason != expected:
            return self.error or f"finish_reason {self.finish_reason}: {self.text[-80:]}"
        return fault_of(self.text, schema_of(self.number))


async def read(http: httpx.AsyncClient, answer: Answer) -> None:
    """Read a stream to its end."""
    async with http.stream("POST", "/v1/chat/completions", json=body_of(answer.number)) as response:
        answer.replica_id = response.headers.get("x-model-replica")
        if response.status_code != 200:
            answer.error = f"{response.status_code} {(await response.aread())[:300]!r}"
            return
        with suppress(StreamCut):  # The finish reason tells.
            async for chunk in aread_events(response):
                answer.take(chunk)


async def all_streams(served: Served, *, kills: bool, num_streams: int = _NUM_STREAMS) -> tuple[list[Answer], int]:
    """Return the streams' answers, and how many were in mid-document when their replica was killed."""
    answers = [Answer(number) for number in range(num_streams)]
    async with httpx.AsyncClient(base_url=served.url, timeout=_LIMIT_S) as http, asyncio.TaskGroup() as group:
        for answer in answers:
            group.create_task(read(http, answer))
        num_hit = 0
        if kills:
            await until_in_mid_document(answers)
            open_before = [answer for answer in answers if answer.finish_reason is None]
            victim = await asyncio.to_thread(kill_busiest, served)
            num_hit = sum(answer.replica_id in (victim, None) for answer in open_before)
    return answers, num_hit


async def until_in_mid_document(answers: Sequence[Answer]) -> None:
    """Return when every stream has some text."""
    for answer in answers:
        async with asyncio.timeout(_LIMIT_S):
            await answer.has_text.wait()


def kill_busiest(served: Served) -> str:
    """Kill the replica with the most running sequences; return its id.

    A request that has lost two replicas runs alone on its third, and fails if it loses that one, too.
    """
    own_pids = {process.pid for process in served.descendants()}
    victims = [replica for replica in served.replicas() if replica["pid"] in own_pids]
    victim = max(victims, key=lambda replica: replica["num_running"])
    os.kill(victim["pid"], signal.SIGKILL)
    return str(victim["replica_id"])


def batch(served: Served, home: Path, num_lines: int, num_kills: int) -> tuple[Counter[str], list[str], int]:
    """Run a batch with kills; return the lines' counts by `custom_id`, what is wrong with them, and the kills."""
    path = home / "lines.jsonl"
    with path.open("w") as file:
        for number in range(num_lines):
            wanted = {"name": "case", "schema": schema_of(number), "strict": True}
            body = {"model": DEMO_MODEL_NAME, "prompt": f"{number} = ", "max_tokens": 1200, "temperature": 0.9,
                    "seed": number, "response_format": {"type": "json_schema", "json_schema": wanted}}  # fmt: skip
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    client = BatchClient(served.url)
    batch_id = client.create(client.upload(path))
    kills, ends_s = 0, time.monotonic() + 2 * _LIMIT_S
    while not is_final(found := client.get(batch_id)) and time.monotonic() < ends_s:
        is_due = kills < num_kills and num_done(found) >= (kills + 0.3) * num_lines / (num_kills + 2)
        running = [replica["num_running"] for replica in served.replicas()] if is_due else []
        if len(running) == 2 and max(running) >= _MIN_RUNNING:
            kill_busiest(served)
            kills += 1
        time.sleep(0.1)
    files = [found[name] for name in ("output_file_id", "error_file_id") if found[name] is not None]
    lines = [line for file_id in files for line in client.results(file_id)]
    wrong = [fault for line in lines if (fault := line_fault(line)) is not None]
    return Counter(line["custom_id"] for line in lines), wrong, kills


def line_fault(line: dict[str, Any]) -> str | None:
    """Return what is wrong with a line of the output; None: nothing is."""
    if line["error"] is not None or line["response"]["status_code"] != 200:
        return json.dumps(line)[:300]
    (choice,) = line["response"]["body"]["choices"]
    if choice["finish_reason"] != "stop":
        return f"{line['custom_id']}: {choice['finish_reason']}"
    return fault_of(choice["text"], schema_of(int(line["custom_id"])))


def main() -> int:
    """Serve, kill, compare."""
    options: Options = read_options(__doc__)
    num_lines, num_kills = (60, 1) if options.is_quick else (300, 5)
    arguments = " ".join(f"{name}={value}" for name, value in {**_SETTINGS, **options.settings}.items())
    with tempfile.TemporaryDirectory(prefix="hw-so-") as home:
        variables = (f"MODEL={DEMO_MODEL_NAME}", f"ARGS={arguments} data_dir={home}/data")
        with serving(Path(home), *variables, port=free_port("127.0.0.1")) as served:
            wait_for(lambda: len(served.replicas()) == 2, "two replicas serve", _LIMIT_S)
            calm, _ = asyncio.run(all_streams(served, kills=False))
            stormy, num_hit = asyncio.run(all_streams(served, kills=True))
            counts, wrong, kills = batch(served, Path(home), num_lines, num_kills)
    bars = [
        *judge(calm, stormy, num_hit),
        Bar("kills during the batch", kills, num_kills, True),
        Bar("lines not exactly once", num_lines - sum(count == 1 for count in counts.values()), 0),
        Bar("lines that are not valid", len(wrong), 0),
    ]
    return report("failover", options, bars, {"wrong_lines": wrong, "streams_hit": num_hit}, [], "structured")


def judge(calm: Sequence[Answer], stormy: Sequence[Answer], num_hit: int) -> list[Bar]:
    """Return the bars of the streams."""
    for answer in (*calm, *stormy):
        if answer.fault is not None:
            print(answer.number, answer.fault)
    different = [one.number for one, other in zip(calm, stormy, strict=True) if one.text != other.text]
    return [
        Bar("streams in mid-document on the killed replica", num_hit, 1, True),
        Bar("undisturbed streams that are not complete and valid", sum(one.fault is not None for one in calm), 0),
        Bar("disturbed streams that are not complete and valid", sum(one.fault is not None for one in stormy), 0),
        Bar("outputs that differ", len(different), 0),
    ]


if __name__ == "__main__":
    sys.exit(main())
