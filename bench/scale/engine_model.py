"""Model of a replica for large simulations: what its scheduler decides, with far less computation.

It has the slots, bands, preemptions, token budget, prefix cache and step times of the real engine, and promoted
sequences. A sequence that decodes is touched only when a delta is due. It leaves out the blocks (there are always
enough), fairness between the tenants of one band, promotion by the engine itself, limits of the queue, deadlines, and
sequences that run alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
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
from testkit.router.simulated_engines import TOKENS_TOGETHER, WAIT_S, DeltaStream
from testkit.router.simulated_time import FakeClock, settle_down

_TOKEN_ID = 16


class _PrefixCache:
    """Blocks of prompts by the hashes of all tokens up to their ends; those used longest ago are forgotten first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, hashes: Sequence[int]) -> int:
        """Return the number of a prompt's first blocks that are cached."""
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, hashes))

    def add(self, hashes: Iterable[int]) -> None:
        """Add blocks that were computed."""
        for block_hash in hashes:
            self._blocks[block_hash] = None
            self._blocks.move_to_end(block_hash)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)


def _block_hashes(prompt: tuple[int, ...], block_size: int) -> list[int]:
    hashes = [0]
    for end in range(block_size, len(prompt) + 1, block_size):
        hashes.append(hash((hashes[-1], prompt[end - block_size : end])))
    return hashes[1:]


@dataclass(eq=False, slots=True)
class _Sequence:
    request: GenerateRequest
    block_hashes: list[int]
    """Hashes of the prompt's full blocks."""
    num_uncomputed: int
    """Known tokens that are to be computed before the next one is generated."""
    num_output: int
    """Output tokens at the start of the present decoding, or all if it does not decode."""
    num_sent: int
    """Output tokens in the deltas so far, and those that the request came with."""
    stream: DeltaStream = field(default_factory=DeltaStream)
    num_cached: int | None = None
    """Prompt tokens that were cached when it got its first slot; None: it had none yet."""
    decodes_since: int | None = None
    """Number of the last step before the present decoding; None: it does not decode."""
    num_decodings: int = 0

    @property
    def band(self) -> Band:
        """Band in which it runs."""
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


