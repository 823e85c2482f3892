"""Wiring of the router in each process that sends requests to model replicas."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from router.balancing.load_table import LoadTable
from router.balancing.policy import LeastTokens
from router.balancing.prefix_index import PREFIX_INDEX_BLOCKS, PrefixIndex
from router.dispatch import Dispatcher
from router.flow.flow_control import FlowController
from router.scaling.autoscaling import Autoscaler
from router.scaling.autoscaling_loop import AutoscalingLoop
from router.scaling.ingress_reports import DESIRED_REPLICAS, IngressGossip
from router.scaling.scaling_inputs import BacklogSource, IngressLoad
from router.serve_router import ServeReplicaClient
from router.types import RouterObserver
from serve_app.config import HeadwayConfig

MakeFlow = Callable[[HeadwayConfig, LoadTable, RouterObserver], FlowController]
"""Factory of an ingress's flow control, called in the ingress's process."""


def late_binding_flow(config: HeadwayConfig, table: LoadTable, observer: RouterObserver) -> FlowController:
    """Return the default flow control: late binding to the replica with the least outstanding tokens."""
    max_blocks = PREFIX_INDEX_BLOCKS if config.engine_limits().enable_prefix_caching else 0
    policy = LeastTokens(random.Random(), PrefixIndex(max_blocks))
    return FlowController(config.flow_limits(), table, policy, observer)


class Routing:
    """Router parts of one ingress or of the jobs process: flow control, load table, dispatcher and autoscaling."""

    def __init__(
        self,
        config: HeadwayConfig,
        model: DeploymentHandle[Any],
        observer: RouterObserver,
        make_flow: MakeFlow,
        backlog_source: BacklogSource | None = None,
    ) -> None:
        """Create the parts; `backlog_source` counts work that is not yet in flow control, None: there is none."""
        gossip = IngressGossip(serve.get_replica_context().replica_id.unique_id)
        self.table = LoadTable(time.monotonic)
        flow = make_flow(config, self.table, observer)
        self.queue = flow.queue
        client = ServeReplicaClient(model, gossip)
        self.dispatcher = Dispatcher(client, flow, observer, config.load_poll_period_s)
        autoscaler = Autoscaler(config.autoscaling_settings(), time.monotonic)
        load = IngressLoad(self.queue, self.table, gossip, backlog_source)
        self.autoscaling = AutoscalingLoop(autoscaler, load, gossip, client.wake)

    async def run(self) -> None:
        """Poll the replicas' load and update the autoscaling decision until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.dispatcher.run())
            tasks.create_task(self.autoscaling.run(self.dispatcher.refresh))

    def autoscaling_stats(self) -> dict[str, float]:
        """Return a deployment's report to Serve's controller, for `application_autoscaling_policy`."""
        decision = self.autoscaling.decision
        return {} if decision is None else {DESIRED_REPLICAS: float(decision.desired_replicas)}
