"""Admission of new requests to the queue: a request that would wait too long is refused at once."""

from __future__ import annotations

from collections.abc import Mapping

from replicas.errors import Overloaded
from replicas.protocol import Band
from replicas.rates import SlidingRate
from router.balancing.load_table import LoadTable
from router.flow.flow_queue import BandLimits, FlowQueue
from router.types import Headroom

_WINDOW_S = 4.0
"""Window over which the requested tokens are averaged, seconds. It sets how soon a burst and its end are noticed."""
_LEAST_SHARE = 0.02
"""Least share of the replicas' speed that a band is assumed to get, since its requests are promoted when it starves."""


class Admission:
    """Admission control of one ingress: refuses requests when a band is full or when they would start too late.

    Predicted wait = tokens that wait in the request's band and in more urgent ones / tokens per second left for the
    band. Left for the band is the speed of all replicas under load, less the tokens per second lately requested in more
    urgent bands (the mean wait in a queue with preemptive priorities: Conway, Maxwell and Miller, Theory of Scheduling,
    1967). Refused requests count as requested: they are sent again, and are served before any less urgent work.

    A refused client is asked to retry after the predicted wait, but at most `_WINDOW_S` after the present queue would
    be done if nothing more urgent arrived. The load cannot be predicted for longer, and clients that return long after
    an overload would prolong it.
    """

    def __init__(self, limits: Mapping[Band, BandLimits], queue: FlowQueue, table: LoadTable) -> None:
        self._limits = limits
        self._queue = queue
        self._table = table
        self._wanted = {band: SlidingRate(_WINDOW_S) for band in Band}

    def check(self, band: Band, num_tokens: int, deadline_s: float | None) -> None:
        """Accept or refuse a request of `num_tokens`. `deadline_s` is monotonic.

        Raises:
            Overloaded: the band is full, or the request would start later than its band's limit or its deadline.
        """
        wait_s = self.wait_s(band) or 0.0
        self._wanted[band].add(num_tokens, self._table.now())
        try:
            self._queue.check_room(band, num_tokens)
            self._check_wait(band, wait_s, deadline_s)
        except Overloaded as error:
            retry_after_s = min(wait_s, self._drain_s(band) + _WINDOW_S)
            raise Overloaded(str(error), retry_after_s, error.reason, error.code) from None

    def headroom(self, band: Band) -> Headroom:
        """Return the limits of a band's queue, and their present use."""
        limits = self._limits[band]
        return Headroom(
            max_requests=limits.max_requests,
            num_requests=self._queue.num_requests(band),
            max_tokens=limits.max_tokens,
            num_tokens=self._queue.num_tokens(band),
            wait_s=self.wait_s(band),
            max_wait_s=limits.max_wait_s,
        )

    def wait_s(self, band: Band) -> float | None:
        """Return the predicted wait of a request that arrives now, seconds; None if the replicas' speed is unknown."""
        tokens_per_s = self._tokens_per_s()
        if tokens_per_s <= 0:
            return None
        now = self._table.now()
        urgent_per_s = sum(self._wanted[other].per_s(now) for other in Band if other < band)
        return self._num_before(band) / max(tokens_per_s - urgent_per_s, _LEAST_SHARE * tokens_per_s)

    def _drain_s(self, band: Band) -> float:
        """Return the seconds until the work queued in `band` and above is done; 0 if the replicas' speed is unknown."""
        tokens_per_s = self._tokens_per_s()
        return self._num_before(band) / tokens_per_s if tokens_per_s > 0 else 0.0

    def _num_before(self, band: Band) -> int:
        return sum(self._queue.num_tokens(other) for other in Band if other <= band)

    def _tokens_per_s(self) -> float:
        return sum(view.stats.saturated_tokens_per_s for view in self._table.views())

    def _check_wait(self, band: Band, wait_s: float, deadline_s: float | None) -> None:
        limit_s = self._limits[band].max_wait_s
        left_s = float("inf") if deadline_s is None else deadline_s - self._table.now()
        if wait_s > left_s:
            message = f"it would start in about {wait_s:.1f} s and its deadline is in {left_s:.1f} s"
            raise Overloaded(message, reason="deadline", code="slow_down")
        if limit_s is not None and wait_s > limit_s:
            message = f"it would start in about {wait_s:.1f} s; the limit for {band.name.lower()} is {limit_s:g} s"
            raise Overloaded(message, reason="max_predicted_wait")
