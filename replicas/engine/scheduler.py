"""Scheduler: decides for each step the sequences that compute, and the number of tokens of each."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterator
from operator import attrgetter

import numpy as np

from replicas.engine.batch import BatchColumns, ScheduledBatch, ScheduledSequence, StepResults
from replicas.engine.block_manager import BlockManager
from replicas.engine.config import EngineConfig, KVPressurePolicy
from replicas.engine.sequence import (
    DECODES,
    KNOWN,
    MAX_OUTPUT,
    MAX_PENDING_TOKENS,
    NUM_AWAITED_STATES,
    PENDING,
    PROMPT,
    Phase,
    Sequence,
    SequenceStatus,
)
from replicas.engine.sequence_table import Lag, RunningLoad, SequenceTable
from replicas.engine.step_plan import LatencyController, StepPlan
from replicas.engine.tenant_slots import TenantBlocks, TenantSlots
from replicas.engine.tpot_limits import TpotLimits
from replicas.engine.waiting_queue import WaitingQueue
from replicas.protocol import BANDS, Band

_urgency, _band = attrgetter("urgency"), attrgetter("effective_band")


class Scheduler:
    """Scheduler of continuous batching (Orca, OSDI 2022) without a prefill or a decode phase.

    A sequence has known tokens and computed tokens, and every step lets the computed ones catch up. A long prompt, a
    prefix hit, a resumed sequence and a decode differ only in the number of missing tokens. Each step:

    1. Every running sequence gets blocks for its known tokens. If they run out, a sequence of the least urgent band is
       preempted: it gives back its blocks, keeps its tokens and waits. Its full blocks stay cached, so resuming it is
       mostly a prefix hit. It is the least urgent one of the tenant with most blocks beyond its fair share
       (`TenantBlocks`), or of the band if no tenant with several sequences is beyond its share.
    2. Sequences that miss one token get it: a decode never waits for a prefill. While a band's streams exceed their
       TPOT target, some decodes of less urgent bands are held, and their prompts get fewer tokens (`TpotLimits`).
    3. The rest of the budget (`max_num_batched_tokens`, or less to meet a latency target) goes to the other running
       sequences and to waiting ones, band by band, in order of urgency. A prompt longer than a step gets a share first
       and the rest of the budget last, so that short prompts behind it start at once. A waiting sequence of a more
       urgent band takes the slot and blocks of the least urgent running one.
    4. In a band, sequences of tenants that hold fewer slots than their fair share (`TenantSlots`) are admitted first.
       If such a sequence finds no slot, a tenant beyond its share yields one: its least urgent sequence is preempted. A
       sequence yields at most once in `fairness_rest_steps`. A tenant at its share yields no slot and takes none
       back, so two tenants never take slots from each other in turn. If slots are free and blocks are not, a tenant
       below its share of the blocks is served in the same way.
    5. A sequence that must run alone preempts all others, and none is admitted beside it.
    6. If a band has tokens to prefill, and none of its tokens was computed for `promote_after_s`, its most urgent
       sequence is promoted to the front of all bands. A promoted sequence takes the next free slot. It preempts no
       sequence for a slot, others may pass it by preempting, and it is not preempted for a slot. Then the band's clock
       restarts.

    Invariants:
        A sequence is in `waiting`, in `running` or finished. Running sequences have blocks for all tokens known when
        they were last scheduled. len(running) <= num_slots.
        A sequence that decodes is held in at most `tpot_limits.max_held_steps` steps in a row.
        A promoted sequence never yields. A tenant that yields slots or blocks holds at least its share of them
        afterwards.
        A sequence's worst case fits the pool, so a step with work always progresses.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        self._config = config
        self.blocks = blocks
        self.table = SequenceTable(config.num_slots)
        self.waiting = WaitingQueue(config.max_num_batched_tokens)
        """Queue of the sequences without a slot; callers only read it."""
        self.running: list[Sequence] = []
        """Sequences with a slot, most urgent first; callers only read the list."""
        # Time at which each band last got tokens, or began to wait if that is later.
        self._served_s = dict.fromkeys(Band, 0.0)
        self.latency = LatencyController(config)
        self.tpot_limits = TpotLimits(config, self.table)
        self.num_held = 0
        """Number of decodes that the last step left out."""
        self._slots = TenantSlots(config.num_slots)
        self._num_steps = 0
        self._now_s = 0.0
        self.num_preemptions = 0
        self.num_fairness_preemptions = 0
        """Number of preemptions for other tenants' fair shares; `num_preemptions` counts them too."""
        self.num_promotions = 0

    def add(self, sequence: Sequence, now: float) -> None:
        """Add a new sequence to the waiting queue."""
        sequence.phases.begin(now)
        if not self._wants_prefill(sequence.band, self._lag().prefilling(self.running)):
            self._served_s[sequence.band] = max(self._served_s[sequence.band], min(now, sequence.arrival_s))
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End `sequence`, which may wait or run. Its blocks are free when this returns."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._slots.give_back(sequence)
            self.blocks.free(sequence)
            self.table.leave(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def schedule(self, now: float) -> ScheduledBatch | None:
        """Schedule the next step; return None if no sequence has tokens to compute."""
        self._num_steps += 1
        self._now_s = now
        lag = self._lag()
        if self._promote_starved(lag, now):
            lag = self._lag()
        if self._grow_running(lag):
            lag = self._lag()
        held = self.tpot_limits.hold(self.running, lag, self._least_urgent)
        self.num_held = len(held)
        plan = StepPlan(self._config, self.table, self.running, lag, held)
        for band in plan.decoding_bands:
            self._served_s[band] = now
        has_prefills = plan.has_prefilling or len(self.waiting) > 0
        for band in BANDS if has_prefills else ():
            plan.limit(self._most_tokens(plan, band))
            self._schedule_prefills(plan, band, now)
        return plan.batch(self.blocks.states)

    def is_saturated(self, batch: ScheduledBatch) -> bool:
        """Return True if `batch`, which was scheduled last, has as much work as the limits allow."""
        if len(batch) == 1 and batch.columns.sequences[0].request.is_isolated:
            return False
        return (
            len(self.waiting) > 0
            or len(self.running) == self._config.num_slots
            or batch.num_tokens == self._config.max_num_batched_tokens
        )

    def launched(self, batch: ScheduledBatch) -> None:
        """Note that a step was launched."""
        self.table.launched(batch.columns)

    def continued(self, columns: BatchColumns, results: StepResults) -> np.ndarray:
        """Return for each item [num_items] bool whether its sequence gets a token and goes on.

        It has no log probabilities, and the token is no stop token of any sequence. Its text or its constraint may
        still end it.
        """
        table, rows, token_ids = self.table, columns.rows, results.token_ids
        numbers = table.numbers.take(rows, axis=1)
        is_continued: np.ndarray = table.has(columns) & table.may_be_continued[rows] & columns.samples
        is_continued &= (columns.num_tokens == 1) & (numbers[DECODES] > 0) & (numbers[PENDING] < MAX_PENDING_TOKENS)
        is_continued &= numbers[KNOWN] + 1 - numbers[PROMPT] < numbers[MAX_OUTPUT]
        for token_id in {*self._config.eos_token_ids, *table.stop_tokens}:
            is_continued &= token_ids != token_id
        if results.others:
            is_continued[list(results.others)] = False
        return is_continued

    def changes_block(self, columns: BatchColumns) -> np.ndarray:
        """Return for decodes that go on whether the step that was collected has changed a block or a state slot."""
        changes = self.blocks.changes_at(columns.ends)
        if self.blocks.states.num_slots:
            changes |= self.table.numbers[NUM_AWAITED_STATES].take(columns.rows) > 0
        return changes

    def block_changed(self, sequence: Sequence) -> None:
        """Note that the token of a decode, which was collected, has changed a block of a sequence that goes on."""
        self.blocks.computed(sequence, sequence.num_computed_tokens - 1)

    def load(self) -> RunningLoad:
        """Return the present load of the running sequences."""
        return self.table.load()

    def computed(self, item: ScheduledSequence) -> None:
        """Note that the tokens that a step computed of a sequence have been collected."""
        if not item.holds_blocks:
            return  # The sequence was preempted while the step was in flight.
        sequence = item.sequence
        before = sequence.num_computed_tokens
        sequence.num_in_flight_tokens -= item.num_tokens
        sequence.num_computed_tokens += item.num_tokens
        self.blocks.computed(sequence, before)

    def revoke(self, item: ScheduledSequence) -> None:
        """Undo the launch of `item`: its results will not be used, and its tokens are scheduled again."""
        sequence = item.sequence
        if item.holds_blocks:
            sequence.num_in_flight_tokens -= item.num_tokens
            self.blocks.states.revoked(sequence)
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        sequence.num_placeholder_tokens -= item.samples
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.add(sequence)

    def check_invariants(self) -> None:
        """Assert the class's invariants and the block manager's."""
        assert len(self.running) <= self._config.num_slots
        assert self.running == sorted(self.running, key=_urgency)
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING
            assert 0 <= sequence.num_computed_tokens < sequence.num_known_tokens
            assert sequence.num_table_blocks == len(sequence.block_table)
            assert sequence.block_table[-1] in (sequence.newest_block, 0)
            assert sequence.num_in_flight_tokens >= 0 and sequence.num_placeholder_tokens >= 0
            assert sequence.num_scheduled_tokens <= sequence.num_tokens
            assert sequence.num_held_steps <= self.tpot_limits.max_held_steps
            assert sequence.num_scheduled_tokens <= len(sequence.block_table) * self._config.block_size
        for sequence in self.waiting.sequences():
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.block_table and sequence.num_scheduled_tokens == 0
        self.table.check_invariants(self.running)
        self.waiting.check_invariants()
        self._slots.check_invariants(self.running)
        self.blocks.check_invariants(self.running)

    @property
    def _least_urgent(self) -> Band:
        """Least urgent band with work; the most urgent one if there is no work."""
        waiting = [band for band, num in zip(BANDS, self.waiting.num_by_band, strict=True) if num]
        return max([*waiting, *(sequence.effective_band for sequence in self.running[-1:])], default=BANDS[0])

    def _most_tokens(self, plan: StepPlan, band: Band) -> int:
        """Return the most tokens that the step may have with prompts of `band`."""
        is_more_urgent = bool(self.running) and band < self.running[-1].effective_band
        most_tokens = self.latency.num_tokens(plan.num_decode_tokens, is_more_urgent)
        return min(most_tokens, self.tpot_limits.num_tokens(band, plan.num_scheduled_tokens))

    def _promote_starved(self, lag: Lag, now: float) -> bool:
        """Promote a sequence of each band that has starved; return True if there is one."""
        prefilling = lag.prefilling(self.running)
        starved = [
            band
            for band in BANDS[1:]
            if now - self._served_s[band] >= self._config.promote_after_s and self._wants_prefill(band, prefilling)
        ]
        for band in starved:
            self._promote(band, prefilling)
            self._served_s[band] = now
        return bool(starved)

    def _lag(self) -> Lag:
        return self.table.lag(self.running, self._config.block_size)

    def _wants_prefill(self, band: Band, prefilling: list[Sequence]) -> bool:
        return self.waiting.num_by_band[band] > 0 or any(sequence.band is band for sequence in prefilling)

    def _promote(self, band: Band, prefilling: list[Sequence]) -> None:
        running = [sequence for sequence in prefilling if sequence.effective_band is band]
        sequence = running[0] if running else self.waiting.head(band, with_long=True)
        if sequence is None:
            return  # All candidates are promoted already.
        self.num_promotions += 1
        if running:
            self._slots.give_back(sequence)
            sequence.is_promoted = True
            self._slots.take(sequence)
            self.running.sort(key=_urgency)
            self.table.promoted(sequence)
        else:
            self.waiting.remove(sequence)
            sequence.is_promoted = True
            self.waiting.add(sequence)

    def _grow_running(self, lag: Lag) -> bool:
        """Give blocks to the sequences that lack room; return True if some sequence was preempted for them."""
        num_preemptions = self.num_preemptions
        for sequence in [self.running[index] for index in lag.lacks_room.nonzero()[0].tolist()]:
            while sequence.status is SequenceStatus.RUNNING:
                if self.blocks.can_grow(sequence, sequence.num_tokens):
                    self.blocks.grow(sequence, sequence.num_tokens)
                    break
                self._preempt(self._first_to_preempt())
        return self.num_preemptions > num_preemptions

    def _first_to_preempt(self) -> Sequence:
        """Return the sequence of the least urgent band whose blocks running ones get."""
        last = self.running[-1]
        return self._tenant_blocks(last.effective_band).first_to_preempt() or last

    def _tenant_blocks(self, band: Band) -> TenantBlocks:
        num_tenants = self._slots.num_tenants(band, self.waiting.tenants(band))
        return TenantBlocks(self.running, band, self._config.num_blocks, num_tenants)

    def _schedule_prefills(self, plan: StepPlan, band: Band, now: float) -> None:
        long_prefill_chunk, long_sequences = plan.long_prefill_chunk, []
        deferred: list[Sequence] = []
        for sequence in self._prefill_candidates(plan, band, deferred):
            is_long = plan.is_long(sequence)
            self._schedule_tokens(plan, sequence, long_prefill_chunk if is_long else plan.num_tokens_left)
            self._served_s[sequence.band] = now
            if is_long:
                long_sequences.append(sequence)
        for sequence in long_sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self._schedule_tokens(plan, sequence, plan.num_tokens_left)
        for sequence in deferred:
            self.waiting.add(sequence)

    def _schedule_tokens(self, plan: StepPlan, sequence: Sequence, at_most: int) -> None:
        plan.schedule(sequence, at_most)
        start = sequence.num_scheduled_tokens
        plan.note_completed(self.blocks.hashes_completed(sequence, start, start + plan.num_scheduled(sequence)))

    def _prefill_candidates(self, plan: StepPlan, band: Band, deferred: list[Sequence]) -> Iterator[Sequence]:
        """Yield the sequences of `band` that can prefill now, in order of urgency, and admit waiting ones among them.

        Waiting sequences that are skipped in this step are moved to `deferred`.
        """
        prefilling = plan.prefilling(band)
        prefilling.reverse()
        # True while a waiting sequence may be admitted. Running ones have their slots and blocks.
        has_room = not (len(self.running) == 1 and self.running[0].request.is_isolated)
        while plan.num_tokens_left > 0:
            head = self._head(band, with_long=plan.can_take_long_prefill) if has_room else None
            if prefilling and (head is None or prefilling[-1].urgency < head.urgency):
                sequence = prefilling.pop()
                if sequence.status is not SequenceStatus.RUNNING:
                    continue  # Preempted in this step by a more urgent sequence.
                if plan.can_take_long_prefill or not plan.is_long(sequence):
                    yield sequence
            elif head is None:
                return
            elif not self._could_fit(head):
                # Sequences behind a promoted head without a slot may be tried: it waits for a free slot and preempts no
                # sequence for it.
                has_room = head.is_promoted and len(self.running) >= self._config.num_slots
                if has_room:
                    self._defer(head, deferred)
            elif self._waits_for_prefix(plan, head):
                self._defer(head, deferred)
                has_room = len(deferred) < self._config.num_slots
            else:
                self._admit(plan, head)
                has_room = not head.request.is_isolated
                yield head

    def _head(self, band: Band, with_long: bool) -> Sequence | None:
        first = self._slots.below_share(band, self.waiting.tenants(band))
        if first:
            blocks = self._tenant_blocks(band)
            first = frozenset(filter(blocks.is_below_share, first)) or first
        return self.waiting.head(band, with_long, first)

    def _waits_for_prefix(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Return True if this step computes, for another sequence, the next block that `sequence` could reuse.

        Waiting for that block is cheaper than computing it twice. With recurrent state, any later block will do, if a
        state is kept at its end.
        """
        return any(map(plan.completes, self.blocks.missing_hashes(sequence)))

    def _defer(self, sequence: Sequence, deferred: list[Sequence]) -> None:
        self.waiting.remove(sequence)
        deferred.append(sequence)

    def _admit(self, plan: StepPlan, sequence: Sequence) -> None:
        """Give a waiting sequence that could fit a slot and blocks; preempt others that may be until it fits."""
        yielding: list[Sequence] | None = None
        while not self._fits(sequence, self.running, ()):
            last = self.running[-1]
            if sequence.request.is_isolated or last.effective_band > sequence.band:
                plan.unschedule(last)
                self._preempt(last)
                continue
            if yielding is None:
                yielding = self._yielding(sequence)
            plan.unschedule(yielding[-1])
            self._yield(yielding.pop())
        self.waiting.remove(sequence)
        self.blocks.allocate(sequence)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        sequence.status = SequenceStatus.RUNNING
        sequence.enter_phase(Phase.PREFILL, self._now_s)
        insort(self.running, sequence, key=_urgency)
        self.table.enter(sequence)
        self._slots.take(sequence)

    def _could_fit(self, sequence: Sequence) -> bool:
        """Return True if `sequence` would have room after preempting all sequences that it may preempt."""
        if self._fits(sequence, self.running, ()):
            return True
        if sequence.request.is_isolated:
            return True  # It may preempt all, and a sequence's worst case fits an empty pool.
        num_others = bisect_right(self.running, sequence.band, key=_band)
        others, less_urgent = self.running[:num_others], self.running[num_others:]
        if self._fits(sequence, others, less_urgent):
            return True
        yielding = self._yielding(sequence)
        if not yielding:
            return False
        others = [other for other in others if other not in yielding]
        return self._fits(sequence, others, [*less_urgent, *yielding])

    def _yielding(self, sequence: Sequence) -> list[Sequence]:
        """Return the running sequences that may be preempted for the fair share of `sequence`'s tenant.

        If less urgent bands leave a slot, they yield blocks, otherwise slots. The first to be preempted is last: of the
        tenant with most of them, the least urgent.
        """
        band, waiting = sequence.effective_band, self.waiting.tenants(sequence.effective_band)
        if sequence.is_promoted:
            return []
        if bisect_right(self.running, band, key=_band) < self._config.num_slots:
            blocks = self._tenant_blocks(band)
            return blocks.yielding(self._may_yield) if blocks.is_below_share(sequence.request.tenant) else []
        if sequence.request.tenant not in self._slots.below_share(band, waiting):
            return []
        surplus = self._slots.surplus(band, waiting)
        left, yielding = surplus.copy(), []
        for other in reversed(self.running if surplus else ()):
            tenant = other.request.tenant
            if other.effective_band is band and left[tenant] > 0 and self._may_yield(other):
                left[tenant] -= 1
                yielding.append(other)
        yielding.sort(key=lambda other: -surplus[other.request.tenant])
        yielding.reverse()
        return yielding

    def _may_yield(self, sequence: Sequence) -> bool:
        last = sequence.fairness_preemption_step
        has_rested = last is None or self._num_steps - last >= self._config.fairness_rest_steps
        return has_rested and not sequence.is_promoted

    def _fits(self, sequence: Sequence, others: list[Sequence], without: Collection[Sequence]) -> bool:
        """Return True if slots and blocks suffice beside `others` after preempting the sequences in `without`."""
        if not others:
            return True  # A sequence's worst case fits an empty pool.
        if sequence.request.is_isolated or len(others) >= self._config.num_slots:
            return False
        if not self.blocks.states.has_room(without):
            return False
        if self._config.kv_pressure_policy is KVPressurePolicy.PAUSE_NEW:
            num_tokens = sequence.request.max_total_tokens
            growth = sum(self.blocks.growth(other, other.request.max_total_tokens) for other in others)
        else:
            # Reserve one block of growth for each; otherwise a sequence admitted now may be preempted a step later.
            num_tokens, growth = sequence.num_tokens, self.blocks.next_growth(others)
        return self.blocks.shortfall(sequence, num_tokens, without) + growth <= 0

    def _yield(self, sequence: Sequence) -> None:
        assert self._may_yield(sequence)
        self._preempt(sequence)
        sequence.is_fairness_preempted, sequence.fairness_preemption_step = True, self._num_steps
        self.num_fairness_preemptions += 1

    def _preempt(self, sequence: Sequence) -> Sequence:
        self.running.remove(sequence)
        self._slots.give_back(sequence)
        sequence.num_forced_tokens = 0
        sequence.num_preempted_tokens = max(sequence.num_preempted_tokens, sequence.num_scheduled_tokens)
        self.blocks.free(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.enter_phase(Phase.PREEMPTED, self._now_s)
        sequence.num_preemptions += 1
        sequence.is_fairness_preempted = False
        self.num_preemptions += 1
        self.table.leave(sequence)
        self.waiting.add(sequence)
        return sequence
