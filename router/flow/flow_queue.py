"""Queue of the requests that wait for a replica, and their order. Pure: time is an argument, and no call blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from replicas.errors import Overloaded
from replicas.protocol import Band, GenerateRequest
from router.flow.waiting_tokens import LargestFirst, SummedKeys, TokensByTurn, WaitingTokens

_MAX_IDLE_TENANTS = 1000
_FEW_TENANTS = 64
"""Waiting tenants up to which a prediction is exact. Beyond, it is as of the last poll: summing up takes longer."""


@dataclass(frozen=True, slots=True)
class BandLimits:
    """Limits of one band's queue in one ingress."""

    max_requests: int
    max_tokens: int
    """Most tokens that may wait: prompt tokens plus expected output tokens."""
    max_wait_s: float | None = None
    """Longest predicted wait at which a request is accepted, seconds; None: no limit."""
    max_tenant_share: float = 1.0
    """Most of the requests and of the tokens that one tenant may have waiting, as a share; the rest is for others."""

    @property
    def max_tenant_requests(self) -> int:
        """Most requests of one tenant that may wait; at least one."""
        return max(1, int(self.max_tenant_share * self.max_requests))

    @property
    def max_tenant_tokens(self) -> int:
        """Most tokens of one tenant that may wait."""
        return int(self.max_tenant_share * self.max_tokens)


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """Request in the queue."""

    request: GenerateRequest
    expected_tokens: int
    """Expected cost: prompt tokens plus expected output tokens."""
    deadline_s: float | None
    """Deadline, monotonic seconds; None: no deadline."""
    arrival_index: int
    """Index in order of arrival. A request that comes back after a dispatch keeps it, and thus its place."""

    @property
    def order(self) -> tuple[float, int]:
        """Sort key: earliest deadline first, then order of arrival."""
        return (float("inf") if self.deadline_s is None else self.deadline_s, self.arrival_index)


@dataclass(frozen=True, slots=True)
class TenantQueue:
    """Size of one tenant's part of a band's queue."""

    num_requests: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BandQueueSize:
    """Size of a band's queue."""

    num_requests: int = 0
    num_tokens: int = 0
    num_tenants: int = 0
    largest: dict[str, TenantQueue] = field(default_factory=dict)
    """Tenants with most waiting requests."""


_TurnKey = tuple[int, float, int, str]
"""Sort key of a tenant: fewest tokens first, then the tenant whose first request is first; and its name."""


@dataclass(slots=True)
class _Tenant:
    """Tenant of one band: its virtual token counter, and its waiting requests in order."""

    name: str
    tokens: int
    queue: list[QueuedRequest] = field(default_factory=list)
    num_queued_tokens: int = 0
    place: _TurnKey | None = None
    """Place in the order of tenants: its turn key, or an earlier one; None: it is in no order."""

    @property
    def turn_key(self) -> _TurnKey:
        """Sort key of a tenant that waits."""
        return (self.tokens, *self.queue[0].order, self.name)

    @property
    def waiting(self) -> WaitingTokens:
        """Tokens of a tenant that waits."""
        return WaitingTokens(self.tokens, self.num_queued_tokens, self.queue[0].expected_tokens)


