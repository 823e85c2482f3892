"""Memory of each process of a server under mixed load: `python -m bench.server.soak --minutes 100`.

The demo model is served in processes of their own. The load: short chats, streamed and whole, of which a third is left
early; tool calls and JSON schemas that nobody has sent before; prompts of new text; large bodies; jobs; batches whose
files are deleted. Every half a minute a line has the anonymous memory of each process, in MiB; pages of files count as
a process's own or not with the other processes that map them. The slope of each is fitted to the lines after
`--warm-up` minutes, and after a restart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from bench.record import write
from bench.serving import REAL, serving
from serve_app.config import DEMO_MODEL_NAME
from testkit.serving.served import Served

NAME = "soak"
_LIMIT_S, _PERIOD_S = 300.0, 30.0
_ANONYMOUS = re.compile(r"^Anonymous: *(\d+) kB", re.MULTILINE)
_NUM_CHATS, _NUM_LINES = 3, 200
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"


class Load:
    """Clients of one server; each sends its requests one after another, and notes their answers."""

    def __init__(self, http: httpx.AsyncClient, body_mb: float) -> None:
        self._http = http
        self._body_bytes = int(body_mb * 1e6)
        self._rng = random.Random(1)
        self.answers: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        """Send requests for so many seconds.

        Raises:
            RuntimeError: a client has ended.
        """
        clients = [self._chat] * _NUM_CHATS + [self._schema, self._tool, self._body, self._job, self._batch]
        tasks = [asyncio.create_task(self._repeat(client)) for client in clients]
        done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            raise RuntimeError("a client has ended") from task.exception()

    async def _repeat(self, client: Callable[[], Awaitable[None]]) -> None:
        while True:
            await client()
            await asyncio.sleep(self._rng.uniform(0, 0.2))

    def _chat_body(self, **fields: Any) -> dict[str, Any]:
        words = " ".join(f"{self._rng.getrandbits(32):x}" for _ in range(self._rng.randint(2, 60)))
        return {"model": DEMO_MODEL_NAME, "messages": [{"role": "user", "content": words}], "max_tokens": 24, **fields}

    async def _post(self, kind: str, path: str, **options: Any) -> httpx.Response:
        answer = await self._http.post(path, **options)
        self.answers[f"{kind} {answer.status_code}"] += 1
        return answer

    async def _poll(self, path: str) -> Any:
        """Return what is at `path`; ask again each second while the server refuses."""
        while (answer := await self._http.get(path)).is_error:
            self.answers[f"poll {answer.status_code}"] += 1
            await asyncio.sleep(1)
        return answer.json()

    async def _chat(self) -> None:
        limit_s = self._rng.uniform(0.01, 0.3) if self._rng.random() < 0.33 else _LIMIT_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._post("chat", _CHAT, json=self._chat_body(stream=self._rng.random() < 0.7))
                return
        self.answers["chat left"] += 1

    async def _schema(self) -> None:
        name = f"x{self._rng.getrandbits(40):x}"
        schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        await self._post("schema", _CHAT, json=self._chat_body(response_format=form))

    async def _tool(self) -> None:
        parameters = {"type": "object", "properties": {f"x{self._rng.getrandbits(40):x}": {"type": "string"}}}
        tool = {"type": "function", "function": {"name": f"f{self._rng.getrandbits(40):x}", "parameters": parameters}}
        await self._post("tool", _CHAT, json=self._chat_body(tools=[tool]))

    async def _body(self) -> None:
        """Send a body that is large, or prompts of new text."""
        text = f"{self._rng.getrandbits(40):x} " * (self._body_bytes // 11)
        if self._rng.random() < 0.5:
            await self._post("large body", "/tokenize", json={"model": DEMO_MODEL_NAME, "prompt": text})
        else:
            prompts = {"prompt": [text[:400]] * 4, "max_tokens": 8}
            await self._post("prompts", _COMPLETION, json={"model": DEMO_MODEL_NAME, **prompts})
        await asyncio.sleep(self._rng.uniform(0, 10))

    async def _job(self) -> None:
        job = (await self._post("job", "/v1/jobs", json=self._chat_body())).json()
        while job["status"] in ("queued", "running"):
            job = await self._poll(f"/v1/jobs/{job['id']}?wait=30")

    async def _batch(self) -> None:
        requests = [
            {"custom_id": str(number), "method": "POST", "url": _CHAT, "body": self._chat_body()}
            for number in range(_NUM_LINES)
        ]
        lines = "\n".join(map(json.dumps, requests)).encode()
        file = (await self._post("file", "/v1/files", data={"purpose": "batch"}, files={"file": lines})).json()
        fields = {"input_file_id": file["id"], "endpoint": _CHAT, "completion_window": "24h"}
        batch = (await self._post("batch", "/v1/batches", json=fields)).json()
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(1)
            batch = await self._poll(f"/v1/batches/{batch['id']}")
        self.answers[f"batch {batch['status']}"] += 1
        self.answers["batch lines"] += batch["request_counts"]["completed"]
        for file_id in filter(None, (file["id"], batch["output_file_id"], batch["error_file_id"])):
            await self._http.delete(f"/v1/files/{file_id}")


def memory_of(served: Served) -> dict[str, float]:
    """Return the anonymous memory of each process, MiB, by its name."""
    sizes: dict[str, float] = defaultdict(float)
    for process in (psutil.Process(served.process.pid), *served.descendants()):
        with contextlib.suppress(psutil.Error, OSError, IndexError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            sizes[_name_of(process)] += int(_ANONYMOUS.findall(rollup)[0]) / 1024
    return {name: round(size, 2) for name, size in sorted(sizes.items())}


def _name_of(process: psutil.Process) -> str:
    words = process.cmdline()
    title = re.match(r"ray::(?:ServeReplica:headway:)?(\w+)", " ".join(words))
    return title[1] if title else Path(next((word for word in words if word.endswith(".py")), words[0])).stem


def slopes(lines: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the change of each process's memory, MiB a minute, fitted to the lines, and the minutes of restarts.

    The processes are those of the last line. One that was missing has been restarted; lines before are not its own.
    """
    changes, restarts = {}, {}
    for name in sorted(lines[-1]["anonymous_mib"]):
        missing = [number for number, line in enumerate(lines) if name not in line["anonymous_mib"]]
        own = lines[missing[-1] + 1 if missing else 0 :]
        fit = np.polyfit([line["minutes"] for line in own], [line["anonymous_mib"][name] for line in own], 1)
        changes[name] = round(float(fit[0]), 4)
        if missing:
            restarts[name] = own[0]["minutes"]
    return changes, restarts


