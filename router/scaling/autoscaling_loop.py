"""Autoscaling loop of one ingress: observes the load and publishes a decision on the number of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from replicas.errors import ServingError
from router.scaling.autoscaling import Autoscaler, ScalingDecision
from router.scaling.ingress_reports import IngressGossip, IngressReport
from router.scaling.scaling_inputs import IngressLoad

logger = logging.getLogger(__name__)

_PERIOD_S = 0.1
_WAKE_PERIOD_S = 2.0


class AutoscalingLoop:
    """Loop that decides every 0.1 s from the known load, and polls the replicas when their load must be fresh.

    While requests wait and fewer replicas are known than desired, it polls every 0.1 s, so that a new replica gets
    requests at once. A changed decision is sent to the replicas at once, with a poll. If there is no replica, and
    requests wait or no replica was ever seen, it has one started.
    """

    def __init__(
        self, autoscaler: Autoscaler, load: IngressLoad, gossip: IngressGossip, wake: Callable[[], Awaitable[None]]
    ) -> None:
        """`wake` has a replica started if there is none."""
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
        """Last decision; None before the first."""
        return self._decision

    def decide(self) -> ScalingDecision:
        """Decide anew from the present load. Later polls carry the new report of this ingress."""
        own_work = self._load.own_work(self.settings)
        decision = self._autoscaler.decide(self._load.inputs(own_work, self.settings))
        self._gossip.own = IngressReport(
            self._gossip.ingress_id, own_work, self._load.num_waiting(), decision.desired_replicas
        )
        self._has_seen_replicas = self._has_seen_replicas or decision.inputs.num_replicas > 0
        return decision

    async def run(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """Decide until cancelled; `refresh` polls all replicas and dispatches the requests that find room."""
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