class _BandQueue:
    """Queue of one band, fair between tenants by tokens; the algorithm is `FlowQueue`'s.

    A poll charges many tenants, few of which are near their turn. So a charged tenant stays at its place until the
    order is read up to it.

    Invariants: `_by_place` holds the places of the waiting tenants, sorted; no tenant's place is behind its turn key;
    a tenant is in `_waiting` or in `_idle`, not in both.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Tenant] = {}
        self._idle: OrderedDict[str, int] = OrderedDict()
        """Counters of tenants without waiting requests, of the one used longest ago first."""
        self._by_place: list[_TurnKey] = []
        self._last_floor = 0
        self._by_turn = TokensByTurn({})
        self.is_summed_up = False
        """True if `_by_turn` is to be used as it is."""
        self._by_size = LargestFirst()
        self.by_deadline = SummedKeys()
        """Tokens of the waiting requests with a deadline, by it."""
        self.without_deadline = 0
        """Tokens of those without one."""
        self._changed: set[str] = set()
        """Tenants whose number of waiting requests `_by_size` has not taken in."""
        self.num_requests = 0
        self.num_tokens = 0

    def add(self, queued: QueuedRequest) -> None:
        name = queued.request.tenant
        tenant = self._waiting.get(name)
        if tenant is None:
            floor = self._floor()
            tenant = self._waiting[name] = _Tenant(name, max(self._idle.pop(name, floor), floor))
        insort(tenant.queue, queued, key=lambda entry: entry.order)
        tenant.num_queued_tokens += queued.expected_tokens
        self._place(tenant)
        self.num_requests += 1
        self.num_tokens += queued.expected_tokens
        if queued.deadline_s is None:
            self.without_deadline += queued.expected_tokens
        else:
            self.by_deadline.add(queued.deadline_s, queued.expected_tokens)

    def remove(self, queued: QueuedRequest) -> None:
        tenant = self._waiting[queued.request.tenant]
        index = bisect_left(tenant.queue, queued.order, key=lambda entry: entry.order)
        assert tenant.queue[index] is queued
        del tenant.queue[index]
        tenant.num_queued_tokens -= queued.expected_tokens
        self._place(tenant)
        if not tenant.queue:
            del self._waiting[tenant.name]
            self._keep_idle(tenant.name, tenant.tokens)
            if not self._waiting:
                self._last_floor = max(self._last_floor, tenant.tokens)
        self.num_requests -= 1
        self.num_tokens -= queued.expected_tokens
        if queued.deadline_s is None:
            self.without_deadline -= queued.expected_tokens
        else:
            self.by_deadline.add(queued.deadline_s, -queued.expected_tokens, -1)

    def heads(self) -> Iterator[QueuedRequest]:
        """Yield each tenant's first request, the tenant with the fewest tokens first. The queue must not change."""
        index = 0
        while (tenant := self._at(index)) is not None:
            yield tenant.queue[0]
            index += 1

    def charge(self, name: str, tokens: int) -> None:
        tenant = self._waiting.get(name)
        if tenant is not None:
            tenant.tokens += tokens
            if tokens < 0:
                self._place(tenant)
            return
        counter = self._idle.pop(name, None)
        counter = tokens + (self._floor() if counter is None else counter)
        self._keep_idle(name, counter)
        if not self._waiting:
            # The queue is empty, so this charge delayed no tenant. Raise the floor, so that the next tenant to queue
            # starts level.
            self._last_floor = max(self._last_floor, counter)

    def of_tenant(self, name: str) -> TenantQueue:
        tenant = self._waiting.get(name)
        return TenantQueue() if tenant is None else TenantQueue(len(tenant.queue), tenant.num_queued_tokens)

    def num_tokens_before(self, name: str) -> int:
        if not self.is_summed_up or len(self._waiting) <= _FEW_TENANTS:
            self._by_turn = TokensByTurn({tenant.name: tenant.waiting for tenant in self._waiting.values()})
            self.is_summed_up = True
        tenant = self._waiting.get(name)
        if tenant is None:
            floor = self._floor()
            return self._by_turn.served_until(max(self._idle.get(name, floor), floor), but=name)
        num_own = tenant.num_queued_tokens
        return num_own + self._by_turn.served_until(tenant.tokens + num_own, but=name)

    @property
    def num_tenants(self) -> int:
        """Number of tenants with waiting requests."""
        return len(self._waiting)

    def largest(self, most: int) -> dict[str, int]:
        self._take_changes()
        return self._by_size.first(most)

    def check_invariants(self) -> None:
        assert self._by_place == sorted(tenant.place for tenant in self._waiting.values() if tenant.place is not None)
        assert all(t.queue and t.place is not None and t.place <= t.turn_key for t in self._waiting.values())
        assert self._waiting.keys().isdisjoint(self._idle)
        assert len(self._idle) <= _MAX_IDLE_TENANTS
        self._take_changes()

    def _keep_idle(self, name: str, tokens: int) -> None:
        """Keep the counter of a tenant without requests; forget the one used longest ago, if there are too many."""
        self._idle[name] = tokens
        if len(self._idle) > _MAX_IDLE_TENANTS:
            self._idle.popitem(last=False)

    def _place(self, tenant: _Tenant) -> None:
        """Move a tenant whose requests have changed to the place of its turn key; without requests it has none."""
        if tenant.place is not None:
            del self._by_place[bisect_left(self._by_place, tenant.place)]
            tenant.place = None
        if tenant.queue:
            tenant.place = tenant.turn_key
            insort(self._by_place, tenant.place)
        self._changed.add(tenant.name)

    def _at(self, index: int) -> _Tenant | None:
        """Return the tenant with the given number of tenants before it, which are in order; None: there is none."""
        while index < len(self._by_place):
            place = self._by_place[index]
            tenant = self._waiting[place[-1]]
            if place[0] == tenant.tokens:
                return tenant
            del self._by_place[index]
            tenant.place = tenant.turn_key
            insort(self._by_place, tenant.place, lo=index)
        return None

    def _take_changes(self) -> None:
        while self._changed:
            name = self._changed.pop()
            tenant = self._waiting.get(name)
            self._by_size.update(name, 0 if tenant is None else len(tenant.queue))

    def _floor(self) -> int:
        """Return the least counter of the tenants that wait; if none waits, that of the last one that did."""
        first = self._at(0)
        return self._last_floor if first is None else first.tokens


