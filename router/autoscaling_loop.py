"""Watches the load of one ingress and keeps a decision on the number of replicas, which others obey."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from replicas.errors import ServingError
from replicas.protocol import Band, ReplicaStats
from router.autoscaling import Autoscaler, ScalingDecision, ScalingInputs
from router.flow_queue import FlowQueue
from router.held_work import HeldWork
from router.load_table import LoadTable
from router.scaling_inputs import (
    HeldBack,
    ServedRate,
    urgent_outstanding,
    work_held_back,
    work_in_queue,
    work_in_replicas,
)

logger = logging.getLogger(__name__)

_PERIOD_S = 0.1
_WAKE_PERIOD_S = 2.0


class ScalingClient(Protocol):
    """Takes part in the polls of the replicas; the Ray adapter is `serve_router.ServeReplicaClient`."""

    def share(self, held: HeldWork) -> None:
        """Tell the replicas with every poll from now on what this ingress holds."""
        ...

    def held_elsewhere(self) -> Sequence[HeldWork]:
        """What other ingresses hold, as the replicas said in the last poll."""
        ...

    def polled(self) -> Sequence[ReplicaStats]:
        """What the last poll answered."""
        ...

    async def wake(self) -> None:
        """Have a replica started where there is none."""
        ...


class AutoscalingLoop:
    """Decides every 0.1 s from what is known here, and makes sure that what is known is new where it matters.

    While requests wait and fewer replicas are known than there should be, replicas are asked at that pace too, so
    that a new one gets work at once. A decision that changes is told to them at once. Where there are no replicas
    and requests wait, or nobody has yet said what is served, one is woken.
    """

    def __init__(
        self, ingress_id: str, autoscaler: Autoscaler, queue: FlowQueue, table: LoadTable, client: ScalingClient,
        held_back: HeldBack | None = None, unix_clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`held_back`: what this ingress has beside its queue; None: nothing."""
        self.settings = autoscaler.settings
        self._ingress_id = ingress_id
        self._autoscaler = autoscaler
        self._queue = queue
        self._table = table
        self._client = client
        self._held_back = held_back
        self._unix_clock = unix_clock
        self._served = ServedRate()
        self._decision: ScalingDecision | None = None
        self._waking: asyncio.Task[None] | None = None
        self._woke_s = float("-inf")
        self._has_seen_replicas = False

    @property
    def decision(self) -> ScalingDecision | None:
        """The last one; None before the first."""
        return self._decision

    def decide(self) -> ScalingDecision:
        """Look at the load and decide anew."""
        now = self._table.now()
        views = [view for view in self._table.views() if not view.stats.is_draining]
        self._served.observe(self._client.polled(), now)
        own_work, num_waiting = work_in_queue(self._queue, self.settings, now), self._num_waiting()
        if self._held_back is not None:
            own_work += work_held_back(self._held_back.work(), self.settings, self._unix_clock())
        elsewhere = self._client.held_elsewhere()
        in_ingresses = own_work + tuple(work for held in elsewhere for work in held.work)
        inputs = ScalingInputs(
            num_replicas=len(views),
            num_requests=num_waiting
            + sum(held.num_requests for held in elsewhere)
            + sum(sum(view.num_by_band) for view in views),
            work=in_ingresses + work_in_replicas(views, self.settings),
            saturated_tokens_per_s=tuple(
                view.stats.saturated_tokens_per_s for view in views if view.stats.saturated_tokens_per_s > 0
            ),
            served_tokens_per_s=self._served.tokens_per_s(now),
            num_running=sum(sum(view.stats.num_running_by_band[: Band.BATCH]) for view in views),
            num_slots=min((view.stats.num_slots for view in views), default=1),
            outstanding_tokens=urgent_outstanding(in_ingresses, views, self.settings),
        )
        decision = self._autoscaler.decide(inputs)
        self._client.share(HeldWork(self._ingress_id, own_work, num_waiting, decision.desired_replicas))
        self._has_seen_replicas = self._has_seen_replicas or bool(views)
        return decision

    async def run(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """Decide until cancelled; `refresh` polls all replicas and dispatches what can be dispatched then."""
        while True:
            before, self._decision = self._decision, self.decide()
            has_changed = before is None or before.desired_replicas != self._decision.desired_replicas
            if has_changed:
                self._log(before, self._decision)
            if has_changed or self._awaits_replicas(self._decision):
                with contextlib.suppress(ServingError):
                    await refresh()
            self._wake_if_needed(self._decision)
            await asyncio.sleep(_PERIOD_S)

    def _num_waiting(self) -> int:
        return len(self._queue) + (0 if self._held_back is None else self._held_back.num_requests())

    def _awaits_replicas(self, decision: ScalingDecision) -> bool:
        return self._num_waiting() > 0 and decision.inputs.num_replicas < decision.desired_replicas

    def _wake_if_needed(self, decision: ScalingDecision) -> None:
        is_wanted = self._num_waiting() > 0 or not self._has_seen_replicas
        if decision.inputs.num_replicas or not is_wanted or self.settings.min_replicas > 0:
            return
        now = self._table.now()
        if (self._waking is None or self._waking.done()) and now - self._woke_s >= _WAKE_PERIOD_S:
            self._woke_s = now
            self._waking = asyncio.create_task(self._client.wake())

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
