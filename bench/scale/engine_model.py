"""Model of a replica for large simulations: what its scheduler decides, with far less computation.

It has the slots, bands, preemptions, token budget, prefix cache and step times of the real engine. Between two deltas
of a sequence it computes nothing for it: a step costs the same however many sequences decode. It leaves out the blocks
(there are always enough), fairness between the tenants of one band, deadlines, and sequences that run alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field, replace

from replicas.engine.config import EngineConfig
from replicas.engine.stats import TenantUsage, TokenRate
from replicas.errors import NoReplicaAvailable
from replicas.protocol import (
    BANDS,
    Band,
    EngineMetrics,
    FinishReason,
    GenerateRequest,
    IngressShare,
    ReplicaStats,
    TokenDelta,
    Usage,
)
from testkit.engine.timed_runner import StepShape, StepTimes
from testkit.router.simulated_engines import TOKENS_TOGETHER, DeltaStream
from testkit.router.simulated_time import FakeClock, settle_down

_TOKEN_ID = 16


class _PrefixCache:
    """Blocks of prompts, those used longest ago forgotten first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, prompt: tuple[int, ...]) -> int:
        """Return the number of a prompt's first tokens that are cached; its last token never counts."""
        cached = itertools.takewhile(self._blocks.__contains__, self._hashes(prompt[:-1]))
        return self._block_size * sum(1 for _ in cached)

    def add(self, prompt: tuple[int, ...]) -> None:
        """Add the full blocks of a prompt that was computed."""
        for block in self._hashes(prompt):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)

    def _hashes(self, prompt: tuple[int, ...]) -> Iterator[int]:
        block_hash = 0
        for end in range(self._block_size, len(prompt) + 1, self._block_size):
            block_hash = hash((block_hash, prompt[end - self._block_size : end]))
            yield block_hash


@dataclass(eq=False, slots=True)
class _Sequence:
    request: GenerateRequest
    num_uncomputed: int
    """Known tokens that are to be computed before the next one is generated."""
    num_output: int
    """Output tokens at the start of the present decoding, or all if it does not decode."""
    num_sent: int
    """Output tokens in the deltas so far."""
    stream: DeltaStream = field(default_factory=DeltaStream)
    num_cached: int = 0
    decodes_since: int | None = None
    """Number of the last step before the present decoding; None: it does not decode."""
    num_decodings: int = 0
    was_admitted: bool = False

    @property
    def band(self) -> Band:
        """Band in which it is scheduled."""
        return Band.INTERACTIVE if self.request.is_promoted else self.request.band

    def num_output_at(self, step: int) -> int:
        """Return the number of output tokens after a step."""
        return self.num_output + (0 if self.decodes_since is None else step - self.decodes_since)

    def num_outstanding_at(self, step: int) -> int:
        """Return the number of tokens to compute after a step, the expected output among them."""
        expected = self.request.expected_output_tokens
        if expected is None:
            expected = self.request.params.max_tokens
        return max(1, self.num_uncomputed) + max(0, expected - self.num_output_at(step))