class FlowQueue:
    """Queue of all waiting requests of one ingress, in the order in which they should be dispatched.

    1. A band that has waited `promote_after_s` without a first token is starved and comes first, with one request. Its
       clock restarts with that request's first token.
    2. Otherwise the most urgent band is first.
    3. In a band, the tenant that has had the fewest tokens is first (virtual token counters: Sheng et al., Fairness in
       Serving Large Language Models, OSDI 2024). A tenant is charged the expected cost of a request when the request is
       dispatched, and the difference when the real cost is known. A tenant that begins to wait is lifted to the least
       counter among the tenants that wait, so idle time earns no credit.
    4. In a tenant, the earliest deadline is first, then the first arrival.

    Invariants: a band holds at most its limits, except for requests that come back after a dispatch; a request is in
    the queue at most once.
    """

    def __init__(self, limits: Mapping[Band, BandLimits], promote_after_s: float) -> None:
        self._limits = limits
        self._promote_after_s = promote_after_s
        self._bands = {band: _BandQueue() for band in Band}
        self._served_s = dict.fromkeys(Band, 0.0)

    def __len__(self) -> int:
        return sum(queue.num_requests for queue in self._bands.values())

    def check_room(self, band: Band, tenant: str, expected_tokens: int, num_sequences: int = 1) -> None:
        """Check a new request against the band's limits, and against those of its tenant in the band.

        A request with more sequences or tokens than a limit has room if nothing waits.

        Raises:
            Overloaded: a limit is exceeded; the message names the limit and the value.
        """
        queue, limits = self._bands[band], self._limits[band]
        name = band.name.lower()
        _check_share(queue.of_tenant(tenant), limits, name, expected_tokens, num_sequences)
        if queue.num_requests + num_sequences > limits.max_requests and queue.num_requests:
            message = f"{queue.num_requests} {name} requests wait; the limit is {limits.max_requests}"
            raise Overloaded(message + _others(num_sequences), reason="max_num_queued_reqs")
        if queue.num_tokens + expected_tokens > limits.max_tokens and queue.num_requests:
            message = (
                f"{queue.num_tokens} tokens of {name} requests wait and this one is expected to need "
                f"{expected_tokens}; the limit is {limits.max_tokens}"
            )
            raise Overloaded(message, reason="max_num_queued_tokens")

    def add(self, queued: QueuedRequest, now: float) -> None:
        """Add a request without checking the limits: one that comes back after a dispatch was accepted before."""
        queue = self._bands[queued.request.band]
        if not queue.num_requests:
            self._served_s[queued.request.band] = now
        queue.add(queued)

    def remove(self, queued: QueuedRequest) -> None:
        """Remove a request that no longer waits."""
        self._bands[queued.request.band].remove(queued)

    def bands_in_order(self, starved: Collection[Band]) -> list[Band]:
        """Return the bands with waiting requests, the starved ones first, then by urgency."""
        return sorted(filter(self.num_requests, Band), key=lambda band: (band not in starved, band))

    def in_order(self, band: Band) -> Iterator[QueuedRequest]:
        """Yield the first request of each tenant of a band, in the order of the class's algorithm."""
        return self._bands[band].heads()

    def dispatch(self, queued: QueuedRequest) -> None:
        """Remove a request that is dispatched, and charge its tenant the expected cost."""
        self.remove(queued)
        self._bands[queued.request.band].charge(queued.request.tenant, queued.expected_tokens)

    def served(self, band: Band, now: float) -> None:
        """Restart a band's clock, as one of its requests has its first token."""
        self._served_s[band] = now

    def charge(self, band: Band, tenant: str, tokens: int) -> None:
        """Add tokens, possibly negative, to a tenant's counter: a correction, or the cost on other ingresses."""
        self._bands[band].charge(tenant, tokens)

    def charge_all(self, charges: Mapping[tuple[str, Band], int]) -> None:
        """Charge each tenant and band its tokens."""
        # Not by `charge`: a poll charges thousands of tenants, and a call more for each would show.
        for (tenant, band), tokens in charges.items():
            self._bands[band].charge(tenant, tokens)

    def refresh(self) -> None:
        """Have the next predictions for many tenants see the present queue. Called once in a poll period."""
        for queue in self._bands.values():
            queue.is_summed_up = False

    def num_requests(self, band: Band) -> int:
        """Return the number of requests that wait in a band."""
        return self._bands[band].num_requests

    def num_tokens(self, band: Band) -> int:
        """Return the number of tokens that the requests waiting in a band are expected to cost."""
        return self._bands[band].num_tokens

    def num_tokens_before(self, band: Band, tenant: str) -> int:
        """Return the number of the band's waiting tokens that would be dispatched before a new request of `tenant`.

        They are the tenant's own, and those of each other tenant until its counter passes the one that the tenant has
        after its own. With more than `_FEW_TENANTS` tenants the others are as they were at the last `refresh`.
        """
        return self._bands[band].num_tokens_before(tenant)

    def of_tenant(self, band: Band, tenant: str) -> TenantQueue:
        """Return the size of a tenant's part of a band's queue."""
        return self._bands[band].of_tenant(tenant)

    def next_tenants(self) -> dict[Band, str]:
        """Return the tenant that is next in each band with waiting requests."""
        heads = {band: next(queue.heads(), None) for band, queue in self._bands.items() if queue.num_requests}
        return {band: head.request.tenant for band, head in heads.items() if head is not None}

    def tokens_by_deadline(self, band: Band) -> tuple[int, SummedKeys]:
        """Return the tokens of the requests waiting in a band without a deadline, and of the others by deadline."""
        return self._bands[band].without_deadline, self._bands[band].by_deadline

    def num_tenants(self, band: Band) -> int:
        """Return the number of tenants with requests that wait in a band."""
        return self._bands[band].num_tenants

    def largest(self, band: Band, most: int) -> dict[str, int]:
        """Return the number of requests that wait in a band of each of the `most` tenants with most requests.

        The cost depends on `most`, and on the tenants that have changed since the last call.
        """
        return self._bands[band].largest(most)

    def size(self, band: Band, most: int) -> BandQueueSize:
        """Return the size of a band's queue, with the `most` tenants that have most requests in it."""
        queue = self._bands[band]
        largest = {tenant: queue.of_tenant(tenant) for tenant in queue.largest(most)}
        return BandQueueSize(queue.num_requests, queue.num_tokens, queue.num_tenants, largest)

    def starved_s(self, band: Band, now: float) -> float:
        """Return the time for which a waiting band has had no first token, seconds; 0 if no request waits."""
        return now - self._served_s[band] if self._bands[band].num_requests else 0.0

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        for queue in self._bands.values():
            queue.check_invariants()

    def is_starved(self, band: Band, now: float) -> bool:
        """Return True if a request of the band is due to be promoted."""
        return self._bands[band].num_requests > 0 and self.starved_s(band, now) >= self._promote_after_s


def _others(num_sequences: int) -> str:
    return f", and this request has {num_sequences} sequences" if num_sequences > 1 else ""


def _check_share(own: TenantQueue, limits: BandLimits, name: str, expected_tokens: int, num_sequences: int) -> None:
    """Check a new request against the share of a band's queue that its tenant may fill.

    Raises:
        Overloaded: the share is filled.
    """
    if limits.max_tenant_share >= 1.0:
        return  # The band's own limits are as tight.
    if own.num_requests + num_sequences > limits.max_tenant_requests and own.num_requests:
        message = f"{own.num_requests} {name} requests of this tenant wait; its limit is {limits.max_tenant_requests}"
        raise Overloaded(message + _others(num_sequences), reason="max_tenant_queued_reqs", code="rate_limit_exceeded")
    if own.num_tokens + expected_tokens > limits.max_tenant_tokens and own.num_requests:
        message = (
            f"{own.num_tokens} tokens of this tenant's {name} requests wait and this one is expected to need "
            f"{expected_tokens}; its limit is {limits.max_tenant_tokens}"
        )
        raise Overloaded(message, reason="max_tenant_queued_tokens", code="rate_limit_exceeded")
