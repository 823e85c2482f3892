"""The engine: requests in, one step at a time, deltas out. Synchronous; one thread owns it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

from replicas.engine.batch import ItemResult, ModelRunner, ScheduledBatch, ScheduledSequence
from replicas.engine.block_manager import BlockManager
from replicas.engine.clock import Clock
from replicas.engine.config import EngineConfig
from replicas.engine.detokenizer import Detokenizer, IncrementalDecoder
from replicas.engine.scheduler import Scheduler
from replicas.engine.sequence import Sequence
from replicas.engine.stats import EngineStats, gauge
from replicas.engine.stopping import Stop, length_reached, may_stop_on_text, stop_token
from replicas.engine.waste import WasteCause
from replicas.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoReplicaAvailable,
    Overloaded,
    SequenceFailed,
    ServingError,
)
from replicas.protocol import (
    Band,
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

DecoderFactory = Callable[[GenerateRequest], IncrementalDecoder]
_MAX_FAILED_STEPS = 3


@dataclass(slots=True)
class _Generation:
    """A sequence and the text that comes of it."""

    sequence: Sequence
    detokenizer: Detokenizer


class Engine:
    """Runs every accepted request to its end, many at a time.

    Invariants:
        A request that `add` accepted gets exactly one delta with a finish reason, unless it is aborted.
        A finished, aborted or failed request holds no block when the next step is scheduled.
        With nothing left to do every block is free.
    """

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, decoders: DecoderFactory, identity: ReplicaIdentity,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._runner = runner
        self._decoders = decoders
        self._identity = identity
        self._clock = clock or Clock()
        self._blocks = BlockManager(config)
        self._scheduler = Scheduler(config, self._blocks)
        self._stats = EngineStats(config)
        self._generations: dict[str, _Generation] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._num_added = 0
        self._num_failed_steps = 0
        self._is_draining = False

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._generations)

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
        self._check_size(request)
        self._check_queue(request)
        now = self._clock.monotonic()
        deadline_s = None if request.deadline_unix_s is None else self._clock.from_unix(request.deadline_unix_s)
        arrival_s = now if request.arrival_unix_s is None else min(now, self._clock.from_unix(request.arrival_unix_s))
        sequence = Sequence(request, arrival_s, deadline_s, self._num_added)
        detokenizer = self._detokenizer(request)
        self._num_added += 1
        self._generations[request.request_id] = _Generation(sequence, detokenizer)
        if deadline_s is not None:
            self._forget_old_deadlines()
            heapq.heappush(self._deadlines, (deadline_s, sequence.number, request.request_id))
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
        """Run one iteration; return what changed for each sequence that produced output or ended."""
        deltas = self._expire()
        started_s = self._clock.monotonic()
        batch = self._scheduler.schedule(started_s)
        if batch is None:
            return deltas
        for item in batch.items:
            if item.sequence.first_scheduled_s is None:
                item.sequence.first_scheduled_s = started_s
                self._stats.scheduled_first(item.sequence)
        results = self._execute(batch)
        now = self._clock.monotonic()
        self._stats.stepped(batch, now - started_s, self._is_saturated(batch))
        for item, result in zip(batch.items, results, strict=True):
            delta = self._apply(item, result, now)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def check_invariants(self) -> None:
        """Assert the invariants of everything below; cheap when nothing runs."""
        self._scheduler.check_invariants()
        assert len(self._generations) == len(self._scheduler.running) + len(self._scheduler.waiting)

    def stats(self) -> ReplicaStats:
        """The present load."""
        running, held_blocks = [0] * len(Band), [0] * len(Band)
        outstanding_tokens = self._scheduler.waiting.num_outstanding_tokens
        for sequence in self._scheduler.running:
            running[sequence.effective_band] += 1
            held_blocks[sequence.effective_band] += len(sequence.block_table)
            outstanding_tokens += sequence.num_outstanding_tokens
        return ReplicaStats(
            replica_id=self._identity.replica_id,
            node_id=self._identity.node_id,
            pid=self._identity.pid,
            taken_unix_s=self._clock.unix(),
            num_slots=self._config.max_num_seqs,
            num_blocks=self._config.num_blocks,
            num_free_blocks=self._blocks.num_free_blocks,
            num_running_by_band=tuple(running),
            num_waiting_by_band=self._scheduler.waiting.num_by_band,
            waiting_tokens=self._scheduler.waiting.num_tokens,
            generated_tokens_per_s=self._stats.rate.tokens_per_s,
            is_draining=self._is_draining,
            num_held_blocks_by_band=tuple(held_blocks),
            outstanding_tokens=outstanding_tokens,
            block_size=self._config.block_size,
            saturated_tokens_per_s=self._stats.saturated_rate.tokens_per_s,
        )

    def served_tokens(self) -> tuple[TenantTokens, ...]:
        """Tokens computed for the tenants served last; may be asked from any thread."""
        return self._stats.account.snapshot()

    def metrics(self) -> EngineMetrics:
        """Everything the engine counts."""
        load = self.stats()
        gauges = (
            gauge("vllm:num_requests_running", "sequences in the running batch", load.num_running),
            gauge("vllm:num_requests_waiting", "sequences waiting for a slot", load.num_waiting),
            gauge(
                "vllm:num_requests_waiting_by_reason", "sequences waiting", load.num_waiting, reason="capacity"
            ),
            gauge("vllm:kv_cache_usage_perc", "blocks held / blocks, 0 to 1", load.kv_usage),
            gauge(
                "vllm:cache_config_info", "KV cache settings", 1, block_size=str(self._config.block_size),
                num_gpu_blocks=str(self._config.num_blocks),
                enable_prefix_caching=str(self._config.enable_prefix_caching),
            ),
        )  # fmt: skip
        return EngineMetrics(
            self._identity.replica_id,
            (*gauges, *self._stats.counters(self._scheduler.num_preemptions)),
            self._stats.histograms(),
        )

    def _detokenizer(self, request: GenerateRequest) -> Detokenizer:
        try:
            detokenizer = Detokenizer(self._decoders(request), request.params.stop)
            for index, token_id in enumerate(request.output_token_ids):
                # The reader has this text; what is held back of it is held back again.
                detokenizer.push(token_id, may_stop_on_text(request.params, index + 1))
        except Exception as error:  # Whatever a tokenizer raises is this request's own trouble.
            raise SequenceFailed(f"decoding the output failed: {error}") from error
        return detokenizer

    def _forget_old_deadlines(self) -> None:
        """Drop the deadlines of sequences that have ended, once they are the greater part."""
        if len(self._deadlines) > 2 * len(self._generations) + 64:
            live = {generation.sequence.number for generation in self._generations.values()}
            self._deadlines = [entry for entry in self._deadlines if entry[1] in live]
            heapq.heapify(self._deadlines)

    def _is_saturated(self, batch: ScheduledBatch) -> bool:
        if any(item.sequence.request.runs_alone for item in batch.items):
            return False
        return (
            len(self._scheduler.waiting) > 0
            or len(self._scheduler.running) == self._config.max_num_seqs
            or batch.num_tokens == self._config.max_num_batched_tokens
        )

    def _check_size(self, request: GenerateRequest) -> None:
        if request.request_id in self._generations:
            raise InvalidRequest(f"request id {request.request_id} is in use", "request_id")
        limit = self._config.max_model_len
        if request.max_total_tokens > limit:
            raise InvalidRequest(
                f"prompt has {len(request.prompt_token_ids)} tokens and max_tokens is {request.params.max_tokens}, "
                f"together {request.max_total_tokens}; the model accepts {limit}",
                "max_tokens",
                "context_length_exceeded",
            )

    def _check_queue(self, request: GenerateRequest) -> None:
        waiting = self._scheduler.waiting
        num_free_slots = self._config.max_num_seqs - len(self._scheduler.running)
        if len(waiting) < num_free_slots:
            return
        num_queued = len(waiting) - num_free_slots + 1
        if num_queued > self._config.max_queued_requests:
            self._refuse("requests", num_queued, self._config.max_queued_requests, "reqs")
        num_tokens = waiting.num_tokens + request.max_total_tokens
        if num_tokens > self._config.max_queued_tokens:
            self._refuse("tokens", num_tokens, self._config.max_queued_tokens, "tokens")

    def _refuse(self, what: str, value: int, limit: int, reason: str) -> None:
        """Raise `Overloaded` with the time in which the queue drains at the present rate."""
        reason = f"max_num_queued_{reason}"
        self._stats.rejected(reason)
        rate = self._stats.saturated_rate.tokens_per_s
        retry_after_s = self._scheduler.waiting.num_outstanding_tokens / rate if rate > 0 else 1.0
        raise Overloaded(f"the queue would hold {value} {what}; its limit is {limit}", retry_after_s, reason)

    def _expire(self) -> list[TokenDelta]:
        now = self._clock.monotonic()
        deltas = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_s, number, request_id = heapq.heappop(self._deadlines)
            generation = self._generations.get(request_id)
            if generation is not None and generation.sequence.number == number:
                sequence = generation.sequence
                self._stats.waste.add(WasteCause.EXPIRED, sequence.num_spent_tokens)
                error = DeadlineExceeded(
                    f"the deadline, {deadline_s - sequence.arrival_s:.3f} s after arrival, passed with "
                    f"{sequence.num_output_tokens} output tokens generated"
                )
                deltas.append(self._fail(sequence, error))
        return deltas

    def _execute(self, batch: ScheduledBatch) -> list[ItemResult]:
        """Run the batch; if it fails as a whole, run its items alone, so that only the guilty fail.

        Computing an item twice writes the same KV, so this is safe. A device that fails every
        item of a batch, or several steps in a row, is broken: the error goes up and ends the engine.
        """
        try:
            results = self._runner.execute(batch)
        except Exception as error:
            self._num_failed_steps += 1
            results = [self._execute_alone(item, error) for item in batch.items]
            fails_everything = len(results) > 1 and all(result.error is not None for result in results)
            if fails_everything or self._num_failed_steps >= _MAX_FAILED_STEPS:
                raise
            return results
        self._num_failed_steps = 0
        return results

    def _execute_alone(self, item: ScheduledSequence, cause: Exception) -> ItemResult:
        try:
            return self._runner.execute(ScheduledBatch((item,)))[0]
        except Exception as error:
            return ItemResult(error=f"{type(error).__name__} while computing the sequence: {error} ({cause})")

    def _apply(self, item: ScheduledSequence, result: ItemResult, now: float) -> TokenDelta | None:
        """Let the step's result change the sequence; None if there is nothing to tell yet."""
        sequence = item.sequence
        if result.error is not None:
            return self._fail(sequence, SequenceFailed(result.error))
        samples = item.samples
        prompt_logprobs = sequence.take_prompt_logprobs(item.start, result.prompt_logprobs)
        self._scheduler.computed(sequence, item.num_tokens)
        if item.start < sequence.num_lost_tokens:
            num_again = min(item.end, sequence.num_lost_tokens) - item.start
            self._stats.waste.add(WasteCause.PREEMPT, num_again)
        if not samples:
            is_scored = not sequence.can_sample and sequence.num_uncomputed_tokens == 0
            stop = Stop(FinishReason.LENGTH) if is_scored else None
            if stop is None and not prompt_logprobs:
                return None
            return self._delta(sequence, (), "", stop, prompt_logprobs=prompt_logprobs)
        assert result.token_id is not None
        sequence.token_ids.append(result.token_id)
        self._stats.produced(sequence, now)
        try:
            text, stop = self._read(sequence, result.token_id)
        except Exception as error:  # A tokenizer's decoder failed on this sequence's tokens; the others are fine.
            del sequence.token_ids[-1]
            return self._fail(sequence, SequenceFailed(f"decoding the output failed: {error}"))
        logprobs = () if result.logprobs is None else (result.logprobs,)
        return self._delta(sequence, (result.token_id,), text, stop, logprobs, prompt_logprobs)

    def _read(self, sequence: Sequence, token_id: int) -> tuple[str, Stop | None]:
        """Text that the newest token makes known, and whether the sequence ends with it."""
        detokenizer = self._generations[sequence.request_id].detokenizer
        stop = stop_token(sequence, self._config.eos_token_ids)
        text = (
            ""
            if stop
            else detokenizer.push(token_id, may_stop_on_text(sequence.request.params, sequence.num_output_tokens))
        )
        if detokenizer.stop_string is not None:
            stop = Stop(FinishReason.STOP, detokenizer.stop_string)
        stop = stop or length_reached(sequence)
        return (text + detokenizer.finish() if stop else text), stop

    def _delta(
        self, sequence: Sequence, token_ids: tuple[int, ...], text: str, stop: Stop | None,
        logprobs: tuple[PositionLogprobs, ...] = (), prompt_logprobs: tuple[PositionLogprobs, ...] = (),
    ) -> TokenDelta:  # fmt: skip
        if stop is not None:
            self._end(sequence, stop.reason)
        return TokenDelta(
            request_id=sequence.request_id,
            start=sequence.num_output_tokens - len(token_ids),
            token_ids=token_ids,
            text=text,
            usage=Usage(sequence.num_prompt_tokens, sequence.num_output_tokens, sequence.num_cached_tokens or 0),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=stop.reason if stop else None,
            stop_reason=stop.cause if stop else None,
        )

    def _fail(self, sequence: Sequence, error: ServingError) -> TokenDelta:
        return replace(self._delta(sequence, (), "", Stop(FinishReason.ERROR)), error=error)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.finish(sequence)
        del self._generations[sequence.request_id]
        self._stats.finished(sequence, reason, self._clock.monotonic())
