"""When a request is given to a replica: requests wait here, in order of urgency, while every replica is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from replicas.block_hash import extend_hashes
from replicas.errors import DeadlineExceeded, NoReplicaAvailable, Overloaded
from replicas.protocol import Band, GenerateRequest, ReplicaStats
from replicas.settings import check_bounds, setting
from router.admission import Admission
from router.flow_queue import BandLimits, FlowQueue, Waiting
from router.load_table import InFlight, LoadTable
from router.output_lengths import OutputLengths
from router.served_account import ServedAccount
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
    num_bound_early: int = 0
    """Requests of each band that any replica is given beyond its slots; 0: they wait here for the first slot that comes
    free (late binding). More is how routers work that only choose a replica: a baseline."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True)
class Placement:
    """A request's place: the replica that has room for it comes first, where it is counted already."""

    ranking: list[str]
    in_flight: InFlight
    expected_tokens: int
    """What its tenant was charged."""
    expected_output_tokens: int
    is_promoted: bool
    """Whether its band had starved: no more urgent request may have its slot."""


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
    """Decides when each request is dispatched, and has the policy decide where.

    Late binding: a request is given to a replica only when one has room, so that a more urgent one that comes
    later is served first. Room for a band counts slots and blocks held by lower bands, since the engine preempts.
    Whenever something may have changed (`notify`), the queue is walked in order and each request that finds room
    is dispatched; behind one that does not, less urgent ones of the same band wait.

    Invariant: a request is counted on a replica from its dispatch on, so that room is never given twice.
    """

    def __init__(
        self, limits: FlowLimits, table: LoadTable, policy: RoutingPolicy, observer: RouterObserver,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._limits = limits
        self._table = table
        self._policy = policy
        self._observer = observer
        self._clock = clock
        self._queue = FlowQueue(limits.bands, limits.promote_after_s)
        self._admission = Admission(limits.bands, self._queue, table, clock)
        self._lengths = OutputLengths()
        self._account = ServedAccount()
        self._waiters: dict[int, _Waiter] = {}
        self._promoted: dict[Band, InFlight] = {}
        self._num_arrived = 0

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
        started_s = self._clock()
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
            self._observer.waited(request.band, outcome, self._clock() - started_s)
            if outcome is not Outcome.DISPATCHED:
                self._withdraw(waiter)

    def progressed(self, placement: Placement, request: GenerateRequest, num_tokens: int) -> None:
        """Learn that a placement gave output: only now its band is served, since it may have had to wait there."""
        if not placement.in_flight.is_seen:
            self._queue.served(request.band, self._clock())
        self._table.progress(placement.in_flight, num_tokens)

    def settle(self, placement: Placement, request: GenerateRequest, num_output_tokens: int) -> None:
        """Give up a placement that gave `num_output_tokens`; its tenant is charged what it really cost."""
        self._end(placement)
        cost = len(request.prompt_token_ids) + num_output_tokens
        self._queue.charge(request.band, request.tenant, cost - placement.expected_tokens)
        self._account.charged(placement.in_flight.replica_id, request.band, request.tenant, cost)
        self.notify()

    def refused(self, placement: Placement, request: GenerateRequest) -> None:
        """Learn, before `settle`, that the replica did not take the request: none of its prompt was computed.

        The replica is given nothing more until it is heard of again, so that the request, and those behind it,
        do not go straight back to it.
        """
        self._table.forget(placement.in_flight.replica_id)
        self._queue.charge(request.band, request.tenant, -len(request.prompt_token_ids))
        self._account.charged(
            placement.in_flight.replica_id, request.band, request.tenant, -len(request.prompt_token_ids)
        )

    def polled(self, stats: list[ReplicaStats]) -> None:
        """Learn what every replica has served, for other ingresses too."""
        for (tenant, band), tokens in self._account.corrections(stats).items():
            self._queue.charge(band, tenant, tokens)
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
        self._queue.add(waiting, self._clock())
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
            placement = waiter.placement.result()
            self._end(placement)
            self._queue.charge(waiter.waiting.request.band, waiter.waiting.request.tenant, -placement.expected_tokens)
            self.notify()

    def _end(self, placement: Placement) -> None:
        self._table.end(placement.in_flight)
        for band, in_flight in list(self._promoted.items()):
            if in_flight is placement.in_flight:
                del self._promoted[band]

    def _starved_bands(self, now: float) -> set[Band]:
        """Bands that may have a request promoted now: none of theirs still waits for a slot that it was promised."""
        return {
            band
            for band in Band
            if self._queue.is_starved(band, now) and (band not in self._promoted or self._promoted[band].is_seen)
        }

    def _dispatch_next(self) -> bool:
        """Dispatch one request, the first in order for which a replica has room; False if there is none."""
        views = self._table.views()
        starved = self._starved_bands(self._clock())
        is_only = sum(not view.stats.is_draining for view in views) == 1
        # Most calls end here: every replica is full. Only then is it worth ordering what waits.
        open_bands = {
            band for band in Band if any(self._num_places(view, band, starved, is_only) > 0 for view in views)
        }
        for waiting in self._queue.in_order(starved, open_bands):
            if self._waiters[waiting.number].placement.cancelled():
                self._withdraw(self._waiters[waiting.number])
                return True
            if waiting.request.band not in open_bands:
                continue
            with_room = [view for view in views if self._has_room(view, waiting, starved, is_only)]
            if with_room:
                self._dispatch(self._waiters[waiting.number], with_room, starved)
                return True
            open_bands.discard(waiting.request.band)
        return False

    def _num_places(self, view: ReplicaView, band: Band, starved: set[Band], is_only: bool) -> int:
        """Requests of a band that a replica may be given: for its free slots, and some that wait there for the next."""
        is_starved = band in starved
        if is_starved:
            # It waits there before all others for the next slot, whoever has them now and whoever else waits there.
            band = Band.INTERACTIVE
        has_less_urgent = sum(view.num_by_band[band + 1 :]) > 0
        num_ahead = self._limits.lookahead if is_starved or has_less_urgent or is_only else 0
        if band is Band.BATCH:
            num_ahead = max(1, num_ahead, int(self._limits.batch_lookahead * view.stats.num_slots))
        num_ahead = max(num_ahead, self._limits.num_bound_early)
        num_places = 0 if view.stats.is_draining else view.num_free_slots(band) + num_ahead
        return max(1, num_places) if view.is_kept_by_others(band) else num_places

    def _has_room(self, view: ReplicaView, waiting: Waiting, starved: set[Band], is_only: bool) -> bool:
        band, request = waiting.request.band, waiting.request
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        has_blocks = (
            num_tokens <= view.num_free_tokens(band)
            or sum(view.num_by_band) == 0  # An empty replica takes anything: what could never fit it refuses.
            or band in starved  # The engine, where it comes promoted, keeps freed blocks for it.
            or view.is_kept_by_others(band)  # Of blocks, too, it waits there for the next.
            or self._limits.num_bound_early > 0
        )
        return has_blocks and self._num_places(view, band, starved, is_only) > 0

    def _dispatch(self, waiter: _Waiter, with_room: list[ReplicaView], starved: set[Band]) -> None:
        if not self._limits.num_bound_early:
            # Where it starts at once comes before where it has to wait for a slot.
            with_slot = [view for view in with_room if view.num_free_slots(waiter.waiting.request.band) > 0]
            with_room = with_slot or with_room
        ranking = self._policy.rank(waiter.routing, with_room)
        ranking = ranking.led_by(waiter.group.replica_id, Reason.SAME_PROMPT)
        self._observer.decided(ranking.reason)
        waiter.group.replica_id = ranking.first
        num_prompt_tokens = self._policy.placed(waiter.routing, ranking.first)
        request = waiter.waiting.request
        num_output_tokens = max(0, waiter.routing.expected_output_tokens - len(request.output_token_ids))
        self._queue.dispatch(waiter.waiting)
        is_promoted = request.band in starved
        band = Band.INTERACTIVE if is_promoted else request.band
        in_flight = self._table.begin(ranking.first, band, num_prompt_tokens, num_output_tokens)
        if is_promoted:
            self._promoted[request.band] = in_flight
            self._observer.promoted(request.band)
        del self._waiters[waiter.waiting.number]
        waiter.placement.set_result(
            Placement(
                ranking.replica_ids,
                in_flight,
                waiter.waiting.expected_tokens,
                waiter.routing.expected_output_tokens,
                is_promoted,
            )
        )
