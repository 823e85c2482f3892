"""What waits in ingresses and replicas, and what replicas have lately computed: what the autoscaler looks at."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from replicas.protocol import Band, ReplicaStats
from router.autoscaling import AutoscalingSettings, urgent_tokens
from router.flow_queue import FlowQueue
from router.held_work import Work
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
        self._seen: dict[str, dict[tuple[str, Band], int]] = {}
        self._served: deque[tuple[float, int]] = deque()
        """(when polled, tokens computed since the poll before)"""

    def observe(self, polled: Sequence[ReplicaStats], now: float) -> None:
        """Take in what a poll of all replicas answered; the same answers again change nothing."""
        if polled is self._polled:
            return
        self._polled = polled
        seen: dict[str, dict[tuple[str, Band], int]] = {}
        num_tokens = 0
        for stats in polled:
            account: dict[tuple[str, Band], int] = {
                (entry.tenant, entry.band): entry.tokens
                for entry in stats.served_tokens
                if entry.band is not Band.BATCH
            }
            before = self._seen.get(stats.replica_id)
            if before is not None:
                # A tenant that a replica had forgotten is counted from zero again.
                num_tokens += sum(
                    tokens - before.get(key, 0) if tokens >= before.get(key, 0) else tokens
                    for key, tokens in account.items()
                )
            seen[stats.replica_id] = account
        self._seen = seen
        self._served.append((now, num_tokens))

    def tokens_per_s(self, now: float) -> float:
        """The larger of the means over the last 3 s and the last 10 s."""
        while len(self._served) > 1 and now - self._served[1][0] > max(_SERVED_WINDOWS_S):
            self._served.popleft()
        return max(self._mean(now - window_s) for window_s in _SERVED_WINDOWS_S)

    def _mean(self, since_s: float) -> float:
        num_tokens, elapsed_s = 0, 0.0
        for before, after in pairwise(self._served):
            if after[0] > since_s:
                num_tokens += after[1]
                elapsed_s += after[0] - before[0]
        return num_tokens / elapsed_s if elapsed_s > 0 else 0.0


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
