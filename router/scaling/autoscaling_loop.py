"""Autoscaling loop of one ingress: observes the load and publishes a decision on the number of replicas.

Its inputs are the work that waits in ingresses and replicas, and the replicas' recent throughput.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from replicas.errors import ServingError
from replicas.protocol import BANDS, Band, ReplicaStats
from replicas.timing.rates import SlidingRate
from router.balancing.load_table import LoadTable
from router.flow.flow_queue import FlowQueue
from router.flow.placements import ServedTokens
from router.scaling.autoscaling import (
    Autoscaler,
    AutoscalingSettings,
    ReplicaBounds,
    ScalingDecision,
    ScalingInputs,
    urgent_tokens,
)
from router.scaling.ingress_reports import IngressGossip, IngressReport, PendingWork
from router.scaling.replica_sums import ReplicaParts, ReplicaSums

logger = logging.getLogger(__name__)

_PERIOD_S = 0.1
_IDLE_PERIOD_S = 0.5
"""Period while no request waits."""
_WAKE_PERIOD_S = 2.0
_DEADLINE_SHARE = 0.8
"""Share of the time to its deadline in which batch work should be done. The rest is reserve for uneven load."""
_LAST_EXPONENT = 32
"""Work due in more than 2 ** 32 seconds is one entry: a client may name any deadline."""
_SERVED_WINDOWS_S = (3.0, 10.0)


@dataclass(frozen=True, slots=True)
class BacklogWork:
    """Requests of one band and deadline that wait outside flow control, as expected tokens."""

    band: Band
    tokens: int
    deadline_unix_s: float | None


class BacklogSource(Protocol):
    """Source of the requests that this ingress holds outside its flow queue."""

    def num_requests(self) -> int:
        """Return the number of those requests."""

    def work(self) -> Sequence[BacklogWork]:
        """Return the work of those requests; requests with about the same deadline are one entry."""


class ServedRate:
    """Rate at which all replicas together have lately computed tokens, without batch work, from their poll replies."""

    def __init__(self) -> None:
        self._polled: Sequence[ReplicaStats] | None = None
        self._polled_s = float("-inf")
        self._seen: dict[str, ServedTokens] = {}
        self._rates: tuple[SlidingRate, ...] = ()

    def observe(self, polled: Sequence[ReplicaStats], now: float) -> None:
        """Count the answers to a poll of all replicas; the same answers again change nothing."""
        if polled is self._polled:
            return
        known, self._seen = self._seen, {}
        num_tokens = 0
        for stats in polled:
            seen = known.get(stats.replica_id)
            if seen is None:
                seen = ServedTokens(stats.served_tokens)
            else:
                since = seen.since(stats.served_tokens)
                num_tokens += sum(tokens for (_, band), tokens in since if band is not Band.BATCH)
            self._seen[stats.replica_id] = seen
        if not self._rates:
            self._rates = tuple(SlidingRate(window_s, start_s=now) for window_s in _SERVED_WINDOWS_S)
        else:
            for rate in self._rates:
                rate.add(num_tokens, now, now - self._polled_s)
        self._polled, self._polled_s = polled, now

    def tokens_per_s(self, now: float) -> float:
        """Return the larger of the means over 3 s and 10 s before the last poll; 0 if that poll is over 10 s ago."""
        if now - self._polled_s > max(_SERVED_WINDOWS_S):
            return 0.0
        return max((rate.per_s(self._polled_s) for rate in self._rates), default=0.0)


class IngressLoad:
    """Load as one ingress sees it: its own waiting work, the other ingresses' reports, and the replicas' reports."""

    def __init__(
        self, queue: FlowQueue, table: LoadTable, gossip: IngressGossip, backlog_source: BacklogSource | None = None,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`backlog_source`: the requests that this ingress holds outside its queue; None: there are none."""
        self._queue = queue
        self._table = table
        self._gossip = gossip
        self._backlog_source = backlog_source
        self._unix_clock = unix_clock
        self._served = ServedRate()
        self._changed = table.subscribe()
        self._sums = ReplicaSums()

    def now(self) -> float:
        """Return the time, in monotonic seconds."""
        return self._table.now()

    def num_waiting(self) -> int:
        """Return the number of requests that wait in this ingress."""
        return len(self._queue) + (0 if self._backlog_source is None else self._backlog_source.num_requests())

    def own_work(self, settings: AutoscalingSettings) -> tuple[PendingWork, ...]:
        """Return the work that waits in this ingress."""
        work = work_in_queue(self._queue, settings, self.now())
        if self._backlog_source is not None:
            work += work_in_backlog(self._backlog_source.work(), settings, self._unix_clock())
        return work

    def inputs(self, own_work: tuple[PendingWork, ...], settings: AutoscalingSettings) -> ScalingInputs:
        """Return the inputs of a decision; draining replicas are not counted."""
        now = self.now()
        self._take_changes()
        sums, parts = self._sums, self._sums.parts
        self._served.observe(self._gossip.polled, now)
        peer_reports = self._gossip.peer_reports
        in_ingresses = own_work + tuple(work for report in peer_reports for work in report.work)
        return ScalingInputs(
            num_replicas=parts.num_serving,
            num_requests=self.num_waiting() + sum(report.num_requests for report in peer_reports) + parts.num_requests,
            work=in_ingresses + work_in_replicas(parts, settings),
            saturated_tokens_per_s=sums.saturated_tokens_per_s(),
            served_tokens_per_s=self._served.tokens_per_s(now),
            num_running=parts.num_running,
            num_slots=sums.num_slots(),
            outstanding_tokens=urgent_tokens(in_ingresses, settings) + parts.urgent_tokens,
        )

    def _take_changes(self) -> None:
        while self._changed:
            replica_id = self._changed.pop()
            self._sums.update(replica_id, self._table.load_of(replica_id))