@dataclass(slots=True)
class _Step:
    """Step that is being scheduled."""

    num_tokens_left: int
    num_decodes: int
    num_context_tokens: int
    num_prefill_tokens: int = 0
    prefilled: list[_Sequence] = field(default_factory=list)
    """Sequences whose prefill ends with the step."""
    completed: dict[int, None] = field(default_factory=dict)
    """Hashes of the blocks of prompts that it completes."""

    def prefill(self, sequence: _Sequence, block_size: int) -> None:
        """Schedule as many tokens of a sequence as there are left."""
        num_tokens = min(sequence.num_uncomputed, self.num_tokens_left)
        num_known = len(sequence.request.prompt_token_ids) + sequence.num_output
        start = num_known - sequence.num_uncomputed
        sequence.num_uncomputed -= num_tokens
        self.num_tokens_left -= num_tokens
        self.num_prefill_tokens += num_tokens
        self.num_context_tokens += start + num_tokens
        self.completed.update(
            dict.fromkeys(sequence.block_hashes[start // block_size : (start + num_tokens) // block_size])
        )
        if not sequence.num_uncomputed:
            self.prefilled.append(sequence)


class ModelledEngine:
    """Model of one replica; a `SimulatedReplica`.

    Invariants:
        A sequence is in exactly one of `_waiting`, `_prefilling` and `_decoding`, and in the latter two it has a slot
        in `_running`.
        `_num_context_tokens` is the sum over the sequences that decode.
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
        self._cache = _PrefixCache(config.num_blocks)
        self._in_flight: Iterable[int] = ()
        """Hashes of the blocks that the present step computes."""
        self._num_leaving = 0
        """Sequences that ended with the last step: the next one is scheduled before their slots are free."""
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
            if not self._sequences:
                self._has_work.clear()
                continue
            step = self._schedule()
            shape = StepShape(step.num_decodes, step.num_prefill_tokens, step.num_context_tokens)
            is_saturated = self._is_saturated(step)
            step_s = self._step_times.of(shape) if shape.num_context_tokens else WAIT_S
            await asyncio.sleep(step_s)
            self._rate.step(step_s, step.num_decodes + len(step.prefilled))
            if is_saturated:
                self._saturated_rate.step(step_s, step.num_decodes + step.num_prefill_tokens)
            self._finish(step)
            await settle_down(3)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Yield the deltas of one request."""
        if self._is_draining:
            raise NoReplicaAvailable("the replica is draining", "draining")
        num_output = len(request.output_token_ids)
        hashes = _block_hashes(request.prompt_token_ids, self._config.block_size)
        sequence = _Sequence(request, hashes, request.num_known_tokens, num_output, num_output)
        self._sequences[request.request_id] = sequence
        self._wait(sequence, is_first=request.is_promoted)
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
        """Fail all streams."""
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

    def _schedule(self) -> _Step:
        """Schedule a step: a token of each sequence that decodes, then prompts, those of the most urgent band first."""
        num_decodes = len(self._decoding)
        step = _Step(self._config.max_num_batched_tokens - num_decodes, num_decodes, self._num_context_tokens)
        for band in BANDS:
            for sequence in [each for each in self._prefilling if each.request.band is band]:
                if step.num_tokens_left > 0:
                    step.prefill(sequence, self._config.block_size)
            self._admit(step, band)
        # As with `async_scheduling`, a step is scheduled before the results of the one before are there.
        self._cache.add(self._in_flight)
        self._in_flight = step.completed
        self._num_leaving = 0
        return step

    def _admit(self, step: _Step, band: Band) -> None:
        """Give slots to the waiting sequences of a band while the step has tokens left for them."""
        for sequence in list(self._waiting[band]):
            if step.num_tokens_left <= 0:
                return
            is_full = self._num_slots_taken >= self._config.max_num_seqs
            victim = self._least_urgent(than=band) if is_full else None
            if is_full and sequence.request.is_promoted:
                continue  # It waits for a free slot.
            if is_full and victim is None:
                return
            if sequence.num_cached is None and not self._find_prefix(step, sequence):
                continue
            if victim is not None:
                self._preempt(victim, step)
            del self._waiting[band][sequence]
            self._running[sequence.band][sequence] = None
            self._prefilling[sequence] = None
            step.prefill(sequence, self._config.block_size)

    def _find_prefix(self, step: _Step, sequence: _Sequence) -> bool:
        """Look a prompt up in the prefix cache; return False if it waits, as the step computes its next block."""
        block_size = self._config.block_size
        # The last token of a prompt is always computed.
        hashes = sequence.block_hashes[: (len(sequence.request.prompt_token_ids) - 1) // block_size]
        num_cached = self._cache.num_cached(hashes)
        if num_cached < len(hashes) and hashes[num_cached] in step.completed:
            return False
        sequence.num_cached = num_cached * block_size
        sequence.num_uncomputed -= sequence.num_cached
        return True

    def _least_urgent(self, than: Band) -> _Sequence | None:
        """Return the newest running sequence of the least urgent band below another one."""
        bands = (band for band in reversed(BANDS) if band > than and self._running[band])
        return next((next(reversed(self._running[band])) for band in bands), None)

    def _preempt(self, sequence: _Sequence, step: _Step) -> None:
        """Take the slot of a sequence, whose prefill is not in this step yet."""
        if sequence in self._decoding:
            step.num_tokens_left += 1
            step.num_decodes -= 1
            step.num_context_tokens -= len(sequence.request.prompt_token_ids) + sequence.num_output_at(self._step)
        self._remove(sequence)
        # Its full blocks are still cached when it runs again.
        sequence.num_uncomputed = sequence.num_uncomputed or self._config.block_size
        self._wait(sequence, is_first=True)

    def _wait(self, sequence: _Sequence, is_first: bool) -> None:
        waiting = self._waiting[sequence.request.band]
        waiting[sequence] = None
        if is_first:
            waiting.move_to_end(sequence, last=False)

    @property
    def _num_slots_taken(self) -> int:
        return len(self._prefilling) + len(self._decoding) + self._num_leaving

    def _is_saturated(self, step: _Step) -> bool:
        is_full = self._num_slots_taken >= self._config.max_num_seqs or step.num_tokens_left <= 0
        return is_full or any(self._waiting.values())

    def _remove(self, sequence: _Sequence) -> None:
        """Take a sequence out of its slot, if it has one."""
        self._running[sequence.band].pop(sequence, None)
        self._prefilling.pop(sequence, None)
        if sequence in self._decoding:
            del self._decoding[sequence]
            sequence.num_output, sequence.decodes_since = sequence.num_output_at(self._step), None
            self._num_context_tokens -= len(sequence.request.prompt_token_ids) + sequence.num_output

    def _finish(self, step: _Step) -> None:
        """Count the tokens of a step, and send the deltas that are due after it."""
        self._num_context_tokens += len(self._decoding)
        self._step += 1
        for sequence in step.prefilled:
            if sequence in self._prefilling:  # else its reader has left
                del self._prefilling[sequence]
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
        num_cached = sequence.num_cached or 0
        usage = Usage(len(request.prompt_token_ids), num_output, num_cached)
        reason = None if num_left else FinishReason.LENGTH
        tokens = (_TOKEN_ID,) * num_new
        sequence.stream.put(TokenDelta(request.request_id, sequence.num_sent, tokens, "", usage, finish_reason=reason))
        is_first = sequence.num_sent == len(request.output_token_ids)
        self._usage.add(
            request.tenant, request.band, num_new + (request.num_known_tokens - num_cached if is_first else 0)
        )
        sequence.num_sent = num_output
        if num_left:
            self._due[self._step + min(TOKENS_TOGETHER, num_left)].append((sequence, sequence.num_decodings))
        else:
            self._remove(sequence)
            self._num_leaving += 1

    def _load(self) -> ReplicaStats:
        if self._stats is None:
            self._stats = self._computed_load()
        return self._stats

    def _computed_load(self) -> ReplicaStats:
        parts: dict[str, list[int]] = {}
        for band, sequences in self._counted():
            for sequence in sequences:
                part = parts.setdefault(sequence.request.ingress_id, [0] * (len(BANDS) + 1))
                part[band] += 1
                part[-1] += sequence.num_outstanding_at(self._step)
        return ReplicaStats(
            replica_id=self.replica_id,
            node_id="node",
            pid=1,
            taken_unix_s=self._clock.unix(),
            num_slots=self._config.max_num_seqs,
            num_blocks=self._config.num_blocks,
            num_free_blocks=self._config.num_blocks,
            num_running_by_band=tuple(len(self._running[band]) for band in BANDS),
            num_waiting_by_band=tuple(len(self._waiting[band]) for band in BANDS),
            waiting_tokens=sum(each.request.max_total_tokens for its in self._waiting.values() for each in its),
            generated_tokens_per_s=self._rate.tokens_per_s if self._sequences else 0.0,
            is_draining=self._is_draining,
            outstanding_tokens=sum(part[-1] for part in parts.values()),
            by_ingress=tuple(IngressShare(name, tuple(part[:-1]), part[-1]) for name, part in parts.items()),
            saturated_tokens_per_s=self._saturated_rate.tokens_per_s,
            block_size=self._config.block_size,
            version=self._version,
        )

    def _counted(self) -> Iterator[tuple[Band, OrderedDict[_Sequence, None]]]:
        """Yield all sequences, by the bands in which reports count them."""
        yield from self._running.items()
        yield from self._waiting.items()
