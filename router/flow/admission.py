"""Admission of new requests to the queue, by predictions of their wait and of the length of their output."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping

from replicas.errors import Overloaded
from replicas.protocol import BANDS, Band, GenerateRequest
from replicas.timing.rates import SlidingRate
from router.balancing.load_table import LoadTable
from router.flow.capacity_index import CapacityIndex
from router.flow.flow_queue import BandLimits, FlowQueue
from router.types import Headroom

_WINDOW_S = 4.0
"""Window over which the requested tokens are averaged, seconds. It sets how soon a burst and its end are noticed."""
_LEAST_SHARE = 0.02
"""Least share of the replicas' speed that a band is assumed to get, since its requests are promoted when it starves."""
_MAX_KEYS = 4096
_NUM_LENGTHS = 64


class Admission:
    """Admission control of one ingress: refuses requests when a band is full or when they would start too late.

    Predicted wait = tokens before the request / speed for its band.

    1. The tokens before the request are all waiting tokens of more urgent bands, and those tokens of its own band that
       come first in the fair order between tenants. So the request of an idle tenant is among the next, even beside a
       long queue of another tenant. If other tenants yield a slot to the request, no token of its band is before it.
    2. The speed for the band is the speed of all replicas under load, less the tokens per second lately requested in
       more urgent bands. This is the mean wait in a queue with preemptive priorities (Conway, Maxwell and Miller,
       Theory of Scheduling, 1967). Refused requests count as requested: clients send them again, and they are served
       before any less urgent work.

    The retry time of a refused client is the predicted wait. It is at most the time in which the present queue would be
    done without more urgent arrivals, plus `_WINDOW_S`. The load cannot be predicted for longer, and clients that
    return long after an overload would prolong it.
    """

    def __init__(
        self, limits: Mapping[Band, BandLimits], queue: FlowQueue, table: LoadTable, capacity: CapacityIndex
    ) -> None:
        self._limits = limits
        self._queue = queue
        self._table = table
        self._capacity = capacity
        self._wanted = {band: SlidingRate(_WINDOW_S) for band in Band}

    def check(self, band: Band, tenant: str, num_tokens: int, left_s: float = math.inf, num_sequences: int = 1) -> None:
        """Accept or refuse a request of `num_tokens` in all its sequences, whose deadline is `left_s` from now.

        Raises:
            Overloaded: the band or the tenant's share of it is full, or the request would start later than its band's
                limit or its deadline.
        """
        wait_s = self.wait_s(band, tenant) or 0.0
        self.count(band, num_tokens)
        try:
            self._queue.check_room(band, tenant, num_tokens, num_sequences)
            self._check_wait(band, wait_s, left_s)
        except Overloaded as error:
            retry_after_s = min(wait_s, self._drain_s(band, tenant) + _WINDOW_S)
            raise Overloaded(str(error), retry_after_s, error.reason, error.code) from None

    def count(self, band: Band, num_tokens: int) -> None:
        """Count tokens that are requested in a band."""
        self._wanted[band].add(num_tokens, self._table.now())

    def headroom(self, band: Band, tenant: str) -> Headroom:
        """Return a tenant's limits in a band's queue, and their present use.

        What others have waiting counts as far as it leaves the tenant less than its own limit.
        """
        limits, own = self._limits[band], self._queue.of_tenant(band, tenant)
        others_requests = limits.max_requests - limits.max_tenant_requests
        others_tokens = limits.max_tokens - limits.max_tenant_tokens
        return Headroom(
            max_requests=limits.max_tenant_requests,
            num_requests=max(own.num_requests, self._queue.num_requests(band) - others_requests),
            max_tokens=limits.max_tenant_tokens,
            num_tokens=max(own.num_tokens, self._queue.num_tokens(band) - others_tokens),
            wait_s=self.wait_s(band, tenant),
            max_wait_s=limits.max_wait_s,
        )

    def wait_s(self, band: Band, tenant: str) -> float | None:
        """Return the predicted wait of a request of `tenant` that arrives now, seconds; None: the speed is unknown."""
        tokens_per_s = self._tokens_per_s()
        if tokens_per_s <= 0:
            return None
        now = self._table.now()
        urgent_per_s = sum(self._wanted[other].per_s(now) for other in BANDS[:band])
        return self._num_before(band, tenant) / max(tokens_per_s - urgent_per_s, _LEAST_SHARE * tokens_per_s)

    def _drain_s(self, band: Band, tenant: str) -> float:
        """Return the seconds until the work before a new request is done; 0 if the replicas' speed is unknown."""
        tokens_per_s = self._tokens_per_s()
        return self._num_before(band, tenant) / tokens_per_s if tokens_per_s > 0 else 0.0

    def _num_before(self, band: Band, tenant: str) -> int:
        urgent = sum(self._queue.num_tokens(other) for other in BANDS[:band])
        if not self._queue.of_tenant(band, tenant).num_requests and self._capacity.yielding(band).num_replicas(tenant):
            return urgent
        return urgent + self._queue.num_tokens_before(band, tenant)

    def _tokens_per_s(self) -> float:
        return self._table.cluster().saturated_tokens_per_s

    def _check_wait(self, band: Band, wait_s: float, left_s: float) -> None:
        limit_s = self._limits[band].max_wait_s
        if wait_s > left_s:
            message = f"it would start in about {wait_s:.1f} s and its deadline is in {left_s:.3f} s"
            raise Overloaded(message, reason="deadline", code="slow_down")
        if limit_s is not None and wait_s > limit_s:
            message = f"it would start in about {wait_s:.1f} s; the limit for {band.name.lower()} is {limit_s:.10g} s"
            raise Overloaded(message, reason="max_predicted_wait")


class OutputLengths:
    """Running quantile of the output lengths of each tenant and band, over its last 64 requests.

    For an unknown tenant the quantile is the whole band's. A request in an unknown band is expected to use all its
    `max_tokens`, and so is one with `ignore_eos` and no stop string. The number of tenants is bounded: the tenants
    seen longest ago are forgotten.
    """

    def __init__(self, quantile: float = 0.7) -> None:
        self._quantile = quantile
        self._lengths: OrderedDict[tuple[str | None, Band], deque[int]] = OrderedDict()

    def observe(self, tenant: str, band: Band, num_tokens: int) -> None:
        """Note that a request ended after `num_tokens` output tokens."""
        for key in ((tenant, band), (None, band)):
            lengths = self._lengths.setdefault(key, deque(maxlen=_NUM_LENGTHS))
            lengths.append(num_tokens)
            self._lengths.move_to_end(key)
        while len(self._lengths) > _MAX_KEYS:
            self._lengths.popitem(last=False)

    def expect(self, request: GenerateRequest) -> int:
        """Return the number of output tokens to expect of a request, at most its `max_tokens`."""
        limit = request.params.max_tokens
        known = self._lengths.get((request.tenant, request.band)) or self._lengths.get((None, request.band))
        if not known or (request.params.ignore_eos and not request.params.stop):
            return limit
        ordered = sorted(known)
        return min(limit, ordered[min(len(ordered) - 1, int(self._quantile * len(ordered)))])
