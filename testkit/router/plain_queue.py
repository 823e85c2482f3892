"""Reference of the order between the tenants of one band: the same as the product's, computed anew each time."""

from __future__ import annotations

from collections import defaultdict

from router.flow.flow_queue import QueuedRequest


class PlainQueue:
    """Virtual token counters of the tenants of one band, and their waiting requests, without any kept order."""

    def __init__(self, max_idle_tenants: int) -> None:
        self._max_idle_tenants = max_idle_tenants
        self._waiting: dict[str, list[QueuedRequest]] = defaultdict(list)
        self._counters: dict[str, float] = {}
        """Counters of all remembered tenants, of the one used longest ago first."""
        self._last_floor = 0.0

    def add(self, queued: QueuedRequest) -> None:
        """Add a request; a tenant that begins to wait is lifted to the least counter of those that wait."""
        name, floor = queued.request.tenant, self._floor()
        counter = self._counters.get(name, floor)
        self._waiting[name].append(queued)
        self._use(name, counter if len(self._waiting[name]) > 1 else max(counter, floor))

    def remove(self, queued: QueuedRequest) -> None:
        """Remove a request."""
        name = queued.request.tenant
        self._waiting[name].remove(queued)
        self._raise_floor(name)
        self._use(name, self._counters[name])

    def charge(self, name: str, tokens: float) -> None:
        """Add tokens to a counter; a new tenant starts at the floor."""
        self._use(name, (self._counters[name] if name in self._counters else self._floor()) + tokens)
        self._raise_floor(name)

    def heads(self) -> list[QueuedRequest]:
        """Return each tenant's first request, that of the tenant with the fewest tokens first."""
        firsts = [min(waiting, key=lambda queued: queued.order) for waiting in self._waiting.values() if waiting]
        return sorted(firsts, key=lambda first: (self._counters[first.request.tenant], *first.order))

    def num_tokens_before(self, name: str) -> int:
        """Return the waiting tokens that are served before a new request of a tenant."""
        own = sum(queued.expected_tokens for queued in self._waiting[name])
        floor = self._floor()
        start = self._counters[name] if own else max(self._counters.get(name, floor), floor)
        num_tokens = own
        for first in self.heads():
            other = first.request.tenant
            if other != name and self._counters[other] <= start + own:
                most = round(start + own - self._counters[other]) + first.expected_tokens
                num_tokens += min(most, sum(queued.expected_tokens for queued in self._waiting[other]))
        return num_tokens

    def _use(self, name: str, counter: float) -> None:
        self._counters.pop(name, None)
        self._counters[name] = counter
        self._forget()

    def _forget(self) -> None:
        idle = [name for name in self._counters if not self._waiting[name]]
        for name in idle[: max(0, len(idle) - self._max_idle_tenants)]:
            del self._counters[name]

    def _floor(self) -> float:
        waiting = [self._counters[name] for name, requests in self._waiting.items() if requests]
        return min(waiting, default=self._last_floor)

    def _raise_floor(self, name: str) -> None:
        if not any(self._waiting.values()):
            self._last_floor = max(self._last_floor, self._counters[name])
