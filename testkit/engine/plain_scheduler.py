"""Plain scheduler: goes over every running sequence in every step, as a reference for the one with arrays.

Its sequences have no columns in a table, so its engine applies each token on its own.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from replicas.engine.batch import (
    BatchColumns,
    CollectedStep,
    ModelRunner,
    ScheduledBatch,
    ScheduledSequence,
    StepResults,
)
from replicas.engine.block_manager import BlockManager
from replicas.engine.config import EngineConfig
from replicas.engine.engine import Engine
from replicas.engine.ingress_parts import IngressParts
from replicas.engine.output_processor import DecoderFactory
from replicas.engine.pipeline import Pipeline
from replicas.engine.scheduler import Scheduler
from replicas.engine.sequence import Phase, Sequence, SequenceStatus
from replicas.engine.sequence_table import RunningLoad, SequenceTable
from replicas.engine.state_slots import StateSlots
from replicas.engine.step_plan import StepPlan
from replicas.engine.tpot_limits import TpotLimits
from replicas.protocol import BANDS, Band, ReplicaIdentity
from replicas.timing.clock import Clock


class _NoTable(SequenceTable):
    """Table without sequences. Its columns are never those of a sequence."""

    def enter(self, sequence: Sequence) -> None:
        pass

    def leave(self, sequence: Sequence) -> None:
        pass

    def promoted(self, sequence: Sequence) -> None:
        pass

    def check_invariants(self, running: list[Sequence]) -> None:
        pass


class _PlainPlan(StepPlan):
    """Plan of one step with all its sequences in a dictionary, in order of the batch."""

    def __init__(self, config: EngineConfig, running: list[Sequence], held: Collection[Sequence]) -> None:
        self._config = config
        self._scheduled: dict[Sequence, int] = {}
        self._prefilling = []
        self.decoding_bands: list[Band] = []
        for sequence in running:
            if sequence in held:
                continue
            if sequence.is_decoding:
                self._scheduled[sequence] = 1
                if not self.decoding_bands or self.decoding_bands[-1] is not sequence.request.band:
                    self.decoding_bands.append(sequence.request.band)
            elif sequence.is_prefilling:
                self._prefilling.append(sequence)
        self.num_scheduled_tokens = len(self._scheduled)
        self._num_long = 0
        self._completed_hashes: set[bytes] = set()
        self._limit = config.max_num_batched_tokens
        for sequence in self._scheduled:
            if sequence.num_forced_tokens:
                self.schedule(sequence, sequence.num_forced_tokens)
        self.num_decode_tokens = self.num_scheduled_tokens

    def unschedule(self, sequence: Sequence) -> None:
        num_scheduled = self._scheduled.pop(sequence, 0)
        self.num_scheduled_tokens -= num_scheduled
        if num_scheduled and self.is_long(sequence):
            self._num_long -= 1

    def batch(self, states: StateSlots) -> ScheduledBatch | None:
        if not self._scheduled:
            return None
        items = []
        for sequence, num_scheduled in self._scheduled.items():
            start = sequence.num_scheduled_tokens
            move = states.move(sequence, start, start + num_scheduled)
            items.append(ScheduledSequence.of(sequence, start, num_scheduled, move))
        return ScheduledBatch(tuple(items), tuple(self.decoding_bands))


class _PlainLimits(TpotLimits):
    """Limits that sort the decodes in each step."""

    def held(self, running: list[Sequence], least_urgent: Band) -> frozenset[Sequence]:
        self._prompt_tokens.clear()
        self._num_tokens = self._max_num_tokens
        decoding = [sequence for sequence in running if sequence.is_decoding]
        held: set[Sequence] = set()
        for band, controller in self._controllers.items():
            has_streams = any(sequence.band is band and sequence not in held for sequence in decoding)
            if has_streams and running[0].effective_band < least_urgent and band < least_urgent:
                others = [s for s in decoding if s.effective_band > band and s not in held]
                others.sort(key=lambda sequence: -sequence.num_held_steps)
                held.update(others[self._limit_prompts(band, controller, len(others)) :])
        for sequence in held:
            sequence.num_held_steps += 1
        return frozenset(held)

    def stepped(self, step: CollectedStep) -> None:
        items = step.batch.items
        decodes = [item.sequence for item in items if item.sequence.phases.phase is Phase.DECODE]
        for band, controller in self._controllers.items():
            gaps_s = np.array([_gap_s(step, sequence) for sequence in decodes if sequence.band is band])
            num_less_urgent = sum(item.num_tokens for item in items if item.sequence.effective_band > band)
            if len(gaps_s) and num_less_urgent:
                has_decodes = any(sequence.effective_band > band for sequence in decodes)
                controller.observe(gaps_s, num_less_urgent, has_decodes)
            elif len(gaps_s) and step.batch.num_tokens == len(decodes):
                controller.refer(float(gaps_s[0]))


def _gap_s(step: CollectedStep, sequence: Sequence) -> float:
    return step.collected_s - (sequence.last_token_s or 0.0)


class PlainScheduler(Scheduler):
    """Scheduler without arrays. It shares the rules of admission and preemption with the other."""

    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        super().__init__(config, blocks)
        self.table = _NoTable(2 * config.num_slots)
        self.tpot_limits: _PlainLimits = _PlainLimits(config, self.table)

    def add(self, sequence: Sequence, now: float) -> None:
        sequence.phases.begin(now)
        if not self._wants_prefill(sequence.band, self._all_prefilling()):
            self._served_s[sequence.band] = max(self._served_s[sequence.band], min(now, sequence.arrival_s))
        self.waiting.add(sequence)

    def schedule(self, now: float) -> ScheduledBatch | None:
        self._num_steps += 1
        self._now_s = now
        for band in list(Band)[1:]:
            starves = now - self._served_s[band] >= self._config.promote_after_s
            if self._wants_prefill(band, self._all_prefilling()) and starves:
                self._promote(band, self._all_prefilling())
                self._served_s[band] = now
        self._grow_all()
        held = self.tpot_limits.held(self.running, self._least_urgent)
        self.num_held = len(held)
        plan = _PlainPlan(self._config, self.running, held)
        for band in plan.decoding_bands:
            self._served_s[band] = now
        for band in BANDS:
            plan.limit(self._most_tokens(plan, band))
            self._schedule_prefills(plan, band, now)
        return plan.batch(self.blocks.states)

    def launched(self, batch: ScheduledBatch) -> None:
        for item in batch.items:
            item.sequence.launched(item.num_tokens, item.samples)

    def continued(self, columns: BatchColumns, results: StepResults) -> np.ndarray:
        return np.zeros(len(columns.sequences), bool)

    def load(self) -> RunningLoad:
        running, held_blocks = [0] * len(BANDS), [0] * len(BANDS)
        parts = IngressParts()
        for sequence in self.running:
            running[sequence.effective_band] += 1
            held_blocks[sequence.effective_band] += sequence.num_blocks
            parts.count(sequence, sequence.effective_band)
        return RunningLoad(tuple(running), tuple(held_blocks), parts.shares())

    def _all_prefilling(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.is_prefilling]

    def _grow_all(self) -> None:
        for sequence in self.running.copy():
            if sequence.num_tokens <= len(sequence.block_table) * self._config.block_size:
                continue
            while sequence.status is SequenceStatus.RUNNING:
                if self.blocks.can_grow(sequence, sequence.num_tokens):
                    self.blocks.grow(sequence, sequence.num_tokens)
                    break
                self._preempt(self._first_to_preempt())


class PlainEngine(Engine):
    """Engine with a plain scheduler."""

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, decoders: DecoderFactory, identity: ReplicaIdentity,
        clock: Clock | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, runner, decoders, identity, clock)
        self._scheduler = PlainScheduler(config, BlockManager(config))
        self._pipeline = Pipeline(runner, self._scheduler, self._clock, config)
