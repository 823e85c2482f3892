"""Reasons for waits in flow control: the time in which each request waited, by its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from replicas.protocol import BANDS, Band
from router.timeline import Part, Seconds

_Key = tuple[Band, str]


class QueueWait:
    """Wait of one request in the queue; see `router.timeline.Wait`."""

    def __init__(self, clock: WaitClock, band: Band, tenant: str, now: float) -> None:
        self._clock = clock
        self._key = (band, tenant)
        self._since_s = now
        self._before = clock.read(self._key, now)
        self._reasons: Seconds | None = None

    def reasons(self, now: float) -> Seconds:
        """Return the seconds of the wait by their reason, up to now or to the wait's end."""
        if self._reasons is not None:
            return self._reasons
        cold_s, higher_s, turn_s = (
            after - before for after, before in zip(self._clock.read(self._key, now), self._before, strict=True)
        )
        return {
            Part.QUEUED_COLD_START: cold_s,
            Part.QUEUED_HIGHER_BAND: higher_s,
            Part.QUEUED_FAIRNESS: max(0.0, now - self._since_s - cold_s - higher_s - turn_s),
            Part.QUEUED_CAPACITY: turn_s,
        }

    def end(self, now: float) -> None:
        """End the wait. Called once or more; the first call counts."""
        if self._reasons is None:
            self._reasons = self.reasons(now)
            self._clock.forget(self._key)


class WaitClock:
    """Clocks that run while a reason holds, so that a wait costs the same however often its reason changes.

    1. No replica takes requests: the clock of the cold start runs, for all requests.
    2. Otherwise requests of the most urgent waiting band wait for room or for their turn, and the clock of the tenant
       that is next in that band runs.
    3. The clocks of all other bands run: more urgent requests wait.

    The three exclude each other for each band, so the differences of a request's clocks add up to its wait, less the
    time in which another tenant of its band was next.

    Invariant: a tenant has a clock if and only if a request of it waits in the band.
    """

    def __init__(self, now: float) -> None:
        self._read_s = now
        self._is_cold = False
        self._next: Mapping[Band, str] = {}
        self._cold_s = 0.0
        self._higher_s = dict.fromkeys(Band, 0.0)
        self._turn_s: dict[_Key, float] = {}
        self._num_waiting: Counter[_Key] = Counter()

    def begin(self, band: Band, tenant: str, now: float) -> QueueWait:
        """Begin the wait of a request. Its `end` must be called."""
        self._turn_s.setdefault((band, tenant), 0.0)
        self._num_waiting[band, tenant] += 1
        return QueueWait(self, band, tenant, now)

    def observe(self, now: float, is_cold: bool, next_tenants: Mapping[Band, str]) -> None:
        """Note the present state: if no replica takes requests, and in each waiting band the tenant that is next."""
        self._advance(now)
        self._is_cold, self._next = is_cold, next_tenants

    def read(self, key: _Key, now: float) -> tuple[float, float, float]:
        """Return the clocks of a request: of the cold start, of more urgent bands and of its tenant's turn."""
        self._advance(now)
        return self._cold_s, self._higher_s[key[0]], self._turn_s[key]

    def forget(self, key: _Key) -> None:
        """Note that a request no longer waits."""
        self._num_waiting[key] -= 1
        if not self._num_waiting[key]:
            del self._num_waiting[key], self._turn_s[key]

    def check_invariants(self) -> None:
        """Fail if an invariant of the class does not hold."""
        assert self._num_waiting.keys() == self._turn_s.keys()
        assert all(number > 0 for number in self._num_waiting.values())

    def _advance(self, now: float) -> None:
        elapsed_s, self._read_s = max(0.0, now - self._read_s), max(now, self._read_s)
        if self._is_cold:
            self._cold_s += elapsed_s
            return
        if self._next:
            most_urgent = min(self._next)
            key = (most_urgent, self._next[most_urgent])
            if key in self._turn_s:
                self._turn_s[key] += elapsed_s
            for band in BANDS[most_urgent + 1 :]:
                self._higher_s[band] += elapsed_s