class AutoscalingLoop:
    """Loop that decides from the known load, and polls the replicas when their load must be fresh.

    It decides every 0.1 s while requests wait, and every 0.5 s otherwise. While requests wait and fewer replicas are
    known than desired, it also polls: a new replica then gets requests at once. A changed decision is sent to the
    replicas at once, with a poll. If there is no replica, and requests wait or no replica was ever seen, it has one
    started.
    """

    def __init__(
        self, autoscaler: Autoscaler, load: IngressLoad, gossip: IngressGossip, wake: Callable[[], Awaitable[None]]
    ) -> None:
        """`wake` has a replica started if there is none."""
        self._autoscaler = autoscaler
        self._load = load
        self._gossip = gossip
        self._wake = wake
        self.decision: ScalingDecision | None = None
        """Last decision; None before the first."""
        self._waking: asyncio.Future[None] | None = None
        self._woke_s = float("-inf")
        self._has_seen_replicas = False

    @property
    def settings(self) -> AutoscalingSettings:
        """Settings of the autoscaler."""
        return self._autoscaler.settings

    @property
    def bounds(self) -> ReplicaBounds:
        """Present bounds on the number of replicas."""
        return self._autoscaler.bounds

    def change_bounds(self, bounds: ReplicaBounds) -> None:
        """Replace the bounds on the number of replicas."""
        self._autoscaler.bounds = bounds

    def decide(self) -> ScalingDecision:
        """Decide anew from the present load. Later polls carry the new report of this ingress."""
        own_work = self._load.own_work(self.settings)
        decision = self._autoscaler.decide(self._load.inputs(own_work, self.settings))
        self._gossip.own = IngressReport(
            self._gossip.ingress_id,
            own_work,
            self._load.num_waiting(),
            decision.desired_replicas,
            self._gossip.keys_in_use(),
        )
        self._has_seen_replicas = self._has_seen_replicas or decision.inputs.num_replicas > 0
        return decision

    async def run(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """Decide until cancelled; `refresh` polls all replicas and dispatches the requests that find room."""
        while True:
            before, self.decision = self.decision, self.decide()
            has_changed = before is None or before.desired_replicas != self.decision.desired_replicas
            if has_changed:
                self._log(before, self.decision)
            if has_changed or self._awaits_replicas(self.decision):
                with contextlib.suppress(ServingError):
                    await refresh()
            self._wake_if_needed(self.decision)
            await asyncio.sleep(_PERIOD_S if self._load.num_waiting() > 0 else _IDLE_PERIOD_S)

    def _awaits_replicas(self, decision: ScalingDecision) -> bool:
        return self._load.num_waiting() > 0 and decision.inputs.num_replicas < decision.desired_replicas

    def _wake_if_needed(self, decision: ScalingDecision) -> None:
        is_wanted = self._load.num_waiting() > 0 or not self._has_seen_replicas
        if decision.inputs.num_replicas or not is_wanted or self.bounds.min_replicas > 0:
            return
        now = self._load.now()
        if (self._waking is None or self._waking.done()) and now - self._woke_s >= _WAKE_PERIOD_S:
            self._woke_s = now
            self._waking = asyncio.ensure_future(self._wake())

    def _log(self, before: ScalingDecision | None, decision: ScalingDecision) -> None:
        logger.info(
            "autoscaling decision",
            extra={
                "desired_replicas": decision.desired_replicas,
                "desired_replicas_before": None if before is None else before.desired_replicas,
                "num_replicas": decision.inputs.num_replicas,
                "drain_s": decision.drain_s,
                "served_tokens_per_s": round(decision.inputs.served_tokens_per_s, 1),
                "replica_tokens_per_s": round(decision.replica_tokens_per_s, 1),
            },
        )


def work_in_queue(queue: FlowQueue, settings: AutoscalingSettings, now: float) -> tuple[PendingWork, ...]:
    """Return the work that waits in flow control; batch work with similar deadlines is one entry, with the earliest."""
    urgent = sum(queue.num_tokens(band) for band in BANDS[: Band.BATCH])
    without_deadline, by_deadline = queue.tokens_by_deadline(Band.BATCH)
    work = [(settings.target_drain_s, urgent), (settings.batch_drain_s, without_deadline)]
    num_seen, tokens_seen, exponent = 0, 0, math.floor(math.log2(settings.target_drain_s))
    while num_seen < len(by_deadline):
        # Batch work that is due before the next power of two, and not before this one.
        due_s = max(settings.target_drain_s, 2.0**exponent)
        exponent += 1
        end_s = now + 2.0**exponent / _DEADLINE_SHARE if exponent < _LAST_EXPONENT else math.inf
        num_due, tokens_due = by_deadline.up_to(math.nextafter(end_s, -math.inf) if end_s < math.inf else end_s)
        work.append((due_s, tokens_due - tokens_seen))
        num_seen, tokens_seen = num_due, tokens_due
    return _work_by_due((due_s, tokens) for due_s, tokens in work if tokens)


def work_in_backlog(
    waiting: Iterable[BacklogWork], settings: AutoscalingSettings, now_unix_s: float
) -> tuple[PendingWork, ...]:
    """Return the work that waits outside flow control; batch work is due by its deadline, other work at the target."""

    def due_s(work: BacklogWork) -> float:
        if work.band is not Band.BATCH:
            return settings.target_drain_s
        return _batch_due_s(work.deadline_unix_s, now_unix_s, settings)

    return _work_by_due((due_s(work), work.tokens) for work in waiting)


def _work_by_due(waiting: Iterable[tuple[float, int]]) -> tuple[PendingWork, ...]:
    """Return the sums of the tokens that are due at the same time; each pair is a time and a number of tokens."""
    by_due = Counter[float]()
    for due_s, tokens in waiting:
        by_due[due_s] += tokens
    return tuple(PendingWork(tokens, due_s) for due_s, tokens in sorted(by_due.items()))


def work_in_replicas(parts: ReplicaParts, settings: AutoscalingSettings) -> tuple[PendingWork, ...]:
    """Return the work that waits in the replicas: the waiting requests' share of the outstanding tokens."""
    works = (
        PendingWork(parts.urgent_waiting_tokens, settings.target_drain_s),
        PendingWork(parts.batch_waiting_tokens, settings.batch_drain_s),
    )
    return tuple(work for work in works if work.tokens)


def _batch_due_s(deadline_s: float | None, now_s: float, settings: AutoscalingSettings) -> float:
    """Return the seconds until batch work is due, rounded down to a power of two so that a long queue has few entries.

    Never less than `target_drain_s`. Work without a deadline is due in `batch_drain_s`, not rounded.
    """
    if deadline_s is None:
        return settings.batch_drain_s
    due_s = max(settings.target_drain_s, _DEADLINE_SHARE * (deadline_s - now_s))
    return max(settings.target_drain_s, 2.0 ** math.floor(math.log2(due_s)))
