"""Choice of the batches whose lines run next; pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from replicas.protocol import Band
from serve_app.jobs.storage.batch_queue import OpenBatch


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Number of lines to lease from one batch, to run in `band`."""

    batch: OpenBatch
    band: Band
    num_lines: int


def raised_band(batch: OpenBatch, late_deadline_unix_s: float) -> Band:
    """Return the band in which a batch's lines run now.

    A late batch of the batch band runs in the standard band, if its ceiling allows it.
    """
    is_late = batch.expires_unix_s is not None and batch.expires_unix_s <= late_deadline_unix_s
    if batch.band is Band.BATCH and is_late:
        return max(Band.STANDARD, batch.band_ceiling)
    return batch.band


def plan(
    batches: Iterable[OpenBatch],
    late_deadline_unix_s: float,
    capacity: Callable[[Band], int],
    num_running: Mapping[tuple[str, Band], int],
) -> list[LeaseRequest]:
    """Return the lines to lease now.

    1. Bands are served most urgent first; `capacity(band)` limits the lines of the band and more urgent ones together.
    2. Within a band, the tenant with the fewest running lines (`num_running`) gets the next one.
    3. Within a tenant, the batch with the nearest deadline comes first, then the oldest; `batches` are in this order.
    """
    by_band: dict[Band, dict[str, list[OpenBatch]]] = {}
    for batch in batches:
        by_band.setdefault(raised_band(batch, late_deadline_unix_s), {}).setdefault(batch.tenant, []).append(batch)
    requests: list[LeaseRequest] = []
    for band in sorted(by_band):
        num_left = capacity(band) - sum(request.num_lines for request in requests)
        requests += _plan_band(band, by_band[band], num_left, num_running)
    return requests


def _plan_band(
    band: Band, waiting: dict[str, list[OpenBatch]], num_left: int, num_running: Mapping[tuple[str, Band], int]
) -> list[LeaseRequest]:
    lines = {tenant: sum(batch.num_queued for batch in its) for tenant, its in waiting.items()}
    given: Counter[str] = Counter()
    while num_left > 0 and (open_ := [tenant for tenant in waiting if given[tenant] < lines[tenant]]):
        next_ = min(open_, key=lambda tenant: num_running.get((tenant, band), 0) + given[tenant])
        given[next_] += 1
        num_left -= 1
    return [request for tenant, number in given.items() for request in _share(band, waiting[tenant], number)]


def _share(band: Band, batches: list[OpenBatch], num_lines: int) -> list[LeaseRequest]:
    requests = []
    for batch in batches:
        taken = min(num_lines, batch.num_queued)
        if taken:
            requests.append(LeaseRequest(batch, band, taken))
        num_lines -= taken
    return requests
