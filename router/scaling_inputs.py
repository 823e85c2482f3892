"""What waits in ingresses and replicas, and what replicas have lately computed: what the autoscaler looks at."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from replicas.protocol import Band, ReplicaStats
from replicas.rates import SlidingRate
from router.autoscaling import AutoscalingSettings, ScalingInputs, urgent_tokens
from router.flow_queue import FlowQueue
from router.held_work import IngressGossip, Work
from router.load_table import LoadTable
from router.types import ReplicaView

_DEADLINE_SHARE = 0.8
"""Share of the time to its deadline in which batch work is to be done, since work is never spread quite evenly."""
_SERVED_WINDOWS_S = (3.0, 10.0)


@dataclass(frozen=True, slots=True)
class WaitingWork:
    """Requests that wait elsewhere than in flow control, and when they are due."""

    band: Band
    tokens: int
    deadline_unix_s: float | None


class HeldBack(Protocol):
    """Knows what this ingress has yet to put in line."""

    def num_requests(self) -> int:
        """How many requests that are."""
        ...

    def work(self) -> Sequence[WaitingWork]:
        """What they need, those with about the same deadline together."""
        ...


class ServedRate:
    """Tokens a second that all replicas together have lately computed, save batch work, as they say in polls."""

    def __init__(self) -> None:
        self._polled: Sequence[ReplicaStats] | None = None
        self._polled_s = float("-inf")
        self._seen: dict[str, dict[tuple[str, Band], int]] = {}
        self._rates: tuple[SlidingRate, ...] = ()

    def observe(self, polled: Sequence[ReplicaStats], now: float) -> None:
        """Take in what a poll of all replicas answered; the same answers again change nothing."""
        if polled is self._polled:
            return
        accounts = {stats.replica_id: _account(stats) for stats in polled}
        num_tokens = sum(
            _served_since(self._seen[replica_id], account)
            for replica_id, account in accounts.items()
            if replica_id in self._seen
        )
        if not self._rates:
            self._rates = tuple(SlidingRate(window_s, start_s=now) for window_s in _SERVED_WINDOWS_S)
        else:
            for rate in self._rates:
                rate.add(num_tokens, now, now - self._polled_s)
        self._polled, self._polled_s, self._seen = polled, now, accounts

    def tokens_per_s(self, now: float) -> float:
        """The larger of the means over 3 s and 10 s before the last poll; 0 where that is longer ago."""
        if now - self._polled_s > max(_SERVED_WINDOWS_S):
            return 0.0
        return max((rate.per_s(self._polled_s) for rate in self._rates), default=0.0)


def _account(stats: ReplicaStats) -> dict[tuple[str, Band], int]:
    return {(entry.tenant, entry.band): entry.tokens for entry in stats.served_tokens if entry.band is not Band.BATCH}


def _served_since(before: dict[tuple[str, Band], int], account: dict[tuple[str, Band], int]) -> int:
    """Tokens served since; a tenant that the replica had forgotten is counted from zero again."""
    return sum(
        tokens - before.get(key, 0) if tokens >= before.get(key, 0) else tokens for key, tokens in account.items()
    )


class IngressLoad:
    """Load as one ingress sees it: what it holds, what others hold, and what the replicas report."""

    def __init__(
        self, queue: FlowQueue, table: LoadTable, gossip: IngressGossip, held_back: HeldBack | None = None,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`held_back`: what this ingress has beside its queue; None: nothing."""
        self._queue = queue
        self._table = table
        self._gossip = gossip
        self._held_back = held_back
        self._unix_clock = unix_clock
        self._served = ServedRate()

    def now(self) -> float:
        """Monotonic seconds."""
        return self._table.now()

    def num_waiting(self) -> int:
        """Requests that wait in this ingress."""
        return len(self._queue) + (0 if self._held_back is None else self._held_back.num_requests())

    def own_work(self, settings: AutoscalingSettings) -> tuple[Work, ...]:
        """What waits in this ingress."""
        work = work_in_queue(self._queue, settings, self.now())
        if self._held_back is not None:
            work += work_held_back(self._held_back.work(), settings, self._unix_clock())
        return work

    def inputs(self, own_work: tuple[Work, ...], settings: AutoscalingSettings) -> ScalingInputs:
        """All that a decision depends on; a replica that drains counts no more."""
        now = self.now()
        views = [view for view in self._table.views() if not view.stats.is_draining]
        self._served.observe(self._gossip.polled, now)
        elsewhere = self._gossip.elsewhere
        in_ingresses = own_work + tuple(work for held in elsewhere for work in held.work)
        return ScalingInputs(
            num_replicas=len(views),
            num_requests=self.num_waiting()
            + sum(held.num_requests for held in elsewhere)
            + sum(sum(view.num_by_band) for view in views),
            work=in_ingresses + work_in_replicas(views, settings),
            saturated_tokens_per_s=tuple(
                view.stats.saturated_tokens_per_s for view in views if view.stats.saturated_tokens_per_s > 0
            ),
            served_tokens_per_s=self._served.tokens_per_s(now),
            num_running=sum(sum(view.stats.num_running_by_band[: Band.BATCH]) for view in views),
            num_slots=min((view.stats.num_slots for view in views), default=1),
            outstanding_tokens=urgent_outstanding(in_ingresses, views, settings),
        )


