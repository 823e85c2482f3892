"""Planning: the number of lines to lease, and the batches whose lines run next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from replicas.protocol import BANDS, Band
from router.flow.flow_queue import FlowQueue
from router.types import ReplicaView
from serve_app.jobs.storage.rows.batch_queue import OpenBatch

_AHEAD_SHARE = 4
"""Slots per line that waits ahead. Such a line is already leased and tokenized when a slot becomes free, and one
lease transaction serves several lines."""
_MIN_AHEAD = 16
"""Fewest lines ahead of each of several workers, unless one alone would have fewer. With less, each lease transaction
would serve only a few lines."""


class LineCapacity:
    """Number of lines to lease, from the load of the replicas. Flow control decides when each is sent to one.

    Each worker takes its share of the free slots, so none holds lines that another one could run at once. It takes its
    share of the lines ahead, too, but at least `_MIN_AHEAD`.
    """

    def __init__(self, load: Callable[[], Sequence[ReplicaView]], queue: FlowQueue) -> None:
        self._load = load
        self._queue = queue

    def available(self, band: Band, num_not_sent: int, num_workers: int = 1) -> int:
        """Return the number of lines of this band that this worker may lease now.

        `num_not_sent`: leased lines of this band and more urgent ones that are not in flow control's queue yet.
        Without a replica one line may wait there, so that the autoscaler starts a replica.
        """
        views = self._load()
        num_free = sum(max(0, view.num_unused_slots(band)) for view in views if not view.stats.is_draining)
        num_waiting = sum(self._queue.num_requests(other) for other in BANDS[: band + 1])
        return ceil(num_free / num_workers) + self.num_ahead(views, num_workers) - num_waiting - num_not_sent

    def minimum(self, band: Band, num_workers: int = 1) -> int:
        """Return the fewest lines of a band that are worth a lease transaction."""
        return max(1, self.num_ahead(self._load(), num_workers) // 2) if band is Band.BATCH else 1

    @staticmethod
    def num_ahead(views: Sequence[ReplicaView], num_workers: int = 1) -> int:
        """Return the number of lines that should wait ahead in each worker, besides those that run."""
        num_all = sum(max(1, view.stats.num_slots // _AHEAD_SHARE) for view in views)
        return max(1, min(num_all, _MIN_AHEAD), ceil(num_all / num_workers))


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
    running_tokens: Mapping[tuple[str, Band], int],
    turns: Mapping[str, int] = MappingProxyType({}),
) -> list[LeaseRequest]:
    """Return the lines to lease now. `turns`: number of each tenant's last lease, counted up; 0 or missing: none yet.

    1. Bands are served most urgent first; `capacity(band)` limits the lines of the band and more urgent ones together.
    2. Within a band, the tenant whose running lines have the fewest expected tokens (`running_tokens`) gets the next
       line, which counts as the mean of its queued lines; of several, the one whose last lease is the longest ago.
    3. Within a tenant, the batch with the nearest deadline comes first, then the oldest; `batches` are in this order.
    """
    by_band: dict[Band, dict[str, list[OpenBatch]]] = {}
    for batch in batches:
        by_band.setdefault(raised_band(batch, late_deadline_unix_s), {}).setdefault(batch.tenant, []).append(batch)
    requests: list[LeaseRequest] = []
    for band in sorted(by_band):
        num_left = capacity(band) - sum(request.num_lines for request in requests)
        order = {tenant: turns.get(tenant, 0) for tenant in by_band[band]}
        running = {tenant: running_tokens.get((tenant, band), 0) for tenant in order}
        given = _shares({tenant: _Queued.of(by_band[band][tenant]) for tenant in order}, num_left, running, order)
        requests += [
            request for tenant, number in given.items() for request in _share(band, by_band[band][tenant], number)
        ]
    return requests


@dataclass(frozen=True, slots=True)
class _Queued:
    """Queued lines of a tenant, and the mean of their expected tokens."""

    num_lines: int
    line_tokens: float

    @classmethod
    def of(cls, batches: Sequence[OpenBatch]) -> _Queued:
        num_lines = sum(batch.num_queued for batch in batches)
        return cls(num_lines, sum(batch.num_queued * batch.line_tokens for batch in batches) / max(1, num_lines))


def _shares(
    queued: Mapping[str, _Queued], num_left: int, running: Mapping[str, int], order: Mapping[str, int]
) -> Counter[str]:
    """Return the number of lines that each tenant gets, of those that it has queued."""
    given: Counter[str] = Counter()

    def place(tenant: str) -> tuple[float, int]:
        return running[tenant] + given[tenant] * queued[tenant].line_tokens, order[tenant]

    for _ in range(min(num_left, sum(lines.num_lines for lines in queued.values()))):
        unserved = [tenant for tenant in queued if given[tenant] < queued[tenant].num_lines]
        given[min(unserved, key=place)] += 1
    return given


def _share(band: Band, batches: list[OpenBatch], num_lines: int) -> list[LeaseRequest]:
    requests = []
    for batch in batches:
        taken = min(num_lines, batch.num_queued)
        if taken:
            requests.append(LeaseRequest(batch, band, taken))
        num_lines -= taken
    return requests
