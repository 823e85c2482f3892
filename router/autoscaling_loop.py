"""Watches the load of one ingress and keeps a decision on the number of replicas, which others obey."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from replicas.errors import ServingError
from router.autoscaling import Autoscaler, ScalingDecision
from router.held_work import HeldWork, IngressGossip
from router.scaling_inputs import IngressLoad

logger = logging.getLogger(__name__)

_PERIOD_S = 0.1
_WAKE_PERIOD_S = 2.0


class AutoscalingLoop:
    """Decides every 0.1 s from what is known here, and makes sure that what is known is new where it matters.

    While requests wait and fewer replicas are known than there should be, replicas are asked at that pace too, so
    that a new one gets work at once. A decision that changes is told to them at once. Where there are no replicas
    and requests wait, or nobody has yet said what is served, one is woken.
    """

    def __init__(
        self, autoscaler: Autoscaler, load: IngressLoad, gossip: IngressGossip, wake: Callable[[], Awaitable[None]]
    ) -> None:
        """`wake` has a replica started where there is none."""
        self.settings = autoscaler.settings
        self._autoscaler = autoscaler
        self._load = load
        self._gossip = gossip
        self._wake = wake
        self._decision: ScalingDecision | None = None
        self._waking: asyncio.Future[None] | None = None
        self._woke_s = float("-inf")
        self._has_seen_replicas = False

    @property
    def decision(self) -> ScalingDecision | None:
        """The last one; None before the first."""
        return self._decision

    def decide(self) -> ScalingDecision:
        """Look at the load and decide anew; polls from now on say what this ingress holds and asks for."""
        own_work = self._load.own_work(self.settings)
        decision = self._autoscaler.decide(self._load.inputs(own_work, self.settings))
        self._gossip.own = HeldWork(
            self._gossip.ingress_id, own_work, self._load.num_waiting(), decision.desired_replicas
        )
        self._has_seen_replicas = self._has_seen_replicas or decision.inputs.num_replicas > 0
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

    def _awaits_replicas(self, decision: ScalingDecision) -> bool:
        return self._load.num_waiting() > 0 and decision.inputs.num_replicas < decision.desired_replicas

    def _wake_if_needed(self, decision: ScalingDecision) -> None:
        is_wanted = self._load.num_waiting() > 0 or not self._has_seen_replicas
        if decision.inputs.num_replicas or not is_wanted or self.settings.min_replicas > 0:
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
