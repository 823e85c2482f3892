"""Flow control: requests wait here, in order of urgency, until a replica has room."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from replicas.errors import DeadlineExceeded, NoReplicaAvailable, Overloaded
from replicas.protocol import BANDS, Band, GenerateRequest
from replicas.settings import check_bounds, setting
from replicas.shared_rules.block_hash import extend_hashes
from router.balancing.load_table import InFlight, LoadTable, PollChanges
from router.flow.admission import Admission, OutputLengths
from router.flow.capacity_index import CapacityIndex
from router.flow.flow_queue import BandLimits, FlowQueue, QueuedRequest
from router.flow.placements import Placement, PlacementAccount
from router.flow.slots import LateBinding, SlotPolicy
from router.flow.wait_reasons import QueueWait, WaitClock
from router.timeline import Timeline
from router.types import Candidates, Outcome, Reason, RouterObserver, RoutingPolicy, RoutingRequest

_REBALANCE_AFTER_S = 0.1
"""Seconds after its dispatch at which a request that waits on a full replica may be placed again."""


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Limits of the requests that wait in an ingress."""

    bands: Mapping[Band, BandLimits]
    promote_after_s: float
    """Seconds without a first token after which a waiting band has its first request promoted. A promoted request
    takes the next free slot of its replica, before more urgent requests."""
    max_queue_wait_s: float = setting(600.0, gt=0)
    """Longest time that a request waits for a replica, seconds; then 504, or 503 if there is no replica at all."""
    lookahead: int = 0
    """Requests of any band that a replica is given beyond its slots. When a request ends, the next one is
    already there. Without it the engine would start a less urgent request, and preempt it soon. The setting applies
    only to a replica that has less urgent work, and to a single replica. Otherwise a request waits here for the first
    free slot of any replica."""
    batch_lookahead: float = 0.125
    """Batch requests that a replica is given beyond its slots, as a share of the slots and at least one."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(slots=True)
class SampleGroup:
    """Group of requests with the same prompt: the replica that the last of them went to, and the prompt's hashes."""

    replica_id: str | None = None
    block_hashes: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class SequenceSet:
    """Sequences of one request, which are admitted together with the first that is read."""

    opened: Sequence[GenerateRequest]
    """Sequences that may wait at the same time."""
    is_admitted: bool = False
    refusal: Overloaded | None = None
    """Error of all sequences; None: they are not refused."""


@dataclass(slots=True, eq=False)
class _PendingPlacement:
    queued: QueuedRequest
    routing: RoutingRequest
    group: SampleGroup
    placement: asyncio.Future[Placement]
    wait: QueueWait


