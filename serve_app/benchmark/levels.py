"""Levels of load: a number of requests together, a rate, or the requests of a trace."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Protocol

from serve_app.benchmark.rows import Row
from serve_app.benchmark.sender import ScheduledRequest, Sending, send_on_time, send_together
from serve_app.benchmark.trace import TracedRequest
from serve_app.benchmark.workload import RequestFactory

DEFAULT_NUM_REQUESTS = 100
DEFAULT_ROUNDS = 8
"""Requests of a level without a limit, for each request that is open at the same time."""


class Arrivals(Enum):
    """Spacing of requests that are sent at a rate."""

    POISSON = "poisson"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Extent:
    """Number of requests of a level, their duration, and requests before them that do not count."""

    num_requests: int | None = None
    duration_s: float | None = None
    """Seconds after which no request is sent; those that are open are waited for."""
    num_warmup: int = 0

    def num_requests_or(self, default: int) -> int | None:
        """Return the largest number of requests; None: as many as fit into the duration."""
        return default if self.num_requests is None and self.duration_s is None else self.num_requests


@dataclass(slots=True)
class LevelRun:
    """Requests of one level, as far as they were sent; the sender's tasks write the rows."""

    name: str
    rows: list[Row] = field(default_factory=list)
    num_expected: int | None = None
    """Number of requests; None: as many as fit into the duration."""
    cpu_share: float = 0.0
    """Use of one processor by this process, 0 to 1. Near 1, the generator is the bottleneck."""
    started_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Offer:
    """Everything that a level needs to send its requests."""

    client: Sending
    clock: Callable[[], float]
    """Seconds since the start of the level."""
    factory: RequestFactory
    extent: Extent
    seed: int
    run: LevelRun


class Level(Protocol):
    """One level of load."""

    @property
    def name(self) -> str:
        """Short name with the unit."""

    @property
    def num_together(self) -> int | None:
        """Number of requests that are open together; None: any."""

    async def send(self, offer: Offer) -> None:
        """Send the requests and wait for their responses."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Level at which `number` requests are open at any time."""

    number: int

    @property
    def name(self) -> str:
        """Short name with the unit."""
        return f"{self.number} together"

    @property
    def num_together(self) -> int:
        """Number of open requests."""
        return self.number

    async def send(self, offer: Offer) -> None:
        """Send a request whenever one has ended."""
        extent = offer.extent
        offer.run.num_expected = extent.num_requests_or(max(DEFAULT_NUM_REQUESTS, DEFAULT_ROUNDS * self.number))
        requests: Iterable[ScheduledRequest] = offer.factory.requests(self.name)
        if offer.run.num_expected is not None:
            requests = limited(requests, offer.run.num_expected, None)
        noted = _noted(requests, offer.run.rows)
        await send_together(offer.client, offer.clock, noted, self.number, extent.duration_s)


@dataclass(frozen=True, slots=True)
class Rate:
    """Level at which `per_s` requests leave each second, whatever is open."""

    per_s: float
    arrivals: Arrivals = Arrivals.POISSON

    @property
    def name(self) -> str:
        """Short name with the unit."""
        return f"{self.per_s:g}/s"

    @property
    def num_together(self) -> None:
        """Any number of requests is open together."""
        return None

    async def send(self, offer: Offer) -> None:
        """Send requests at times that follow from the seed."""
        extent = offer.extent
        num_requests = extent.num_requests_or(DEFAULT_NUM_REQUESTS)
        times = times_at(self.per_s, self.arrivals, random.Random(f"{offer.seed}/times"))
        timed = at_times(offer.factory.requests(self.name), times)
        await _send_on_time(offer, limited(timed, num_requests, extent.duration_s))


@dataclass(frozen=True, slots=True)
class Replay:
    """Level at which the requests of a trace leave at its times."""

    trace: Sequence[TracedRequest]

    @property
    def name(self) -> str:
        """Short name."""
        return "trace"

    @property
    def num_together(self) -> None:
        """Any number of requests is open together."""
        return None

    async def send(self, offer: Offer) -> None:
        """Send the trace's requests, or its beginning."""
        traced = offer.factory.traced(self.trace, self.name)
        await _send_on_time(offer, limited(traced, offer.extent.num_requests, offer.extent.duration_s))


def times_at(rate_per_s: float, arrivals: Arrivals, rng: random.Random) -> Iterator[float]:
    """Yield the times of requests at a rate, without end: the first leaves at once."""
    at_s = 0.0
    while True:
        yield at_s
        at_s += 1 / rate_per_s if arrivals is Arrivals.CONSTANT else rng.expovariate(rate_per_s)


def at_times(requests: Iterable[ScheduledRequest], times: Iterable[float]) -> Iterator[ScheduledRequest]:
    """Give requests their times."""
    for at_s, request in zip(times, requests, strict=False):
        request.row.scheduled_s = at_s
        yield request


def limited(
    requests: Iterable[ScheduledRequest], num_requests: int | None, duration_s: float | None
) -> list[ScheduledRequest]:
    """Return the requests up to a number, and to a time at which they are scheduled."""
    chosen = []
    for request in islice(requests, num_requests):
        if duration_s is not None and request.row.scheduled_s >= duration_s:
            break
        chosen.append(request)
    return chosen


async def _send_on_time(offer: Offer, requests: Sequence[ScheduledRequest]) -> None:
    offer.run.num_expected = len(requests)
    offer.run.rows.extend(request.row for request in requests)
    started_s = offer.clock()  # making the requests has taken time
    for row in offer.run.rows:
        row.scheduled_s += started_s
    gc.freeze()  # a collection that goes through the requests would delay sends
    try:
        await send_on_time(offer.client, offer.clock, requests)
    finally:
        gc.unfreeze()


def _noted(requests: Iterable[ScheduledRequest], rows: list[Row]) -> Iterator[ScheduledRequest]:
    """Yield requests and note their rows."""
    for request in requests:
        rows.append(request.row)
        yield request
