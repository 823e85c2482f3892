"""Engine: takes requests, runs one step at a time, returns deltas. Synchronous; one thread owns it."""

from __future__ import annotations

from collections.abc import Iterable

from replicas.clock import Clock
from replicas.engine.admission import AdmissionControl
from replicas.engine.batch import CollectedStep, ItemResult, ScheduledSequence, ScheduledStep
from replicas.engine.block_manager import BlockManager
from replicas.engine.config import EngineConfig
from replicas.engine.deadlines import Deadlines
from replicas.engine.interfaces import ModelRunner
from replicas.engine.load_report import LoadReport
from replicas.engine.output_processor import DecoderFactory, OutputProcessor
from replicas.engine.pipeline import Pipeline
from replicas.engine.scheduler import Scheduler
from replicas.engine.sequence import Sequence, SequenceStatus
from replicas.engine.stats import EngineStats
from replicas.errors import DeadlineExceeded, InvalidRequest, NoReplicaAvailable, SequenceFailed
from replicas.protocol import (
    EngineMetrics,
    FinishReason,
    GenerateRequest,
    ReplicaIdentity,
    ReplicaStats,
    TenantTokens,
    TokenDelta,
)


class Engine:
    """Engine that runs every accepted request to its end, many at a time.

    With `async_scheduling`, step n + 1 is scheduled and launched before the results of step n are collected. Each
    sequence continues with the token that step n samples, whose value only the device knows. If that token ends the
    sequence (EOS, stop string), the sequence is already in step n + 1, and its result of step n + 1 is dropped. Output
    is the same in both modes, token for token.

    Invariants:
        A request that `add` accepted gets exactly one delta with a finish reason, unless it is aborted.
        A finished, aborted or failed request holds no block when the next step is scheduled. A step in flight may still
        write to blocks that it held; their next owner writes later.
        Without work, every block is free and no step is in flight.
    """

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, decoders: DecoderFactory, identity: ReplicaIdentity,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._decoders = decoders
        self._clock = clock or Clock()
        self._scheduler = Scheduler(config, BlockManager(config))
        self._stats = EngineStats(config)
        self._pipeline = Pipeline(runner, self._scheduler, self._clock, config.async_scheduling)
        self._admission = AdmissionControl(config, self._scheduler, self._stats)
        self._report = LoadReport(config, identity, self._scheduler, self._stats, self._clock)
        self._output_processors: dict[str, OutputProcessor] = {}
        self._deadlines = Deadlines()
        self._num_added = 0
        self._is_draining = False

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs, or a step is in flight."""
        return bool(self._output_processors) or len(self._pipeline) > 0

    def add(self, request: GenerateRequest) -> None:
        """Accept a request.

        Raises:
            InvalidRequest: the request could never be served here, or its id is in use.
            Overloaded: the waiting queue is at one of its limits.
            NoReplicaAvailable: the engine is draining.
            SequenceFailed: the output that the request brings cannot be decoded.
        """
        if self._is_draining:
            raise NoReplicaAvailable("this replica is draining and takes no new requests", "draining")
        if request.request_id in self._output_processors:
            raise InvalidRequest(f"request id {request.request_id} is in use", "request_id")
        self._admission.check(request)
        now = self._clock.monotonic()
        deadline_s = None if request.deadline_unix_s is None else self._clock.from_unix(request.deadline_unix_s)
        arrival_s = now if request.arrival_unix_s is None else min(now, self._clock.from_unix(request.arrival_unix_s))
        sequence = Sequence(request, arrival_s, deadline_s, self._num_added)
        self._output_processors[request.request_id] = OutputProcessor(
            sequence, self._decoders, self._config.eos_token_ids
        )
        self._num_added += 1
        self._deadlines.add(sequence)
        self._scheduler.add(sequence, now)

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free when this returns. An unknown id is ignored: it may have ended."""
        processor = self._output_processors.get(request_id)
        if processor is not None:
            self._end(processor.sequence, FinishReason.ABORT)

    def drain(self) -> None:
        """Refuse new requests from now on; accepted ones are finished."""
        self._is_draining = True

    def step(self) -> list[TokenDelta]:
        """Schedule and launch a step, collect the steps that are due, and return the sequences' new deltas."""
        expired = self._expire()
        step = self._schedule()
        results = self._pipeline.run(step)
        return expired + self._apply(results)

    def check_invariants(self) -> None:
        """Assert the invariants of the engine and its parts; cheap without running sequences."""
        self._scheduler.check_invariants()
        assert len(self._output_processors) == len(self._scheduler.running) + len(self._scheduler.waiting)
        assert len(self._pipeline) <= self._config.async_scheduling

    def stats(self) -> ReplicaStats:
        """Return the present load."""
        return self._report.load(self._is_draining)

    def served_tokens(self) -> tuple[TenantTokens, ...]:
        """Return the tokens computed for the tenants served last. Any thread may call it."""
        return self._stats.tenant_usage.snapshot()

    def metrics(self) -> EngineMetrics:
        """Return all of the engine's metrics."""
        return self._report.metrics(self.stats())

    def _expire(self) -> list[TokenDelta]:
        """Fail the sequences whose deadline has passed."""
        deltas = []
        for sequence in self._deadlines.pop_expired(self._clock.monotonic()):
            assert sequence.deadline_s is not None
            self._stats.expired(sequence)
            error = DeadlineExceeded(
                f"the deadline, {sequence.deadline_s - sequence.arrival_s:.3f} s after arrival, passed with "
                f"{sequence.num_output_tokens} output tokens generated"
            )
            deltas.append(self._ended(sequence, self._output_processors[sequence.request_id].fail(error)))
        return deltas

    def _schedule(self) -> ScheduledStep | None:
        """Schedule the next step; return None if there is nothing to compute."""
        now = self._clock.monotonic()
        batch = self._scheduler.schedule(now)
        if batch is None:
            return None
        self._stats.scheduled(batch, now)
        return ScheduledStep(batch, now, self._scheduler.is_saturated(batch))

    def _apply(self, steps: Iterable[CollectedStep]) -> list[TokenDelta]:
        """Apply the results of steps to their sequences; return the sequences' deltas."""
        deltas = []
        for step in steps:
            self._stats.stepped(step)
            self._scheduler.stepped(step.batch, step.duration_s)
            for item, result in step.results:
                delta = self._advance(item, result, step.collected_s)
                if delta is not None:
                    deltas.append(self._ended(item.sequence, delta))
        return deltas

    def _advance(self, item: ScheduledSequence, result: ItemResult, now: float) -> TokenDelta | None:
        """Apply a step's result to one sequence; return its delta, or None if there is nothing to show yet."""
        sequence = item.sequence
        if sequence.status is SequenceStatus.FINISHED:
            return None  # It ended while the step was in flight.
        processor = self._output_processors[sequence.request_id]
        if result.error is not None:
            return processor.fail(SequenceFailed(result.error))
        self._scheduler.computed(item)
        if item.samples:
            self._stats.produced(sequence, now)
        return processor.advance(item, result)

    def _ended(self, sequence: Sequence, delta: TokenDelta) -> TokenDelta:
        """End `sequence` if `delta` is its last; return `delta`."""
        if delta.finish_reason is not None:
            self._end(sequence, delta.finish_reason)
        return delta

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._stats.finished(sequence, reason, self._clock.monotonic())
        self._scheduler.finish(sequence)
        del self._output_processors[sequence.request_id]