class FlowController:
    """Flow controller of one ingress: decides when each request is dispatched; its policies choose the replica.

    Late binding: a request waits here until a replica has room, so a later, more urgent request is served first. Room
    for a band counts slots and blocks held by lower bands, since the engine preempts. After each change (`notify`), the
    queue is walked in order and each request that finds room is dispatched. A request without room holds back the
    requests behind it in its band. It does not hold back other tenants that have less than their fair share of a
    replica's slots: they take the slots of tenants that have more.

    Its parts: `admission` accepts requests by their predicted wait and by the output that `lengths` predicts; `queue`
    orders them, and callers only read it; `capacity` keeps the replicas of `table` that have some by a `SlotPolicy`,
    and a `RoutingPolicy` ranks them; `account` counts dispatched requests.

    Invariant: a request is counted on a replica from its dispatch on, so that no room is given twice.
    """

    def __init__(
        self, limits: FlowLimits, table: LoadTable, policy: RoutingPolicy, observer: RouterObserver,
        slots: SlotPolicy | None = None,
    ) -> None:  # fmt: skip
        """`slots`: None for `LateBinding` with the lookahead of `limits`."""
        self._limits = limits
        self.table = table
        self._policy = policy
        self._observer = observer
        self.capacity = CapacityIndex(table, slots or LateBinding(limits.lookahead, limits.batch_lookahead))
        self.queue = FlowQueue(limits.bands, limits.promote_after_s)
        self.admission = Admission(limits.bands, self.queue, table, self.capacity)
        self.lengths = OutputLengths()
        self.account = PlacementAccount(self.queue, table)
        self._pending: dict[int, _PendingPlacement] = {}
        self._waits = WaitClock(table.now())
        self._num_arrived = 0

    def admit(self, request: GenerateRequest, deadline_s: float | None, whole: SequenceSet | None = None) -> int:
        """Accept a new sequence; return its index in order of arrival.

        `whole` are the sequences of its request: the first is accepted for all, so that none is refused for the wait
        behind others of its request. None: it is alone.

        Raises:
            DeadlineExceeded: the deadline, monotonic, has passed.
            Overloaded: the band's queue or the tenant's share of it is full, or the request would start later than its
                deadline or its band's limit.
        """
        left_s = math.inf if deadline_s is None else deadline_s - self.table.now()
        if left_s <= 0:
            self._observer.waited(request.band, Outcome.EVICTED_TTL, 0.0)
            raise DeadlineExceeded("the request's deadline passed before it was queued")
        whole = whole or SequenceSet((request,))
        if whole.refusal is not None:
            raise whole.refusal
        if whole.is_admitted:
            self.admission.count(request.band, self._num_tokens(request))
        else:
            self._admit_all(whole, request, left_s)
        self._num_arrived += 1
        return self._num_arrived

    def _admit_all(self, whole: SequenceSet, first: GenerateRequest, left_s: float) -> None:
        num_tokens = sum(map(self._num_tokens, whole.opened))
        try:
            self.admission.check(first.band, first.tenant, num_tokens, left_s, len(whole.opened))
        except Overloaded as error:
            self._observer.waited(first.band, Outcome.REJECTED_CAPACITY, 0.0)
            whole.refusal = error
            raise
        whole.is_admitted = True

    async def acquire(
        self, request: GenerateRequest, arrival_index: int, deadline_s: float | None, group: SampleGroup,
        timeline: Timeline,
    ) -> Placement:  # fmt: skip
        """Wait until a replica has room and this request is next; return its placement.

        `timeline` gets the wait and its reasons. `arrival_index` is from `admit`. A request that comes back after a
        dispatch keeps its index, and thus its place in the queue.

        Raises:
            DeadlineExceeded: the deadline, monotonic, or the longest wait passed.
            NoReplicaAvailable: the longest wait passed and there was no replica at all.
        """
        started_s = self.table.now()
        queued = QueuedRequest(request, self._num_tokens(request), deadline_s, arrival_index)
        pending = self._enqueue(queued, group)
        timeline.waiting(pending.wait)
        outcome = Outcome.EVICTED_OTHER
        try:
            self.notify()
            placement = await self._wait(pending, started_s)
            outcome = Outcome.DISPATCHED
            return placement
        except asyncio.CancelledError:
            outcome = Outcome.EVICTED_CONTEXT_CANCELLED
            raise
        except DeadlineExceeded:
            outcome = Outcome.EVICTED_TTL
            raise
        except NoReplicaAvailable:
            outcome = Outcome.EVICTED_NO_ENDPOINTS
            raise
        finally:
            now = self.table.now()
            pending.wait.end(now)
            timeline.waited(now)
            self._observer.waited(request.band, outcome, now - started_s)
            if outcome is not Outcome.DISPATCHED:
                self._withdraw(pending)

    def settle(self, placement: Placement, request: GenerateRequest, num_output_tokens: int) -> None:
        """End a placement that produced `num_output_tokens`; charge its tenant the real cost."""
        self.account.settle(placement, request, num_output_tokens)
        self.notify()

    def refused(self, placement: Placement, request: GenerateRequest) -> None:
        """Note that the replica refused the request and computed none of its prompt. Called before `settle`.

        The replica gets no request until its next report. Otherwise this request and the next ones would go straight
        back to it.
        """
        self.table.forget(placement.in_flight.replica_id)
        self.account.refused(placement, request)

    def to_rebalance(self) -> list[InFlight]:
        """Return requests that wait on a full replica while others have free slots for them, at most one for each.

        Several ingresses may have filled the same slot, or a batch request was sent ahead of a slot that stays taken.
        Requests that wait here come first.
        """
        to_move = []
        for band in Band:
            waiting = [] if self.queue.num_requests(band) else self.table.waiting(band, _REBALANCE_AFTER_S)
            if waiting:
                most_tokens = max(in_flight.prompt_tokens for in_flight in waiting)
                to_move += waiting[: self.capacity.of_band(band, is_starved=False).num_with_free_slot(most_tokens)]
        return to_move

    def polled(self, changes: PollChanges) -> None:
        """Update the tenants' counters from a poll of all replicas, which count other ingresses' requests too."""
        self.account.polled(changes)
        self.queue.refresh()
        self.capacity.trim()
        self.notify()

    def notify(self) -> None:
        """Dispatch all requests that find room. Called whenever load, replicas or the queue changed."""
        had_pending = bool(self._pending)
        while self._pending and self._dispatch_next():
            pass
        if had_pending:
            self._note_state()

    def forget(self, replica_id: str) -> None:
        """Note that a replica is gone."""
        self.table.forget(replica_id)
        self._policy.forget(replica_id)

    def _enqueue(self, queued: QueuedRequest, group: SampleGroup) -> _PendingPlacement:
        request = queued.request
        self._hash(request, group)
        routing = RoutingRequest(request, self.lengths.expect(request), group.block_hashes)
        wait = self._waits.begin(request.band, request.tenant, self.table.now())
        pending = _PendingPlacement(queued, routing, group, asyncio.get_running_loop().create_future(), wait)
        self._pending[queued.arrival_index] = pending
        self.queue.add(queued, self.table.now())
        return pending

    def _num_tokens(self, request: GenerateRequest) -> int:
        return len(request.prompt_token_ids) + self.lengths.expect(request)

    def _hash(self, request: GenerateRequest, group: SampleGroup) -> None:
        """Hash the prompt of a group once. Do nothing without a replica: its block size is not known."""
        block_size = self.table.block_size()
        if block_size is not None and not group.block_hashes:
            extend_hashes(group.block_hashes, request.prompt_token_ids, block_size, request.cache_salt)

    async def _wait(self, pending: _PendingPlacement, started_s: float) -> Placement:
        limit_s, deadline_s = self._limits.max_queue_wait_s, pending.queued.deadline_s
        if deadline_s is not None:
            limit_s = min(limit_s, max(0.0, deadline_s - started_s))
        try:
            async with asyncio.timeout(limit_s):
                return await pending.placement
        except TimeoutError:
            if limit_s == self._limits.max_queue_wait_s and not len(self.table):
                raise NoReplicaAvailable(f"there was no model replica after {round(limit_s, 3)} s") from None
            raise DeadlineExceeded(f"no replica had room for the request within {round(limit_s, 3)} s") from None

    def _withdraw(self, pending: _PendingPlacement) -> None:
        """Remove a request whose wait failed from the queue, or undo the placement that it got just before."""
        if self._pending.pop(pending.queued.arrival_index, None) is not None:
            self.queue.remove(pending.queued)
            self._note_state()
        elif pending.placement.done() and not pending.placement.cancelled():
            self.account.withdraw(pending.placement.result(), pending.queued.request)
            self.notify()

    def _note_state(self) -> None:
        """Note whose turn it is, for the reasons of the waits."""
        self._waits.observe(self.table.now(), not self.table.cluster().num_serving, self.queue.next_tenants())

    def _dispatch_next(self) -> bool:
        """Dispatch the first request in order for which a replica has room; return False if there is none."""
        starved = self.account.starved_bands()
        # In most calls every replica is full: then no band is open and the queue is not ordered at all.
        capacity = {
            band: self.capacity.of_band(band, band in starved) for band in BANDS if self.queue.num_requests(band)
        }
        for band in self.queue.bands_in_order(starved):
            for queued in self.queue.in_order(band) if len(capacity[band]) else ():
                pending, request = self._pending[queued.arrival_index], queued.request
                if pending.placement.cancelled():
                    self._withdraw(pending)
                    return True
                candidates = capacity[band].candidates(request.num_known_tokens)
                if candidates is None:
                    break  # The request holds back those behind it in its band.
                self._dispatch(pending, candidates, is_promoted=band in starved)
                return True
        return self._dispatch_fairly()

    def _dispatch_fairly(self) -> bool:
        """Dispatch the first request to which other tenants of its band yield a slot; return False if there is none."""
        for band in Band:
            yielding = self.capacity.yielding(band)
            for queued in self.queue.in_order(band) if self.queue.num_requests(band) and len(yielding) else ():
                pending, request = self._pending[queued.arrival_index], queued.request
                if pending.placement.cancelled():
                    self._withdraw(pending)
                    return True
                candidates = yielding.candidates(request.tenant, request.num_known_tokens)
                if candidates is not None:
                    self._dispatch(pending, candidates, is_promoted=False)
                    return True
        return False

    def _dispatch(self, pending: _PendingPlacement, candidates: Candidates, is_promoted: bool) -> None:
        request, group = pending.queued.request, pending.group
        ranking = self._policy.rank(pending.routing, candidates)
        if group.replica_id is not None and candidates.get(group.replica_id) is not None:
            ranking = ranking.with_first(group.replica_id, Reason.SAME_PROMPT)
        self._observer.decided(ranking.reason)
        group.replica_id = ranking.first
        num_prompt_tokens = self._policy.placed(pending.routing, ranking.first)
        if is_promoted:
            self._observer.promoted(request.band)
        del self._pending[pending.queued.arrival_index]
        pending.wait.end(self.table.now())
        pending.placement.set_result(
            self.account.begin(pending.queued, pending.routing, ranking, num_prompt_tokens, is_promoted)
        )
