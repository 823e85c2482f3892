"""The router's parts as every process that gives requests to model replicas has them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from router.autoscaling import Autoscaler
from router.autoscaling_loop import AutoscalingLoop
from router.dispatch import Dispatcher
from router.flow_control import FlowController
from router.held_work import DESIRED_REPLICAS
from router.load_table import LoadTable
from router.policy import LeastRequests, LeastTokens, PowerOfTwo, Random, RoundRobin
from router.prefix_index import PREFIX_INDEX_BLOCKS, PrefixIndex
from router.scaling_inputs import HeldBack
from router.serve_router import ServeReplicaClient
from router.types import RouterObserver, RoutingPolicy
from serve_app.config import HeadwayConfig


class Routing:
    """Flow control, load table, dispatcher and autoscaling of one ingress: an HTTP ingress, or the jobs process."""

    def __init__(
        self,
        config: HeadwayConfig,
        model: DeploymentHandle[Any],
        ingress_id: str,
        observer: RouterObserver,
        held_back: HeldBack | None = None,
    ) -> None:
        """`held_back`: what the process has yet to put in line; None: nothing."""
        self.table = LoadTable(time.monotonic)
        flow = FlowController(config.flow_limits(), self.table, _policy(config), observer, time.monotonic)
        self.queue = flow.queue
        client = ServeReplicaClient(model, ingress_id)
        self.dispatcher = Dispatcher(client, flow, self.table, observer, config.load_poll_period_s)
        autoscaler = Autoscaler(config.autoscaling_settings(), time.monotonic)
        self.autoscaling = AutoscalingLoop(ingress_id, autoscaler, flow.queue, self.table, client, held_back)

    async def run(self) -> None:
        """Keep the load known and the decisions new until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.dispatcher.run())
            tasks.create_task(self.autoscaling.run(self.dispatcher.refresh))

    def autoscaling_stats(self) -> dict[str, float]:
        """What a deployment reports to Serve's controller, for `obey_ingresses`."""
        decision = self.autoscaling.decision
        return {} if decision is None else {DESIRED_REPLICAS: float(decision.desired_replicas)}


def _policy(config: HeadwayConfig) -> RoutingPolicy:
    rng = random.Random()
    max_blocks = PREFIX_INDEX_BLOCKS if config.engine_limits().enable_prefix_caching else 0
    policies: dict[str, Callable[[], RoutingPolicy]] = {
        "least_tokens": lambda: LeastTokens(rng, PrefixIndex(max_blocks)),
        "least_requests": lambda: LeastRequests(rng),
        "power_of_two": lambda: PowerOfTwo(rng),
        "round_robin": RoundRobin,
        "random": lambda: Random(rng),
    }
    return policies[config.routing_policy]()
