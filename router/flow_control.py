"""When a request is given to a replica: requests wait here, in order of urgency, while every replica is full."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from replicas.block_hash import extend_hashes
from replicas.errors import DeadlineExceeded, NoReplicaAvailable, Overloaded
from replicas.protocol import Band, GenerateRequest, ReplicaStats
from replicas.settings import check_bounds, setting
from router.admission import Admission
from router.flow_queue import BandLimits, FlowQueue, Waiting
from router.load_table import LoadTable
from router.output_lengths import OutputLengths
from router.served_account import Placement, PlacementAccount
from router.slots import LateBinding, SlotPolicy
from router.types import Headroom, Outcome, Reason, ReplicaView, RouterObserver, RoutingPolicy, RoutingRequest


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Limits of the requests that wait in an ingress."""

    bands: Mapping[Band, BandLimits]
    promote_after_s: float
    """Seconds without a first token after which a waiting band has its first request promoted: it takes the next free
    slot of its replica, before more urgent requests."""
    max_queue_wait_s: float = setting(600.0, gt=0)
    """Longest time that a request waits for a replica, seconds; then 504, or 503 if there is no replica at all."""
    lookahead: int = 0
    """Requests of any band given to a replica beyond its slots: work for the moment between the end of one and the
    arrival of the next, for which else a less urgent one would be begun and broken off again. Where there is no less
    urgent one, a request waits here instead, for whichever of several replicas has a slot first."""
    batch_lookahead: float = 0.125
    """The same for batch requests, as a share of the slots and at least one."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(slots=True)
class SampleGroup:
    """Requests with one prompt: where the first of them went, and the prompt's block hashes."""

    replica_id: str | None = None
    block_hashes: list[bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Waiter:
    waiting: Waiting
    routing: RoutingRequest
    group: SampleGroup
    placement: asyncio.Future[Placement]


class FlowController:
    """Decides when each request is dispatched, and has the policies decide where.

    Late binding: a request is given to a replica only when one has room, so that a more urgent one that comes
    later is served first. Room for a band counts slots and blocks held by lower bands, since the engine preempts.
    Whenever something may have changed (`notify`), the queue is walked in order and each request that finds room
    is dispatched; behind one that does not, less urgent ones of the same band wait.

    Three parts: this class accepts requests, lets them wait and dispatches them in order; a `SlotPolicy` says which
    replicas have room and a `RoutingPolicy` ranks those; a `PlacementAccount` counts what was given.

    Invariant: a request is counted on a replica from its dispatch on, so that room is never given twice.
    """

    def __init__(
        self, limits: FlowLimits, table: LoadTable, policy: RoutingPolicy, observer: RouterObserver,
        slots: SlotPolicy | None = None,
    ) -> None:  # fmt: skip
        """`slots`: None for late binding as `limits` has it."""
        self._limits = limits
        self._table = table
        self._policy = policy
        self._observer = observer
        self._slots = slots or LateBinding(limits.lookahead, limits.batch_lookahead)
        self._queue = FlowQueue(limits.bands, limits.promote_after_s)
        self._admission = Admission(limits.bands, self._queue, table)
        self._lengths = OutputLengths()
        self._account = PlacementAccount(self._queue, table)
        self._waiters: dict[int, _Waiter] = {}
        self._num_arrived = 0

    @property
    def table(self) -> LoadTable:
        """The load of the replicas, by which it decides."""
        return self._table

    @property
    def queue(self) -> FlowQueue:
        """What waits; to look at, not to change."""
        return self._queue

    def admit(self, request: GenerateRequest, deadline_s: float | None) -> int:
        """Accept a new request; gives its place in the order of arrival.

        Raises:
            Overloaded: the band's queue is full, or the request would start too late, for its deadline (monotonic) or
                for its band.
        """
        try:
            self._admission.check(request.band, self._num_tokens(request), deadline_s)
        except Overloaded:
            self._observer.waited(request.band, Outcome.REJECTED_CAPACITY, 0.0)
            raise
        self._num_arrived += 1
        return self._num_arrived

    async def acquire(
        self, request: GenerateRequest, number: int, deadline_s: float | None, group: SampleGroup
    ) -> Placement:
        """Wait until a replica has room and it is this request's turn.

        `number` is from `admit`; a request that comes back after a dispatch brings its old one and stands
        where it stood.

        Raises:
            DeadlineExceeded: the deadline, monotonic, or the longest wait passed.
            NoReplicaAvailable: the longest wait passed and there was no replica at all.
        """
        started_s = self._table.now()
        waiting = Waiting(request, self._num_tokens(request), deadline_s, number)
        waiter = self._enqueue(waiting, group)
        outcome = Outcome.EVICTED_OTHER
        try:
            self.notify()
            placement = await self._wait(waiter, started_s)
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
            self._observer.waited(request.band, outcome, self._table.now() - started_s)
            if outcome is not Outcome.DISPATCHED:
                self._withdraw(waiter)

    def progressed(self, placement: Placement, request: GenerateRequest, num_tokens: int) -> None:
        """Learn that a placement gave output."""
        self._account.progressed(placement, request, num_tokens)

    def settle(self, placement: Placement, request: GenerateRequest, num_output_tokens: int) -> None:
        """Give up a placement that gave `num_output_tokens`; its tenant is charged what it really cost."""
        self._account.settle(placement, request, num_output_tokens)
        self.notify()

    def refused(self, placement: Placement, request: GenerateRequest) -> None:
        """Learn, before `settle`, that the replica did not take the request: none of its prompt was computed.

        The replica is given nothing more until it is heard of again, so that the request, and those behind it,
        do not go straight back to it.
        """
        self._table.forget(placement.in_flight.replica_id)
        self._account.refused(placement, request)

    def polled(self, stats: list[ReplicaStats]) -> None:
        """Learn what every replica has served, for other ingresses too."""
        self._account.polled(stats)
        self.notify()

    def observe(self, request: GenerateRequest, num_output_tokens: int) -> None:
        """Learn what a request came to in the end."""
        self._lengths.observe(request.tenant, request.band, num_output_tokens)

    def notify(self) -> None:
        """Dispatch what can be dispatched now. Call it whenever load, replicas or the queue changed."""
        while self._waiters and self._dispatch_next():
            pass

    def forget(self, replica_id: str) -> None:
        """A replica is gone."""
        self._table.forget(replica_id)
        self._policy.forget(replica_id)

    def wait_s(self, band: Band) -> float | None:
        """Seconds until a request of `band` that came now would start; None if unknown."""
        return self._admission.wait_s(band)

    def headroom(self, band: Band) -> Headroom:
        """What may still wait in a band."""
        return self._admission.headroom(band)

    def _enqueue(self, waiting: Waiting, group: SampleGroup) -> _Waiter:
        request = waiting.request
        self._hash(request, group)
        routing = RoutingRequest(request, self._lengths.expect(request), group.block_hashes)
        waiter = _Waiter(waiting, routing, group, asyncio.get_running_loop().create_future())
        self._waiters[waiting.number] = waiter
        self._queue.add(waiting, self._table.now())
        return waiter

    def _num_tokens(self, request: GenerateRequest) -> int:
        return len(request.prompt_token_ids) + self._lengths.expect(request)

    def _hash(self, request: GenerateRequest, group: SampleGroup) -> None:
        """Hash the prompt of a group, once; without a replica the size of its blocks is not known."""
        views = self._table.views()
        if views and not group.block_hashes:
            extend_hashes(group.block_hashes, request.prompt_token_ids, views[0].stats.block_size)

    async def _wait(self, waiter: _Waiter, started_s: float) -> Placement:
        limit_s, deadline_s = self._limits.max_queue_wait_s, waiter.waiting.deadline_s
        if deadline_s is not None:
            limit_s = min(limit_s, max(0.0, deadline_s - started_s))
        try:
            async with asyncio.timeout(limit_s):
                return await waiter.placement
        except TimeoutError:
            if limit_s == self._limits.max_queue_wait_s and not self._table.views():
                raise NoReplicaAvailable(f"there was no model replica after {limit_s:.1f} s") from None
            raise DeadlineExceeded(f"no replica had room for the request within {limit_s:.1f} s") from None

    def _withdraw(self, waiter: _Waiter) -> None:
        """Take a request out that will not be served, or back a placement that nobody will use."""
        if self._waiters.pop(waiter.waiting.number, None) is not None:
            self._queue.remove(waiter.waiting)
        elif waiter.placement.done() and not waiter.placement.cancelled():
            self._account.withdraw(waiter.placement.result(), waiter.waiting.request)
            self.notify()

    def _dispatch_next(self) -> bool:
        """Dispatch one request, the first in order for which a replica has room; False if there is none."""
        views = self._table.views()
        starved = self._account.starved_bands()
        is_only = sum(not view.stats.is_draining for view in views) == 1
        # Most calls end here: every replica is full. Only then is it worth ordering what waits.
        with_places = {
            band: [view for view in views if self._slots.places(view, band, starved, is_only) > 0] for band in Band
        }
        open_bands = {band for band in Band if with_places[band]}
        for waiting in self._queue.in_order(starved, open_bands):
            waiter, band = self._waiters[waiting.number], waiting.request.band
            if waiter.placement.cancelled():
                self._withdraw(waiter)
                return True
            if band not in open_bands:
                continue
            with_room = [view for view in with_places[band] if self._slots.has_blocks(view, waiting.request, starved)]
            if with_room:
                self._dispatch(waiter, with_room, is_promoted=band in starved)
                return True
            open_bands.discard(band)
        return False

    def _dispatch(self, waiter: _Waiter, with_room: list[ReplicaView], is_promoted: bool) -> None:
        request = waiter.waiting.request
        ranking = self._policy.rank(waiter.routing, self._slots.best(with_room, request.band))
        ranking = ranking.led_by(waiter.group.replica_id, Reason.SAME_PROMPT)
        self._observer.decided(ranking.reason)
        waiter.group.replica_id = ranking.first
        num_prompt_tokens = self._policy.placed(waiter.routing, ranking.first)
        if is_promoted:
            self._observer.promoted(request.band)
        del self._waiters[waiter.waiting.number]
        waiter.placement.set_result(
            self._account.begin(waiter.waiting, waiter.routing, ranking, num_prompt_tokens, is_promoted)
        )
