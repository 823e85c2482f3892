"""The engine: requests in, one step at a time, deltas out. Synchronous; one thread owns it."""

from __future__ import annotations

from dataclasses import replace

from replicas.clock import Clock
from replicas.engine.batch import ItemResult, ModelRunner, ScheduledBatch, ScheduledSequence
from replicas.engine.block_manager import BlockManager
from replicas.engine.config import EngineConfig
from replicas.engine.deadlines import Deadlines
from replicas.engine.generation import DecoderFactory, Generation
from replicas.engine.intake import Intake
from replicas.engine.load_report import LoadReport
from replicas.engine.pipeline import Pipeline, StepInFlight
from replicas.engine.scheduler import Scheduler
from replicas.engine.sequence import Sequence, SequenceStatus
from replicas.engine.stats import EngineStats
from replicas.engine.stopping import Stop
from replicas.engine.waste import WasteCause
from replicas.errors import DeadlineExceeded, InvalidRequest, NoReplicaAvailable, SequenceFailed, ServingError
from replicas.protocol import (
    EngineMetrics,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    ReplicaIdentity,
    ReplicaStats,
    TenantTokens,
    TokenDelta,
    Usage,
)


class Engine:
    """Runs every accepted request to its end, many at a time.

    With `async_scheduling`, step n + 1 is scheduled and launched before the results of step n are collected: each
    sequence goes on with the token that step n will give, known to the device alone. An end that only the token
    tells (end of sequence, stop string) is thus seen when the sequence is in step n + 1 already: what that step
    gives it is dropped. Output is the same in both modes, token for token.

    Invariants:
        A request that `add` accepted gets exactly one delta with a finish reason, unless it is aborted.
        A finished, aborted or failed request holds no block when the next step is scheduled. A step in flight may
        still write to blocks it held: whoever gets them writes later.
        With nothing left to do every block is free and no step is in flight.
    """

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, decoders: DecoderFactory, identity: ReplicaIdentity,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._decoders = decoders
        self._clock = clock or Clock()
        blocks = BlockManager(config)
        self._scheduler = Scheduler(config, blocks)
        self._stats = EngineStats(config)
        self._pipeline = Pipeline(runner, self._scheduler, config.async_scheduling)
        self._intake = Intake(config, self._scheduler, self._stats)
        self._report = LoadReport(config, identity, self._scheduler, blocks, self._stats, self._clock)
        self._generations: dict[str, Generation] = {}
        self._deadlines = Deadlines()
        self._num_added = 0
        self._last_collected_s = float("-inf")
        self._is_draining = False

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running, or a step is in flight."""
        return bool(self._generations) or len(self._pipeline) > 0

    def add(self, request: GenerateRequest) -> None:
        """Accept a request.

        Raises:
            InvalidRequest: it could never be served here, or its id is in use.
            Overloaded: the waiting queue is at one of its limits.
            NoReplicaAvailable: the engine is draining.
            SequenceFailed: its text cannot be decoded.
        """
        if self._is_draining:
            raise NoReplicaAvailable("this replica is draining and takes no new requests", "draining")
        if request.request_id in self._generations:
            raise InvalidRequest(f"request id {request.request_id} is in use", "request_id")
        self._intake.check(request)
        now = self._clock.monotonic()
        deadline_s = None if request.deadline_unix_s is None else self._clock.from_unix(request.deadline_unix_s)
        arrival_s = now if request.arrival_unix_s is None else min(now, self._clock.from_unix(request.arrival_unix_s))
        sequence = Sequence(request, arrival_s, deadline_s, self._num_added)
        self._generations[request.request_id] = Generation(sequence, self._decoders)
        self._num_added += 1
        self._deadlines.add(sequence)
        self._scheduler.add(sequence, now)

    def abort(self, request_id: str) -> None:
        """Forget a request; its blocks are free when this returns. An unknown id is no error: it may have ended."""
        generation = self._generations.get(request_id)
        if generation is not None:
            self._stats.waste.add(WasteCause.ABORT, generation.sequence.num_spent_tokens)
            self._end(generation.sequence, FinishReason.ABORT)

    def drain(self) -> None:
        """Take no new requests from now on; what was accepted is finished."""
        self._is_draining = True

    def step(self) -> list[TokenDelta]:
        """Launch a step and collect those that are due; what changed for each sequence that produced or ended."""
        deltas = self._expire()
        has_launched = self._launch()
        for step in self._pipeline.due(has_launched):
            deltas += self._collect(step)
        return deltas

    def check_invariants(self) -> None:
        """Assert the invariants of everything below; cheap when nothing runs."""
        self._scheduler.check_invariants()
        assert len(self._generations) == len(self._scheduler.running) + len(self._scheduler.waiting)
        assert len(self._pipeline) <= self._config.async_scheduling

    def stats(self) -> ReplicaStats:
        """The present load."""
        return self._report.load(self._is_draining)

    def served_tokens(self) -> tuple[TenantTokens, ...]:
        """Tokens computed for the tenants served last; may be asked from any thread."""
        return self._stats.account.snapshot()

    def metrics(self) -> EngineMetrics:
        """Everything the engine counts."""
        return self._report.metrics(self.stats())

    def _expire(self) -> list[TokenDelta]:
        deltas = []
        for sequence in self._deadlines.take_passed(self._clock.monotonic()):
            assert sequence.deadline_s is not None
            self._stats.waste.add(WasteCause.EXPIRED, sequence.num_spent_tokens)
            error = DeadlineExceeded(
                f"the deadline, {sequence.deadline_s - sequence.arrival_s:.3f} s after arrival, passed with "
                f"{sequence.num_output_tokens} output tokens generated"
            )
            deltas.append(self._fail(sequence, error))
        return deltas

    def _launch(self) -> bool:
        """Schedule and launch a step; whether there was anything to compute."""
        now = self._clock.monotonic()
        batch = self._scheduler.schedule(now)
        if batch is None:
            return False
        for item in batch.items:
            if item.sequence.first_scheduled_s is None:
                item.sequence.first_scheduled_s = now
                self._stats.scheduled_first(item.sequence)
        self._pipeline.launch(batch, now, self._is_saturated(batch))
        return True

    def _is_saturated(self, batch: ScheduledBatch) -> bool:
        if len(batch.items) == 1 and batch.items[0].sequence.request.runs_alone:
            return False
        return (
            len(self._scheduler.waiting) > 0
            or len(self._scheduler.running) == self._config.max_num_seqs
            or batch.num_tokens == self._config.max_num_batched_tokens
        )

    def _collect(self, step: StepInFlight) -> list[TokenDelta]:
        results = self._pipeline.collect(step)
        now = self._clock.monotonic()
        # Steps overlap: this one has had the device since the one before was done.
        duration_s = now - max(step.launched_s, self._last_collected_s)
        self._last_collected_s = now
        self._stats.stepped(step.batch, duration_s, step.is_saturated)
        self._scheduler.stepped(step.batch, duration_s)
        deltas = (self._apply(item, result, now) for item, result in results)
        return [delta for delta in deltas if delta is not None]

    def _apply(self, item: ScheduledSequence, result: ItemResult, now: float) -> TokenDelta | None:
        """Let the step's result change the sequence; None if there is nothing to tell yet."""
        sequence = item.sequence
        if item.num_repeated_tokens > 0:
            self._stats.waste.add(WasteCause.PREEMPT, item.num_repeated_tokens)
        if sequence.status is SequenceStatus.FINISHED:
            return None  # It ended while the step was on its way.
        if result.error is not None:
            return self._fail(sequence, SequenceFailed(result.error))
        prompt_logprobs = sequence.take_prompt_logprobs(item.start, result.prompt_logprobs)
        self._scheduler.computed(item)
        if not item.samples:
            is_scored = not sequence.can_sample and sequence.num_computed_tokens == sequence.num_tokens
            stop = Stop(FinishReason.LENGTH) if is_scored else None
            if stop is None and not prompt_logprobs:
                return None
            return self._delta(sequence, (), "", stop, prompt_logprobs=prompt_logprobs)
        assert result.token_id is not None
        return self._produce(sequence, result.token_id, result.logprobs, prompt_logprobs, now)

    def _produce(
        self, sequence: Sequence, token_id: int, logprobs: PositionLogprobs | None,
        prompt_logprobs: tuple[PositionLogprobs, ...], now: float,
    ) -> TokenDelta:  # fmt: skip
        """Add an output token to its sequence."""
        sequence.append(token_id)
        self._stats.produced(sequence, now)
        try:
            text, stop = self._generations[sequence.request_id].read(token_id, self._config.eos_token_ids)
        except Exception as error:  # A tokenizer's decoder failed on this sequence's tokens; the others are fine.
            sequence.take_back()
            return self._fail(sequence, SequenceFailed(f"decoding the output failed: {error}"))
        of_token = () if logprobs is None else (logprobs,)
        return self._delta(sequence, (token_id,), text, stop, of_token, prompt_logprobs)

    def _delta(
        self, sequence: Sequence, token_ids: tuple[int, ...], text: str, stop: Stop | None,
        logprobs: tuple[PositionLogprobs, ...] = (), prompt_logprobs: tuple[PositionLogprobs, ...] = (),
    ) -> TokenDelta:  # fmt: skip
        if stop is not None:
            self._end(sequence, stop.reason)
        num_output_tokens = sequence.num_output_tokens
        return TokenDelta(
            request_id=sequence.request.request_id,
            start=num_output_tokens - len(token_ids),
            token_ids=token_ids,
            text=text,
            usage=Usage(sequence.num_prompt_tokens, num_output_tokens, sequence.num_cached_tokens or 0),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=stop.reason if stop else None,
            stop_reason=stop.cause if stop else None,
        )

    def _fail(self, sequence: Sequence, error: ServingError) -> TokenDelta:
        return replace(self._delta(sequence, (), "", Stop(FinishReason.ERROR)), error=error)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._stats.waste.add(WasteCause.SURPLUS, sequence.num_surplus_tokens)
        self._scheduler.finish(sequence)
        del self._generations[sequence.request_id]
        self._stats.finished(sequence, reason, self._clock.monotonic())
