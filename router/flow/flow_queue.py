"""Requests that wait for a replica, and which of them is next. Pure: time is an argument, nothing here waits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from replicas.errors import Overloaded
from replicas.protocol import Band, GenerateRequest

_MAX_IDLE_TENANTS = 1000


@dataclass(frozen=True, slots=True)
class BandLimits:
    """What may wait in one band of one ingress."""

    max_requests: int
    max_tokens: int
    """Prompt tokens plus output tokens still expected."""
    max_wait_s: float | None = None
    """Nothing is accepted that is predicted to wait longer, seconds; None: however long."""


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request in line."""

    request: GenerateRequest
    expected_tokens: int
    """What it will cost: prompt tokens plus the output expected of it."""
    deadline_s: float | None
    """Monotonic."""
    arrival_index: int
    """Order of arrival; kept when a request comes back, so that it stands where it stood."""

    @property
    def order(self) -> tuple[float, int]:
        """Earliest deadline first, then in order of arrival."""
        return (float("inf") if self.deadline_s is None else self.deadline_s, self.arrival_index)


@dataclass(slots=True)
class _Tenant:
    """One tenant in one band: what it has had, and what it waits for, in order."""

    name: str
    tokens: float
    queue: list[QueuedRequest] = field(default_factory=list)

    @property
    def priority(self) -> tuple[float, tuple[float, int]]:
        """The least is next: who has had the fewest tokens, then whose first request comes first."""
        return (self.tokens, self.queue[0].order)


class _BandQueue:
    """One band's requests, token-fair between tenants; the algorithm is `FlowQueue`'s.

    Invariant: `_by_priority` holds the tenants that wait, sorted by `priority`.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._by_priority: list[_Tenant] = []
        self._last_floor = 0.0
        self.num_requests = 0
        self.num_tokens = 0

    def add(self, queued: QueuedRequest) -> None:
        tenant = self._tenant(queued.request.tenant)
        if not tenant.queue:
            tenant.tokens = max(tenant.tokens, self._floor())
        self._take_out(tenant)
        insort(tenant.queue, queued, key=lambda entry: entry.order)
        self._insert(tenant)
        self.num_requests += 1
        self.num_tokens += queued.expected_tokens

    def remove(self, queued: QueuedRequest) -> None:
        tenant = self._tenants[queued.request.tenant]
        self._take_out(tenant)
        index = bisect_left(tenant.queue, queued.order, key=lambda entry: entry.order)
        assert tenant.queue[index] is queued
        del tenant.queue[index]
        self._insert(tenant)
        self.num_requests -= 1
        self.num_tokens -= queued.expected_tokens

    def heads(self) -> Iterator[QueuedRequest]:
        """The first of each tenant's line, the tenant that has had least first; not to be held over a change."""
        for tenant in self._by_priority:
            yield tenant.queue[0]

    def charge(self, name: str, tokens: float) -> None:
        tenant = self._tenant(name)
        self._take_out(tenant)
        tenant.tokens += tokens
        self._insert(tenant)
        if not self.num_requests:
            # Nobody was made to wait for it, so whoever begins to wait next owes nothing and is owed nothing.
            self._last_floor = max(self._last_floor, tenant.tokens)

    def waiting(self) -> Iterator[QueuedRequest]:
        for tenant in self._tenants.values():
            yield from tenant.queue

    def num_by_tenant(self) -> dict[str, int]:
        return {tenant.name: len(tenant.queue) for tenant in self._by_priority}

    def _tenant(self, name: str) -> _Tenant:
        """The tenant, now the most recently used one; a new one starts at the least counter that waits."""
        tenant = self._tenants.pop(name, None) or _Tenant(name, self._floor())
        self._tenants[name] = tenant
        if len(self._tenants) - len(self._by_priority) > _MAX_IDLE_TENANTS:
            idle = next((other for other, its in self._tenants.items() if not its.queue and other != name), None)
            if idle is not None:
                del self._tenants[idle]
        return tenant

    def _insert(self, tenant: _Tenant) -> None:
        if tenant.queue:
            insort(self._by_priority, tenant, key=lambda entry: entry.priority)

    def _take_out(self, tenant: _Tenant) -> None:
        if tenant.queue:
            index = bisect_left(self._by_priority, tenant.priority, key=lambda entry: entry.priority)
            assert self._by_priority[index] is tenant
            del self._by_priority[index]

    def _floor(self) -> float:
        """The least counter of the tenants that wait; when nobody does, the last one known."""
        if self._by_priority:
            self._last_floor = self._by_priority[0].tokens
        return self._last_floor