async def soak(served: Served, minutes: float, body_mb: float) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Load a server for so many minutes; return the lines, and the numbers of answers by kind."""
    lines: list[dict[str, Any]] = []
    begin_s = time.monotonic()

    async def watch() -> None:
        while True:
            anonymous_mib = await asyncio.to_thread(memory_of, served)
            lines.append({"minutes": round((time.monotonic() - begin_s) / 60, 2), "anonymous_mib": anonymous_mib})
            print(json.dumps(lines[-1]), flush=True)
            await asyncio.sleep(_PERIOD_S)

    async with httpx.AsyncClient(base_url=served.url, timeout=_LIMIT_S) as http:
        load = Load(http, body_mb)
        watching = asyncio.create_task(watch())
        await load.run(60 * minutes)
        watching.cancel()
    return lines, load.answers


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=100.0)
    parser.add_argument("--warm-up", type=float, default=30.0, help="minutes before the slopes are fitted")
    parser.add_argument("--body-mb", type=float, default=2.0, help="size of a large body")
    options = parser.parse_args()
    with serving(REAL, {"model": DEMO_MODEL_NAME, "max_num_seqs": 16}) as served:
        lines, answers = asyncio.run(soak(served, options.minutes, options.body_mb))
    changes, restarts = slopes([line for line in lines if line["minutes"] >= options.warm_up] or lines)
    figures = {
        "mib_a_minute": changes,
        "restarted_at_minute": restarts,
        "first_mib": lines[0]["anonymous_mib"],
        "last_mib": lines[-1]["anonymous_mib"],
        "answers": dict(sorted(answers.items())),
    }
    print(json.dumps(figures, indent=2))
    print(write(NAME, figures), file=sys.stderr)


if __name__ == "__main__":
    main()
