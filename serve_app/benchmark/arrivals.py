"""Times at which requests leave."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import islice

from serve_app.benchmark.sender import ScheduledRequest


class Arrivals(Enum):
    """Spacing of requests that are sent at a rate."""

    POISSON = "poisson"
    CONSTANT = "constant"


def at_rate(
    requests: Iterable[ScheduledRequest], rate_per_s: float, arrivals: Arrivals, rng: random.Random
) -> Iterator[ScheduledRequest]:
    """Give requests their times: the first leaves at once."""
    at_s = 0.0
    for request in requests:
        request.row.scheduled_s = at_s
        yield request
        at_s += 1 / rate_per_s if arrivals is Arrivals.CONSTANT else rng.expovariate(rate_per_s)


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