def work_in_queue(queue: FlowQueue, settings: AutoscalingSettings, now: float) -> tuple[Work, ...]:
    """What waits in flow control; batch work with near deadlines is put together, always with the earliest."""
    urgent = sum(queue.num_tokens(band) for band in Band if band is not Band.BATCH)
    by_due: dict[float, int] = {settings.target_drain_s: urgent} if urgent else {}
    for waiting in queue.waiting(Band.BATCH):
        due_s = _batch_due_s(waiting.deadline_s, settings, now)
        by_due[due_s] = by_due.get(due_s, 0) + waiting.expected_tokens
    return tuple(Work(tokens, due_s) for due_s, tokens in sorted(by_due.items()))


def work_held_back(
    waiting: Iterable[WaitingWork], settings: AutoscalingSettings, now_unix_s: float
) -> tuple[Work, ...]:
    """What waits elsewhere; batch work is due as far as its deadline needs."""
    by_due: dict[float, int] = {}
    for work in waiting:
        due_s = settings.target_drain_s
        if work.band is Band.BATCH:
            left_s = None if work.deadline_unix_s is None else work.deadline_unix_s - now_unix_s
            due_s = _batch_due_s(left_s, settings, 0.0)
        by_due[due_s] = by_due.get(due_s, 0) + work.tokens
    return tuple(Work(tokens, due_s) for due_s, tokens in sorted(by_due.items()))


def work_in_replicas(views: Iterable[ReplicaView], settings: AutoscalingSettings) -> tuple[Work, ...]:
    """What waits in the replicas: of their outstanding tokens, the share of the requests that do not run yet."""
    urgent = batch = 0.0
    for view in views:
        stats = view.stats
        if stats.num_waiting:
            each = stats.outstanding_tokens / (stats.num_running + stats.num_waiting)
            batch += each * stats.num_waiting_by_band[Band.BATCH]
            urgent += each * (stats.num_waiting - stats.num_waiting_by_band[Band.BATCH])
    works = (Work(int(urgent), settings.target_drain_s), Work(int(batch), settings.batch_drain_s))
    return tuple(work for work in works if work.tokens)


def urgent_outstanding(work: Iterable[Work], views: Iterable[ReplicaView], settings: AutoscalingSettings) -> int:
    """Tokens that all but batch work needs still: that of `work`, and its share of what each replica has."""
    num_tokens = urgent_tokens(work, settings)
    for view in views:
        if num_requests := sum(view.num_by_band):
            num_tokens += view.outstanding_tokens * sum(view.num_by_band[: Band.BATCH]) // num_requests
    return num_tokens


def _batch_due_s(deadline_s: float | None, settings: AutoscalingSettings, now: float) -> float:
    """Rounded down to a power of two, so that a long queue gives few pieces of work."""
    if deadline_s is None:
        return settings.batch_drain_s
    left_s = max(settings.target_drain_s, _DEADLINE_SHARE * (deadline_s - now))
    return max(settings.target_drain_s, 2.0 ** math.floor(math.log2(left_s)))