class ModelledEngine:
    """Model of one replica; a `SimulatedReplica`.

    Invariant: a sequence is in exactly one of `_waiting`, `_prefilling` and `_decoding`, and in the latter two it has a
    slot in `_running`.
    """

    def __init__(self, config: EngineConfig, step_times: StepTimes, clock: FakeClock, replica_id: str) -> None:
        self.replica_id = replica_id
        self._config = config
        self._step_times = step_times
        self._clock = clock
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: dict[Band, OrderedDict[_Sequence, None]] = {band: OrderedDict() for band in BANDS}
        self._running: dict[Band, OrderedDict[_Sequence, None]] = {band: OrderedDict() for band in BANDS}
        self._prefilling: dict[_Sequence, None] = {}
        self._decoding: dict[_Sequence, None] = {}
        self._due: defaultdict[int, list[tuple[_Sequence, int]]] = defaultdict(list)
        """Sequences, with the numbers of their decodings, by the step after which a delta is due."""
        self._num_context_tokens = 0
        """Tokens of the sequences that decode."""
        self._step = 0
        self._cache = _PrefixCache(config.num_blocks, config.block_size)
        self._rate, self._saturated_rate, self._usage = TokenRate(), TokenRate(), TenantUsage()
        self._is_draining = False
        self._version = 1
        self._stats: ReplicaStats | None = None
        """Load since the last change; None: it is not computed yet."""
        self._has_work = asyncio.Event()

    async def run(self) -> None:
        """Run steps until cancelled."""
        while True:
            await self._has_work.wait()
            self._admit()
            if not (self._prefilling or self._decoding):
                self._has_work.clear()
                continue
            prefilled, shape = self._schedule()
            step_s = self._step_times.of(shape)
            await asyncio.sleep(step_s)
            self._count(shape, step_s)
            self._finish(prefilled)
            await settle_down(3)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of one request."""
        if self._is_draining:
            raise NoReplicaAvailable("the replica is draining", "draining")
        num_output = len(request.output_token_ids)
        sequence = _Sequence(request, request.num_known_tokens, num_output, num_output)
        self._sequences[request.request_id] = sequence
        self._waiting[request.band][sequence] = None
        self._changed()
        self._has_work.set()
        try:
            has_ended = False
            while not has_ended:
                delta = await sequence.stream.take()
                has_ended = delta.finish_reason is not None
                yield replace(delta, stats=self._load())
        finally:
            del self._sequences[request.request_id]
            self._remove(sequence)
            self._waiting[request.band].pop(sequence, None)
            self._changed()

    def stats(self) -> ReplicaStats:
        """Return the answer to a poll."""
        return replace(self._load(), served_tokens=self._usage.snapshot())

    def metrics(self) -> EngineMetrics:
        """Return no metrics: the model has none."""
        return EngineMetrics(self.replica_id, (), ())

    def drain(self) -> None:
        """Refuse new requests."""
        self._is_draining = True
        self._changed()

    def die(self) -> None:
        """Fail all streams; the engine does nothing more."""
        self._has_work.clear()
        for sequence in self._sequences.values():
            sequence.stream.fail()

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        waiting = [each for its in self._waiting.values() for each in its]
        slots = [each for its in self._running.values() for each in its]
        assert set(slots) == self._prefilling.keys() | self._decoding.keys()
        assert len(slots) == len(self._prefilling) + len(self._decoding) <= self._config.max_num_seqs
        assert sorted(map(id, [*waiting, *slots])) == sorted(map(id, self._sequences.values()))
        lengths = (len(each.request.prompt_token_ids) + each.num_output_at(self._step) for each in self._decoding)
        assert self._num_context_tokens == sum(lengths)

    def _changed(self) -> None:
        self._version += 1
        self._stats = None

    def _admit(self) -> None:
        """Give slots to waiting sequences, the most urgent first; one in a slot gives way to a more urgent one."""
        for band in BANDS:
            waiting = self._waiting[band]
            while waiting:
                sequence = next(iter(waiting))
                if len(self._prefilling) + len(self._decoding) >= self._config.max_num_seqs:
                    victim = self._least_urgent(than=sequence.band)
                    if victim is None:
                        break
                    self._preempt(victim)
                del waiting[sequence]
                self._running[sequence.band][sequence] = None
                self._prefilling[sequence] = None
                if not sequence.was_admitted:
                    sequence.was_admitted = True
                    sequence.num_cached = self._cache.num_cached(sequence.request.prompt_token_ids)
                    sequence.num_uncomputed -= sequence.num_cached

    def _least_urgent(self, than: Band) -> _Sequence | None:
        """Return the newest running sequence of the least urgent band below another one."""
        bands = (band for band in reversed(BANDS) if band > than and self._running[band])
        return next((next(reversed(self._running[band])) for band in bands), None)

    def _preempt(self, sequence: _Sequence) -> None:
        self._remove(sequence)
        # Its full blocks are still cached when it runs again.
        sequence.num_uncomputed = sequence.num_uncomputed or self._config.block_size
        waiting = self._waiting[sequence.request.band]
        waiting[sequence] = None
        waiting.move_to_end(sequence, last=False)

    def _remove(self, sequence: _Sequence) -> None:
        """Take a sequence out of its slot, if it has one."""
        self._running[sequence.band].pop(sequence, None)
        self._prefilling.pop(sequence, None)
        if sequence in self._decoding:
            del self._decoding[sequence]
            sequence.num_output, sequence.decodes_since = sequence.num_output_at(self._step), None
            self._num_context_tokens -= len(sequence.request.prompt_token_ids) + sequence.num_output

    def _schedule(self) -> tuple[list[_Sequence], StepShape]:
        """Return the sequences whose prefill ends with the next step, and the step's shape."""
        budget = self._config.max_num_batched_tokens - len(self._decoding)
        num_prefill_tokens, num_context_tokens = 0, self._num_context_tokens + len(self._decoding)
        prefilled = []
        for sequence in self._prefilling:
            num_tokens = min(sequence.num_uncomputed, budget - num_prefill_tokens)
            if num_tokens <= 0:
                break
            sequence.num_uncomputed -= num_tokens
            num_prefill_tokens += num_tokens
            num_context_tokens += len(sequence.request.prompt_token_ids) + sequence.num_output - sequence.num_uncomputed
            if not sequence.num_uncomputed:
                prefilled.append(sequence)
        return prefilled, StepShape(len(self._decoding), num_prefill_tokens, num_context_tokens)

    def _count(self, shape: StepShape, step_s: float) -> None:
        num_tokens = shape.num_decodes + shape.num_prefill_tokens
        self._rate.step(step_s, num_tokens)
        if len(self._prefilling) + len(self._decoding) >= self._config.max_num_seqs or any(self._waiting.values()):
            self._saturated_rate.step(step_s, num_tokens)

    def _finish(self, prefilled: list[_Sequence]) -> None:
        """Count the tokens of a step, and send the deltas that are due after it."""
        self._num_context_tokens += len(self._decoding)
        self._step += 1
        for sequence in prefilled:
            if sequence in self._prefilling:  # else its reader has left
                del self._prefilling[sequence]
                self._cache.add(sequence.request.prompt_token_ids)
                self._decoding[sequence] = None
                sequence.decodes_since = self._step - 1
                sequence.num_decodings += 1
                self._num_context_tokens += len(sequence.request.prompt_token_ids) + sequence.num_output_at(self._step)
                self._due[self._step].append((sequence, sequence.num_decodings))
        for sequence, decoding in self._due.pop(self._step, ()):
            if sequence in self._decoding and sequence.num_decodings == decoding:
                self._send(sequence)
        self._changed()

    def _send(self, sequence: _Sequence) -> None:
        request, num_output = sequence.request, sequence.num_output_at(self._step)
        num_new, num_left = num_output - sequence.num_sent, request.params.max_tokens - num_output
        usage = Usage(len(request.prompt_token_ids), num_output, sequence.num_cached)
        reason = None if num_left else FinishReason.LENGTH
        tokens = (_TOKEN_ID,) * num_new
        sequence.stream.put(TokenDelta(request.request_id, sequence.num_sent, tokens, "", usage, finish_reason=reason))
        num_computed = num_new if sequence.num_sent else num_new + len(request.prompt_token_ids) - sequence.num_cached
        self._usage.add(request.tenant, request.band, num_computed)
        sequence.num_sent = num_output
        if num_left:
            self._due[self._step + min(TOKENS_TOGETHER, num_left)].append((sequence, sequence.num_decodings))
        else:
            self._remove(sequence)

    def _load(self) -> ReplicaStats:
        if self._stats is None:
            self._stats = self._computed_load()
        return self._stats

    def _computed_load(self) -> ReplicaStats:
        step, block_size = self._step, self._config.block_size
        parts: dict[str, list[int]] = {}
        for band, sequences in self._counted():
            for sequence in sequences:
                part = parts.setdefault(sequence.request.ingress_id, [0] * (len(BANDS) + 1))
                part[band] += 1
                part[-1] += sequence.num_outstanding_at(step)
        num_held = self._num_context_tokens // block_size + len(self._decoding)
        return ReplicaStats(
            replica_id=self.replica_id,
            node_id="node",
            pid=1,
            taken_unix_s=self._clock.unix(),
            num_slots=self._config.max_num_seqs,
            num_blocks=self._config.num_blocks,
            num_free_blocks=max(0, self._config.num_blocks - num_held),
            num_running_by_band=tuple(len(self._running[band]) for band in BANDS),
            num_waiting_by_band=tuple(len(self._waiting[band]) for band in BANDS),
            waiting_tokens=sum(each.request.max_total_tokens for its in self._waiting.values() for each in its),
            generated_tokens_per_s=self._rate.tokens_per_s if self._sequences else 0.0,
            is_draining=self._is_draining,
            outstanding_tokens=sum(part[-1] for part in parts.values()),
            by_ingress=tuple(IngressShare(name, tuple(part[:-1]), part[-1]) for name, part in parts.items()),
            saturated_tokens_per_s=self._saturated_rate.tokens_per_s,
            block_size=block_size,
            version=self._version,
        )

    def _counted(self) -> Iterator[tuple[Band, OrderedDict[_Sequence, None]]]:
        """Yield all sequences, by the bands in which reports count them."""
        yield from self._running.items()
        yield from self._waiting.items()
