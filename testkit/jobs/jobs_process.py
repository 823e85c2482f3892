"""A jobs process without Ray, over scripted completions."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from replicas.errors import ServingError
from replicas.protocol import Band, ReplicaStats
from replicas.timing.clock import Clock
from router.flow.flow_queue import BandLimits, FlowQueue
from router.timeline import Timeline
from router.types import ReplicaView
from serve_app.jobs.api.records import JobsSettings
from serve_app.jobs.execution.line_runner import LineRunner
from serve_app.jobs.execution.planning import LineCapacity
from serve_app.jobs.execution.throughput import BacklogView
from serve_app.jobs.runtime import JobsRuntime
from serve_app.jobs.storage.schema.database import Database, JobsContext
from serve_app.monitoring.http import OutputMetrics
from serve_app.openai.request.caller import Caller
from serve_app.openai.request.schema import GenerationBody
from serve_app.openai.request.validation import BodyChecks, RequestLimits
from serve_app.openai.service import CompletionService
from testkit.jobs.database_worlds import MODEL
from testkit.jobs.memory_files import MemoryFiles


@dataclass
class _Prepared:
    body: Any
    caller: Caller
    timelines: tuple[Timeline, ...]
    requests: tuple[Any, ...] = ()
    not_enforced: tuple[str, ...] = ()
    longest_outputs: tuple[int, ...] = (4,)
    id = "cmpl-scripted"
    format = SimpleNamespace(num_malformed_calls=0)
    progress = SimpleNamespace(
        prompt_tokens=3, completion_tokens=4, cached_tokens=2, finish_reasons=["stop"], replica_id="replica"
    )

    @property
    def timeline(self) -> Timeline:
        return self.timelines[0]


@dataclass
class ScriptedCompletions:
    """Completion service that answers with the prompt, holds answers while `gate` is closed, and raises set errors."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    errors: dict[str, list[ServingError]] = field(default_factory=dict)
    """Errors by prompt, raised one after the other before the prompt is answered."""
    asked: list[str] = field(default_factory=list)
    callers: list[Caller] = field(default_factory=list)
    checks: BodyChecks = field(default_factory=lambda: BodyChecks((MODEL,), RequestLimits()))
    num_running: int = 0
    most_running: int = 0

    async def completion(self, body: GenerationBody, caller: Caller) -> _Prepared:
        assert caller.timeline is not None
        return _Prepared(body, caller, (caller.timeline.fork(),))

    chat = completion

    async def answer(self, prepared: _Prepared) -> dict[str, Any]:
        [prompt] = prepared.body.prompt
        self.asked.append(prompt)
        self.callers.append(prepared.caller)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.gate.wait()
            if errors := self.errors.get(prompt):
                raise errors.pop(0)
            return {"text": prompt}
        finally:
            self.num_running -= 1


def view(completions: ScriptedCompletions, num_slots: int) -> ReplicaView:
    """Return a replica with `num_slots` slots, one of them taken by each running completion."""
    stats = ReplicaStats(
        replica_id="replica", node_id="node", pid=1, taken_unix_s=0.0, num_slots=num_slots, num_blocks=100,
        num_free_blocks=100, num_running_by_band=(0, 0, 0), num_waiting_by_band=(0, 0, 0), waiting_tokens=0,
        generated_tokens_per_s=0.0, is_draining=False,
    )  # fmt: skip
    return ReplicaView(stats, 0.0, num_by_band=(0, 0, completions.num_running))


@dataclass
class Process:
    """Running jobs process."""

    runtime: JobsRuntime
    backlog: BacklogView
    database: Database

    @property
    def service(self) -> Any:
        return self.runtime.service


@contextlib.asynccontextmanager
async def jobs_process(
    database_url: str,
    files: MemoryFiles,
    completions: ScriptedCompletions,
    *,
    num_slots: int = 4,
    settings: JobsSettings | None = None,
    clock: Clock | None = None,
    is_killed: bool = False,
) -> AsyncIterator[Process]:
    """Run a jobs process within the context; if `is_killed`, it stops without writing anything."""
    clock = clock or Clock()
    database = Database(database_url)
    context = JobsContext(database, files, settings or JobsSettings(MODEL), bytes(64), clock)
    flow_queue = FlowQueue({band: BandLimits(100, 10**6) for band in Band}, 30.0)
    capacity, backlog = LineCapacity(lambda: [view(completions, num_slots)], flow_queue), BacklogView(clock)
    metrics = OutputMetrics(CollectorRegistry(), MODEL)
    line_runner = LineRunner(cast(CompletionService, completions), metrics, random.Random(0), context)
    runtime = JobsRuntime(context, line_runner, capacity, backlog)
    await runtime.start()
    try:
        yield Process(runtime, backlog, database)
    finally:
        if is_killed:
            kill(runtime)
        await runtime.stop()


def kill(runtime: JobsRuntime) -> None:
    """Keep the process from writing anything more, its shutdown included."""

    async def nothing() -> None:
        return None

    runtime._worker.stop = nothing  # type: ignore[method-assign]
    runtime._ownership.stop = nothing  # type: ignore[method-assign]
