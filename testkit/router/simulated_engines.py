"""Engines with a real scheduler in simulated time, and a client of several of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from replicas.engine.batch import ScheduledBatch
from replicas.engine.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.errors import NoReplicaAvailable, ReplicaLost
from replicas.protocol import (
    EngineMetrics,
    GenerateRequest,
    ModelCard,
    ReplicaIdentity,
    ReplicaStats,
    TokenDelta,
    merge,
)
from replicas.timing.clock import Clock
from testkit.engine.shadow_runner import decoders
from testkit.engine.timed_runner import FinishedStep, StepTimes, TimedRunner, shape_of
from testkit.router.simulated_time import FakeClock, settle_down

VOCABULARY = 5000
WAIT_S = 0.001
"""Time until an engine looks again that has work and could schedule none."""
TOKENS_TOGETHER = 8
"""Tokens of a sequence that travel together, behind the first."""


class _StepRunner:
    """Runner whose steps have their results at once. It notes the time that the last one takes."""

    def __init__(self, step_times: StepTimes, clock: FakeClock) -> None:
        self._step_times = step_times
        self._timed = TimedRunner(step_times, VOCABULARY, eos_token_id=0, clock=clock)
        self._step_s: float | None = None

    def launch(self, batch: ScheduledBatch) -> FinishedStep:
        """Compute a step."""
        self._step_s = self._step_times.of(shape_of(batch))
        return FinishedStep(self._timed.launch(batch).results)

    def take_step_s(self) -> float:
        """Return the time of the step that was launched since the last call, or a short one if none was."""
        step_s, self._step_s = self._step_s, None
        return WAIT_S if step_s is None else step_s


class DeltaStream:
    """Deltas of one sequence: the first token travels alone, then `TOKENS_TOGETHER` or the rest."""

    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []
        self._num_tokens = 0
        """Number of tokens in `_deltas`."""
        self._num_together = 1
        self._is_due = asyncio.Event()
        self._error: ReplicaLost | None = None

    def put(self, delta: TokenDelta) -> None:
        """Add a delta."""
        self._deltas.append(delta)
        self._num_tokens += len(delta.token_ids)
        if self._num_tokens >= self._num_together or delta.finish_reason is not None:
            self._is_due.set()

    def fail(self) -> None:
        """End the stream, as its replica has died."""
        self._error = ReplicaLost("the replica has died")
        self._is_due.set()

    async def take(self) -> TokenDelta:
        """Wait until deltas are due; return all as one.

        Raises:
            ReplicaLost: the replica has died.
        """
        await self._is_due.wait()
        if self._error is not None:
            raise self._error
        self._is_due.clear()
        taken, self._deltas, self._num_tokens = self._deltas, [], 0
        self._num_together = TOKENS_TOGETHER
        return merge(taken)


class SimulatedEngine:
    """Engine whose steps run in a task of the simulated loop.

    It schedules a step ahead of the results, so that a step's results come when its time has passed.
    """

    def __init__(self, config: EngineConfig, step_times: StepTimes, clock: FakeClock, replica_id: str = "a") -> None:
        assert config.async_scheduling
        self.replica_id = replica_id
        identity = ReplicaIdentity(replica_id, "node", 1)
        self._runner = _StepRunner(step_times, clock)
        self.engine = Engine(config, self._runner, decoders, identity, Clock(clock, clock.unix))
        self._streams: dict[str, DeltaStream] = {}
        self._has_work = asyncio.Event()

    async def run(self) -> None:
        """Run steps until cancelled."""
        while True:
            await self._has_work.wait()
            for delta in self.engine.step():
                if delta.request_id in self._streams:  # else its reader has left
                    self._streams[delta.request_id].put(delta)
            await settle_down(3)
            if self.engine.has_work:
                await asyncio.sleep(self._runner.take_step_s())
            else:
                self._has_work.clear()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of one request."""
        self.engine.add(request)
        stream = self._streams[request.request_id] = DeltaStream()
        self._has_work.set()
        try:
            has_ended = False
            while not has_ended:
                delta = await stream.take()
                has_ended = delta.finish_reason is not None
                yield delta._replace(stats=self.engine.stats())
        finally:
            self.engine.abort(request.request_id)
            del self._streams[request.request_id]

    def stats(self) -> ReplicaStats:
        """Return the answer to a poll."""
        return replace(self.engine.stats(), served_tokens=self.engine.served_tokens())

    def metrics(self) -> EngineMetrics:
        """Return everything that the engine counts."""
        return self.engine.metrics()

    def drain(self) -> None:
        """Refuse new requests."""
        self.engine.drain()

    def die(self) -> None:
        """Fail all streams."""
        for stream in self._streams.values():
            stream.fail()


class EngineClient:
    """`ReplicaClient` of simulated engines; the first engine of a ranking that is there serves.

    Several ingresses may share it.
    """

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self.engines = {engine.replica_id: engine for engine in engines}

    async def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of one request."""
        engine = next((self.engines[replica_id] for replica_id in ranking if replica_id in self.engines), None)
        if engine is None:
            raise NoReplicaAvailable("no engine of the ranking is there")
        async with aclosing(engine.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def poll_stats(self) -> list[ReplicaStats]:
        """Return the load of all engines."""
        return [engine.stats() for engine in self.engines.values()]

    async def poll_metrics(self) -> list[EngineMetrics]:
        """Return the metrics of all engines."""
        return [engine.metrics() for engine in self.engines.values()]

    async def drain(self, replica_id: str) -> bool:
        """Have an engine refuse new requests."""
        engine = self.engines.get(replica_id)
        if engine is not None:
            engine.drain()
        return engine is not None

    async def describe(self) -> ModelCard:
        """Refuse: engines have no model."""
        raise NoReplicaAvailable("simulated engines have no model")
