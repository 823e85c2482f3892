"""Engine: takes requests, runs one step at a time, returns deltas. Synchronous; one thread owns it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from replicas.engine.batch import CollectedStep, ItemResult, ModelRunner, Pooler, ScheduledSequence, ScheduledStep
from replicas.engine.block_manager import BlockManager
from replicas.engine.config import EngineConfig
from replicas.engine.constraint import Constraint
from replicas.engine.output_processor import DecoderFactory, OutputProcessor, PooledProcessor, Progress, fault_of
from replicas.engine.pipeline import Pipeline
from replicas.engine.scheduler import Scheduler
from replicas.engine.sequence import DEVICE_S, KNOWN, PROMPT, WORK, Sequence, SequenceStatus
from replicas.engine.stats import START_TIME, EngineStats, gauge
from replicas.errors import DeadlineExceeded, InvalidRequest, NoReplicaAvailable, Overloaded, ServingError
from replicas.protocol import (
    Band,
    EngineMetrics,
    FinishReason,
    GenerateRequest,
    Metric,
    ReplicaIdentity,
    ReplicaStats,
    TenantTokens,
    TokenDelta,
)
from replicas.shared_rules.token_ids import unknown_token
from replicas.timing.clock import Clock

_MIN_DEADLINES = 64
_HELD_HELP = "running sequences that the last step left out so that a more urgent band meets its TPOT target"


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
        self._identity = identity
        self._clock = clock or Clock()
        self._scheduler = Scheduler(config, BlockManager(config))
        self._rule = config.sequence_blocks
        self._stats = EngineStats(config)
        self._pipeline = Pipeline(runner, self._scheduler, self._clock, config)
        self._output_processors: dict[str, OutputProcessor | PooledProcessor] = {}
        self._deadlines = Deadlines()
        self._num_added = 0
        self._is_draining = False
        self._version = 1
        self._start_unix_s = self._clock.unix()

    @property
    def has_work(self) -> bool:
        """True if a request waits or runs, or a step is in flight."""
        return bool(self._output_processors) or len(self._pipeline) > 0

    @property
    def num_repeats(self) -> int:
        """Number of forward passes that repeated a part of a failed step. Any thread may read it."""
        return self._pipeline.num_repeats

    def add(self, request: GenerateRequest, constraint: Constraint | None = None, pooler: Pooler | None = None) -> None:
        """Accept a request, with its constraint if it has one, and its pooler if its output is pooled.

        Raises:
            InvalidRequest: the request could never be served here, or its id is in use.
            Overloaded: the waiting queue is at one of its limits.
            NoReplicaAvailable: the engine is draining.
            SequenceFailed: the output that the request brings cannot be decoded.
        """
        if self._is_draining:
            raise NoReplicaAvailable("this replica is draining and takes no new requests", "draining")
        self._version += 1
        if request.request_id in self._output_processors:
            raise InvalidRequest(f"request id {request.request_id} is in use", "request_id")
        self._check_size(request)
        self._check_token_ids(request)
        self._check_queue(request)
        now = self._clock.monotonic()
        deadline_s = None if request.deadline_unix_s is None else self._clock.from_unix(request.deadline_unix_s)
        arrival_s = now if request.arrival_unix_s is None else min(now, self._clock.from_unix(request.arrival_unix_s))
        sequence = Sequence(request, arrival_s, deadline_s, self._num_added, constraint)
        self._output_processors[request.request_id] = (
            OutputProcessor(sequence, self._decoders, self._config.eos_token_ids)
            if pooler is None
            else PooledProcessor(sequence, pooler)
        )
        self._num_added += 1
        self._deadlines.add(sequence)
        self._scheduler.add(sequence, now)

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free when this returns. An unknown id is ignored: it may have ended."""
        processor = self._output_processors.get(request_id)
        self._version += 1
        if processor is not None:
            self._end(processor.sequence, FinishReason.ABORT)

    def drain(self) -> None:
        """Refuse new requests from now on; accepted ones are finished."""
        self._is_draining = True
        self._version += 1

    def step(self) -> list[TokenDelta]:
        """Schedule and launch a step, collect the steps that are due, and return the sequences' new deltas."""
        self._version += 1
        expired = self._expire()
        step = self._schedule()
        results = self._pipeline.run(step)
        return expired + self._apply(results)

    def check_invariants(self) -> None:
        """Assert the invariants of the engine and its parts; cheap without running sequences."""
        self._scheduler.check_invariants()
        assert len(self._output_processors) == len(self._scheduler.running) + len(self._scheduler.waiting)
        assert len(self._pipeline) <= self._config.async_scheduling
        load = self.stats()
        by_band = zip(load.num_running_by_band, load.num_waiting_by_band, strict=True)
        parts = [share.num_by_band for share in load.by_ingress]
        assert [sum(part[band] for part in parts) for band in Band] == [sum(numbers) for numbers in by_band]

    def stats(self) -> ReplicaStats:
        """Return the present load."""
        running, parts = self._scheduler.load(), self._scheduler.waiting.parts.copy()
        for share in running.by_ingress:
            parts.add(share)
        return ReplicaStats(
            replica_id=self._identity.replica_id,
            node_id=self._identity.node_id,
            pid=self._identity.pid,
            weights_id=self._identity.weights_id,
            taken_unix_s=self._clock.unix(),
            num_slots=self._config.num_slots,
            num_blocks=self._config.num_blocks,
            num_free_blocks=self._scheduler.blocks.num_free_blocks,
            num_running_by_band=running.num_by_band,
            num_waiting_by_band=self._scheduler.waiting.num_by_band,
            waiting_tokens=self._scheduler.waiting.num_tokens,
            generated_tokens_per_s=self._stats.rate.tokens_per_s if self.has_work else 0.0,
            is_draining=self._is_draining,
            num_held_blocks_by_band=running.num_blocks_by_band,
            outstanding_tokens=parts.num_outstanding_tokens,
            by_ingress=parts.shares(),
            block_size=self._config.block_size,
            saturated_tokens_per_s=self._stats.saturated_rate.tokens_per_s,
            tpot_targets_s=self._scheduler.tpot_limits.targets_s(),
            version=self._version,
            num_state_slots=self._config.num_state_slots,
            num_free_state_slots=self._scheduler.blocks.states.num_free_slots,
            num_whole_tables=self._rule.num_whole_tables,
            most_window_blocks=self._rule.most_window_blocks,
        )

    def served_tokens(self) -> tuple[TenantTokens, ...]:
        """Return the tokens computed for the tenants served last. Any thread may call it."""
        return self._stats.tenant_usage.snapshot()

    def metrics(self) -> EngineMetrics:
        """Return all of the engine's metrics."""
        return EngineMetrics(
            self._identity.replica_id,
            (*self._gauges(self.stats()), *self._stats.counters(self._scheduler.num_preemptions)),
            self._stats.histograms(),
        )

    def _check_size(self, request: GenerateRequest) -> None:
        limit = self._config.max_model_len
        if request.max_total_tokens > limit:
            raise InvalidRequest(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{request.max_total_tokens} tokens ({len(request.prompt_token_ids)} in the prompt, "
                f"{request.params.max_tokens} in the completion). "
                "Please reduce the length of the prompt or completion.",
                "max_tokens",
                "context_length_exceeded",
            )

    def _check_token_ids(self, request: GenerateRequest) -> None:
        """Refuse a request with an id that the model has no row for, wherever the id came from."""
        unknown = unknown_token(request, self._config.vocab_size)
        if unknown is not None:
            raise unknown.error(self._config.vocab_size)

    def _check_queue(self, request: GenerateRequest) -> None:
        waiting = self._scheduler.waiting
        num_free_slots = self._config.num_slots - len(self._scheduler.running)
        if len(waiting) < num_free_slots:
            return
        num_queued = len(waiting) - num_free_slots + 1
        if num_queued > self._config.max_queued_requests:
            self._refuse("requests", num_queued, self._config.max_queued_requests, "max_num_queued_reqs")
        num_tokens = waiting.num_tokens + request.max_total_tokens
        if num_tokens > self._config.max_queued_tokens:
            self._refuse("tokens", num_tokens, self._config.max_queued_tokens, "max_num_queued_tokens")

    def _refuse(self, unit: str, value: int, limit: int, reason: str) -> None:
        """Raise `Overloaded`. Its retry time is the time in which the queue drains at the measured speed."""
        self._stats.rejected(reason)
        rate = self._stats.saturated_rate.tokens_per_s
        retry_after_s = self._scheduler.waiting.parts.num_outstanding_tokens / rate if rate > 0 else 1.0
        raise Overloaded(f"the queue would hold {value} {unit}; its limit is {limit}", retry_after_s, reason)

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
            delta = self._output_processors[sequence.request_id].fail(error)
            deltas.append(self._complete(sequence, delta, self._clock.monotonic()))
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
        deltas: list[TokenDelta] = []
        for step in steps:
            self._stats.stepped(step, self._scheduler.table)
            self._scheduler.latency.stepped(step.batch, step.duration_s)
            self._scheduler.tpot_limits.stepped(step)
            deltas += filter(None, self._apply_one(step))
        return deltas

    def _apply_one(self, step: CollectedStep) -> list[TokenDelta | None]:
        """Apply the results of one step; return a delta, or None, for each item.

        The usual tokens are applied at once. What changes blocks follows in the order of the items.
        """
        columns, now = step.computed.columns, step.collected_s
        is_continued = self._scheduler.continued(columns, step.results)
        deltas: list[TokenDelta | None] = [None] * len(columns.sequences)
        faults, ends = self._continue(step, is_continued.nonzero()[0], deltas)
        changes_block = is_continued & self._scheduler.changes_block(columns)
        for index in sorted({*(changes_block | ~is_continued).nonzero()[0].tolist(), *faults, *ends}):
            sequence = columns.sequences[index]
            if changes_block[index]:
                self._scheduler.block_changed(sequence)
            if index in faults:
                sequence.undo_append()
                delta: TokenDelta | None = self._output_processors[sequence.request_id].fail(faults[index])
            elif index in ends:
                delta = ends[index]
            elif is_continued[index]:
                continue
            else:
                delta = self._advance(columns.item(index), step.results[index], now)
            deltas[index] = None if delta is None else self._complete(sequence, delta, now)
        return deltas

    def _continue(
        self, step: CollectedStep, indices: np.ndarray, deltas: list[TokenDelta | None]
    ) -> tuple[dict[int, ServingError], dict[int, TokenDelta]]:
        """Apply tokens that end no sequence by themselves, and make their deltas.

        Return the errors of sequences that cannot go on, and the last deltas of those that end by text or constraint.
        """
        table, columns = self._scheduler.table, step.computed.columns
        rows, token_ids = columns.rows[indices], step.results.token_ids[indices]
        table.append(rows, token_ids)
        self._stats.continued(table.times, rows, step.collected_s)
        places = indices.tolist()
        sequences = [columns.sequences[index] for index in places]
        progress = Progress(
            sequences,
            token_ids.tolist(),
            (table.numbers[KNOWN, rows] - table.numbers[PROMPT, rows]).tolist(),
            table.numbers[WORK, rows].tolist(),
            table.times[DEVICE_S, rows].tolist(),
        )
        processors = [self._output_processors[sequence.request_id] for sequence in sequences]
        made, faults = progress.deltas([processor.push for processor in processors])
        for index, delta in zip(places, made, strict=True):
            deltas[index] = delta
        ends, num_forced = {}, 0
        for place in (
            place for place in table.has_stop_or_constraint[rows].nonzero()[0].tolist() if place not in faults
        ):
            try:
                delta = processors[place].follow(made[place])
            except Exception as error:
                faults[place] = fault_of(error)
                continue
            deltas[places[place]] = delta
            num_forced += len(delta.token_ids) - 1
            if delta.finish_reason is not None:
                ends[places[place]] = delta
        self._stats.followed(len(faults), num_forced)
        return {places[place]: fault for place, fault in faults.items()}, ends

    def _advance(self, item: ScheduledSequence, result: ItemResult, now: float) -> TokenDelta | None:
        """Apply a step's result to one sequence; return its delta, or None if there is nothing to show yet."""
        sequence = item.sequence
        if sequence.status is SequenceStatus.FINISHED:
            return None  # It ended while the step was in flight.
        processor = self._output_processors[sequence.request_id]
        if result.error is not None:
            return processor.failed(result.error)
        self._scheduler.computed(item)
        delta = processor.advance(item, result)
        if item.samples and delta is not None:
            self._stats.produced(sequence, now, len(delta.token_ids))
        return delta

    def _complete(self, sequence: Sequence, delta: TokenDelta, now: float) -> TokenDelta:
        """Return a sequence's delta with its times, if a reader needs them anew; the last delta ends the sequence."""
        reason = delta.finish_reason
        if reason is not None or sequence.phases.has_news:
            delta = delta._replace(phases=sequence.phases.read(now, sequence.num_preemptions))
        if reason is not None:
            self._end(sequence, reason)
        return delta

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._stats.finished(sequence, reason, self._clock.monotonic())
        self._scheduler.finish(sequence)
        del self._output_processors[sequence.request_id]

    def _gauges(self, load: ReplicaStats) -> tuple[Metric, ...]:
        settings = gauge(
            "vllm:cache_config_info", "KV cache settings", 1, block_size=str(self._config.block_size),
            cache_dtype=self._config.cache_dtype, num_gpu_blocks=str(self._config.num_blocks),
            enable_prefix_caching=str(self._config.enable_prefix_caching),
        )  # fmt: skip
        usage = gauge("vllm:kv_cache_usage_perc", "blocks held / blocks, 0 to 1", load.kv_usage)
        states = gauge(
            "headway:state_slot_usage_perc", "slots for recurrent state held / slots, 0 to 1", load.state_slot_usage
        )
        budget = gauge(
            "headway:step_token_budget", "tokens a step with decodes may compute", self._scheduler.latency.budget
        )
        start = gauge(START_TIME, "start of the engine, unix seconds", self._start_unix_s)
        return (
            gauge("vllm:num_requests_running", "sequences in the running batch", load.num_running),
            gauge("headway:num_decodes_held", _HELD_HELP, self._scheduler.num_held),
            gauge("vllm:num_requests_waiting", "sequences waiting for a slot", load.num_waiting),
            gauge("vllm:num_requests_waiting_by_reason", "sequences waiting", load.num_waiting, reason="capacity"),
            gauge("headway:num_state_slots", "slots for the recurrent state of sequences", load.num_state_slots),
            *(replace(metric, is_mean=True) for metric in (usage, states, budget, settings, start)),
        )


class Deadlines:
    """Heap of the sequences that have a deadline, earliest first.

    Finished sequences stay in the heap until they are popped or the heap is full. A full heap is cleaned, and may then
    grow to twice its size plus 64 entries.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Sequence]] = []
        self._max_entries = _MIN_DEADLINES

    def add(self, sequence: Sequence) -> None:
        """Add `sequence` if it has a deadline."""
        if sequence.deadline_s is None:
            return
        if len(self._entries) >= self._max_entries:
            self._entries = [entry for entry in self._entries if entry[2].status is not SequenceStatus.FINISHED]
            heapq.heapify(self._entries)
            self._max_entries = 2 * len(self._entries) + _MIN_DEADLINES
        heapq.heappush(self._entries, (sequence.deadline_s, sequence.arrival_index, sequence))

    def pop_expired(self, now: float) -> list[Sequence]:
        """Remove and return the unfinished sequences with a deadline of `now` or earlier."""
        expired = []
        while self._entries and self._entries[0][0] <= now:
            sequence = heapq.heappop(self._entries)[2]
            if sequence.status is not SequenceStatus.FINISHED:
                expired.append(sequence)
        return expired