class FlowQueue:
    """Every request that waits in one ingress, in the order in which they should be dispatched.

    1. A band that has waited `promote_after_s` without a first token is first, once; then its clock restarts.
    2. Otherwise the most urgent band is first.
    3. In a band, the tenant that has had the fewest tokens is first (virtual token counters: Sheng et al.,
       Fairness in Serving Large Language Models, OSDI 2024). A tenant is charged what a request is expected
       to cost when it is dispatched, and the difference when its cost is known. A tenant that begins to wait
       is lifted to the least counter among those that wait: having asked for nothing earns no credit.
    4. In a tenant, the earliest deadline is first, then the first to come.

    Invariants: a band holds at most its limits, save requests that come back after a dispatch; a request is in
    at most one line.
    """

    def __init__(self, limits: Mapping[Band, BandLimits], promote_after_s: float) -> None:
        self._limits = limits
        self._promote_after_s = promote_after_s
        self._bands = {band: _BandQueue() for band in Band}
        self._served_s = dict.fromkeys(Band, 0.0)

    def __len__(self) -> int:
        return sum(queue.num_requests for queue in self._bands.values())

    def check_room(self, band: Band, expected_tokens: int) -> None:
        """Refuse what the band's limits do not allow.

        Raises:
            Overloaded: naming the limit and the value.
        """
        queue, limits = self._bands[band], self._limits[band]
        name = band.name.lower()
        if queue.num_requests >= limits.max_requests:
            message = f"{queue.num_requests} {name} requests wait; the limit is {limits.max_requests}"
            raise Overloaded(message, reason="max_num_queued_reqs")
        if queue.num_tokens + expected_tokens > limits.max_tokens and queue.num_requests:
            message = (
                f"{queue.num_tokens} tokens of {name} requests wait and this one is expected to need "
                f"{expected_tokens}; the limit is {limits.max_tokens}"
            )
            raise Overloaded(message, reason="max_num_queued_tokens")

    def add(self, queued: QueuedRequest, now: float) -> None:
        """Put a request in line, whatever the limits: one that comes back was accepted before."""
        queue = self._bands[queued.request.band]
        if not queue.num_requests:
            self._served_s[queued.request.band] = now
        queue.add(queued)

    def remove(self, queued: QueuedRequest) -> None:
        """Take out a request that waits no longer."""
        self._bands[queued.request.band].remove(queued)

    def in_order(self, starved: Collection[Band], bands: Collection[Band] = tuple(Band)) -> Iterator[QueuedRequest]:
        """Whom to try next in `bands`: of each tenant the first request, in the order of the class's algorithm."""
        for band in sorted(bands, key=lambda band: (band not in starved, band)):
            yield from self._bands[band].heads()

    def dispatch(self, queued: QueuedRequest) -> None:
        """Take out the request that is dispatched and charge its tenant."""
        self.remove(queued)
        self._bands[queued.request.band].charge(queued.request.tenant, queued.expected_tokens)

    def served(self, band: Band, now: float) -> None:
        """Restart a band's clock: one of its requests has its first token."""
        self._served_s[band] = now

    def charge(self, band: Band, tenant: str, tokens: float) -> None:
        """Correct a tenant's counter by what its requests really cost, or cost elsewhere; may be negative."""
        self._bands[band].charge(tenant, tokens)

    def num_requests(self, band: Band) -> int:
        """Requests that wait in a band."""
        return self._bands[band].num_requests

    def num_tokens(self, band: Band) -> int:
        """Tokens that the requests waiting in a band are expected to cost."""
        return self._bands[band].num_tokens

    def waiting(self, band: Band) -> Iterator[QueuedRequest]:
        """Every request that waits in a band, in no order; the queue must not change meanwhile."""
        return self._bands[band].waiting()

    def num_by_tenant(self, band: Band) -> dict[str, int]:
        """Requests that wait in a band, by tenant."""
        return self._bands[band].num_by_tenant()

    def starved_s(self, band: Band, now: float) -> float:
        """How long a band that waits has had no first token, seconds."""
        return now - self._served_s[band] if self._bands[band].num_requests else 0.0

    def is_starved(self, band: Band, now: float) -> bool:
        """Whether it is time to promote a request of the band."""
        return self._bands[band].num_requests > 0 and self.starved_s(band, now) >= self._promote_after_s
