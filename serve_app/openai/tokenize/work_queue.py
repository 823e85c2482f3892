"""Queue of the work that comes before a request's place in flow control, and its order. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from replicas.errors import Overloaded
from replicas.protocol import Band
from serve_app.openai.request.caller import WorkOwner

_MAX_IDLE_TENANTS = 1000


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """Limits of the work that waits in one process; the first two are those of each band."""

    max_queued: int = 1024
    """Most pieces of work."""
    max_queued_bytes: int = 256 * 2**20
    """Most bytes of the bodies and texts that wait."""
    max_tenant_share: float = 1.0
    """Most of both that one tenant may fill, as a share."""
    max_wait_s: float = 60.0
    """Longest wait for a thread, seconds."""
    promote_after_s: float = 5.0
    """Time after which a band that waits has one piece of work done before more urgent ones, seconds."""


@dataclass(eq=False, slots=True)
class QueuedWork:
    """Piece of work: a call that takes no argument."""

    call: Callable[[], Any]
    owner: WorkOwner
    num_bytes: int = 0
    """Bytes that it keeps in memory while it waits."""


@dataclass(slots=True)
class _Tenant:
    """Tenant of one band: the seconds of work that it has had, and its waiting work in order of arrival."""

    work_s: float
    queue: deque[QueuedWork] = field(default_factory=deque)
    num_bytes: int = 0


@dataclass(slots=True)
class _BandQueue:
    """Queue of one band."""

    tenants: dict[str, _Tenant] = field(default_factory=dict)
    num_queued: int = 0
    num_bytes: int = 0
    floor_s: float = 0.0
    """Counter of the tenant that was taken last; a tenant that begins to wait has no lower one."""
    served_s: float = 0.0
    """Time when work was last taken, or began to wait in an empty queue."""

    def waiting(self) -> Iterator[_Tenant]:
        return (tenant for tenant in self.tenants.values() if tenant.queue)

    def of(self, name: str) -> _Tenant:
        """Return a tenant and make it the most recently used one; forget the tenant that has been idle longest."""
        tenant = self.tenants.pop(name, None) or _Tenant(self.floor_s)
        self.tenants[name] = tenant
        if len(self.tenants) > _MAX_IDLE_TENANTS + self.num_queued:
            idle = next((other for other, its in self.tenants.items() if not its.queue and other != name), None)
            if idle is not None:
                del self.tenants[idle]
        return tenant


class WorkQueue:
    """Queue of waiting work, in the order in which threads take it.

    1. A band that has waited `promote_after_s` without a turn comes first, with one piece of work.
    2. Otherwise the most urgent band is first.
    3. In a band, the tenant that has had the least work is first, in seconds of a thread. A tenant that begins to wait
       is lifted to the tenant that was taken last, so that idle time earns no credit.
    4. In a tenant, the first arrival is first.

    Invariants: a band holds at most its limits; `num_queued` and `num_bytes` are the sums over its tenants.
    """

    def __init__(self, limits: WorkLimits) -> None:
        self._limits = limits
        self._bands = {band: _BandQueue() for band in Band}

    def __len__(self) -> int:
        return sum(queue.num_queued for queue in self._bands.values())

    def add(self, work: QueuedWork, now_s: float) -> None:
        """Add a piece of work.

        Raises:
            Overloaded: a limit is reached; the message names it.
        """
        queue = self._bands[work.owner.band]
        tenant = queue.of(work.owner.tenant)
        self._check_room(queue, tenant, work)
        if not queue.num_queued:
            queue.served_s = now_s
        if not tenant.queue:
            tenant.work_s = max(tenant.work_s, queue.floor_s)
        tenant.queue.append(work)
        self._count(work, 1)

    def take(self, bands: Collection[Band], now_s: float) -> QueuedWork | None:
        """Remove and return the first piece of work of these bands; None: there is none."""
        waiting = [band for band in sorted(bands) if self._bands[band].num_queued]
        if not waiting:
            return None
        due = [band for band in waiting if now_s - self._bands[band].served_s >= self._limits.promote_after_s]
        queue = self._bands[(due or waiting)[0]]
        queue.served_s = now_s
        tenant = min(queue.waiting(), key=lambda tenant: tenant.work_s)
        queue.floor_s = tenant.work_s
        work = tenant.queue.popleft()
        self._count(work, -1)
        return work

    def remove(self, work: QueuedWork) -> bool:
        """Remove a piece of work if it still waits; return True if it did."""
        tenant = self._bands[work.owner.band].tenants.get(work.owner.tenant)
        if tenant is None or work not in tenant.queue:
            return False
        tenant.queue.remove(work)
        self._count(work, -1)
        return True

    def charge(self, owner: WorkOwner, work_s: float) -> None:
        """Add the time of a piece of work to its tenant's counter."""
        self._bands[owner.band].of(owner.tenant).work_s += work_s

    def check_invariants(self) -> None:
        """Check the invariants of the class."""
        for queue in self._bands.values():
            assert queue.num_queued == sum(len(tenant.queue) for tenant in queue.tenants.values())
            assert queue.num_bytes == sum(work.num_bytes for tenant in queue.waiting() for work in tenant.queue)
            assert 0 <= queue.num_queued <= self._limits.max_queued
            assert len(queue.tenants) <= _MAX_IDLE_TENANTS + queue.num_queued + 1

    def _check_room(self, queue: _BandQueue, tenant: _Tenant, work: QueuedWork) -> None:
        name, limits, share = work.owner.band.name.lower(), self._limits, self._limits.max_tenant_share
        if share < 1.0:
            whose = f"this tenant's {name} requests"
            reason = "max_tenant_queued_preparations"
            _check(len(tenant.queue), max(1, int(share * limits.max_queued)), 1, whose, reason)
            _check(tenant.num_bytes, int(share * limits.max_queued_bytes), work.num_bytes, whose, f"{reason}_bytes")
        whose = f"{name} requests"
        _check(queue.num_queued, limits.max_queued, 1, whose, "max_queued_preparations")
        _check(queue.num_bytes, limits.max_queued_bytes, work.num_bytes, whose, "max_queued_preparation_bytes")

    def _count(self, work: QueuedWork, sign: int) -> None:
        queue = self._bands[work.owner.band]
        queue.num_queued += sign
        queue.num_bytes += sign * work.num_bytes
        queue.tenants[work.owner.tenant].num_bytes += sign * work.num_bytes


def _check(present: int, limit: int, added: int, whose: str, reason: str) -> None:
    """Refuse what would exceed a limit, unless nothing waits.

    Raises:
        Overloaded: naming the limit and the value.
    """
    if not present or present + added <= limit:
        return
    what = f"{present} bytes" if reason.endswith("bytes") else f"{present} pieces"
    message = f"{what} of {whose} wait to be read and tokenized; the limit is {limit}"
    code = "rate_limit_exceeded" if "tenant" in reason else "server_overloaded"
    raise Overloaded(message, reason=reason, code=code)
