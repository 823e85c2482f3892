"""The router's parts as every process that gives requests to model replicas has them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from router.autoscaling import Autoscaler
from router.autoscaling_loop import AutoscalingLoop
from router.dispatch import Dispatcher
from router.flow_control import FlowController
from router.held_work import DESIRED_REPLICAS, IngressGossip
from router.load_table import LoadTable
from router.policy import LeastTokens
from router.prefix_index import PREFIX_INDEX_BLOCKS, PrefixIndex
from router.scaling_inputs import HeldBack, IngressLoad
from router.serve_router import ServeReplicaClient
from router.types import RouterObserver
from serve_app.config import HeadwayConfig

MakeFlow = Callable[[HeadwayConfig, LoadTable, RouterObserver], FlowController]
"""Makes the flow control of an ingress, in its process."""


def late_binding_flow(config: HeadwayConfig, table: LoadTable, observer: RouterObserver) -> FlowController:
    """Flow control as the product has it: late binding, the replica with the least work in tokens."""
    max_blocks = PREFIX_INDEX_BLOCKS if config.engine_limits().enable_prefix_caching else 0
    policy = LeastTokens(random.Random(), PrefixIndex(max_blocks))
    return FlowController(config.flow_limits(), table, policy, observer)


class Routing:
    """Flow control, load table, dispatcher and autoscaling of one ingress: an HTTP ingress, or the jobs process."""

    def __init__(
        self,
        config: HeadwayConfig,
        model: DeploymentHandle[Any],
        observer: RouterObserver,
        make_flow: MakeFlow,
        held_back: HeldBack | None = None,
    ) -> None:
        """`held_back`: what the process has yet to put in line; None: nothing."""
        gossip = IngressGossip(serve.get_replica_context().replica_id.unique_id)
        self.table = LoadTable(time.monotonic)
        flow = make_flow(config, self.table, observer)
        self.queue = flow.queue
        client = ServeReplicaClient(model, gossip)
        self.dispatcher = Dispatcher(client, flow, observer, config.load_poll_period_s)
        autoscaler = Autoscaler(config.autoscaling_settings(), time.monotonic)
        load = IngressLoad(self.queue, self.table, gossip, held_back)
        self.autoscaling = AutoscalingLoop(autoscaler, load, gossip, client.wake)

    async def run(self) -> None:
        """Keep the load known and the decisions new until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.dispatcher.run())
            tasks.create_task(self.autoscaling.run(self.dispatcher.refresh))

    def autoscaling_stats(self) -> dict[str, float]:
        """What a deployment reports to Serve's controller, for `obey_ingresses`."""
        decision = self.autoscaling.decision
        return {} if decision is None else {DESIRED_REPLICAS: float(decision.desired_replicas)}
