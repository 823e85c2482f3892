"""Common parts of the deployments' processes: logging and the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.handle import DeploymentHandle

from replicas.errors import ServingError
from router.balancing.load_table import LoadTable
from router.balancing.policy import PREFIX_INDEX_BLOCKS, LeastTokens, PrefixIndex
from router.dispatch import Dispatcher
from router.flow.flow_control import FlowController
from router.scaling.autoscaling import Autoscaler, ReplicaBounds
from router.scaling.autoscaling_loop import AutoscalingLoop, BacklogSource, IngressLoad
from router.scaling.ingress_reports import DESIRED_REPLICAS, IngressGossip
from router.serve_router import ServeReplicaClient
from router.types import RouterObserver
from serve_app.monitoring.ray_metrics import Instruments, export_forever, registry_exporter
from serve_app.monitoring.router import RouterCollector, RouterMetrics
from serve_app.settings.processes import RoutingSettings

_CARD_PERIOD_S = 0.2
_FIRST_BOUNDS = ReplicaBounds(min_replicas=1, max_replicas=1, num_replicas=1)
"""Bounds on the number of model replicas until `reconfigure`, which Serve calls right after the constructor."""
_REQUEST_LOGGERS = ("serve_app.http.exchange", "serve_app.http.exchange_middleware")
MakeFlow = Callable[[RoutingSettings, LoadTable, RouterObserver], FlowController]
"""Factory of an ingress's flow control, called in the ingress's process."""


def late_binding_flow(settings: RoutingSettings, table: LoadTable, observer: RouterObserver) -> FlowController:
    """Return the default flow control: late binding to the replica with the least outstanding tokens."""
    max_blocks = PREFIX_INDEX_BLOCKS if settings.has_prefix_cache else 0
    return FlowController(settings.flow, table, LeastTokens(random.Random(), PrefixIndex(max_blocks)), observer)


class Routing:
    """Router parts of one ingress or of the jobs process: flow control, load table, dispatcher and autoscaling."""

    def __init__(
        self,
        settings: RoutingSettings,
        model: DeploymentHandle[Any],
        registry: CollectorRegistry,
        make_flow: MakeFlow,
        backlog_source: BacklogSource | None = None,
    ) -> None:
        """Create the parts, and their metrics in `registry`.

        `backlog_source` counts work that is not yet in flow control; None: there is none.
        """
        observer = RouterMetrics(registry, settings.targets)
        self.gossip = gossip = IngressGossip(this_replica_id())
        table = LoadTable(time.monotonic, gossip.ingress_id)
        flow = make_flow(settings, table, observer)
        self.queue = flow.queue
        self._client = client = ServeReplicaClient(model, gossip)
        self.dispatcher = Dispatcher(client, flow, observer, settings.watch)
        autoscaler = Autoscaler(settings.autoscaling, _FIRST_BOUNDS, time.monotonic)
        load = IngressLoad(self.queue, table, gossip, backlog_source)
        self.autoscaling = AutoscalingLoop(autoscaler, load, gossip, client.wake)
        registry.register(RouterCollector(self.queue, table, self.autoscaling))
        self._export = registry_exporter(settings.model_name, registry, Instruments.of_serve())

    async def run(self) -> None:
        """Poll the replicas' load, update the autoscaling decision and export metrics to Ray until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.dispatcher.run())
            tasks.create_task(self.autoscaling.run(self.dispatcher.refresh))
            tasks.create_task(export_forever(self._export))

    def close(self) -> None:
        """Close the idle channels to the replicas, so that no replica waits for this process to stop."""
        self._client.close()

    async def await_replica(self, limit_s: float) -> None:
        """Return once a model replica has told its card, or after `limit_s`.

        A new ingress that replaces one would else refuse requests until then. At the first start no replica has ever
        run, and Serve starts the deployments side by side, so the wait has a bound.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not await self._has_replica():  # noqa: ASYNC110  # Nothing in this process tells of a replica.
                    await asyncio.sleep(_CARD_PERIOD_S)

    async def _has_replica(self) -> bool:
        with contextlib.suppress(ServingError):
            await self.dispatcher.model_card()
            return True
        return False

    def change_bounds(self, bounds: ReplicaBounds) -> None:
        """Replace the bounds on the number of model replicas."""
        self.autoscaling.change_bounds(bounds)

    def autoscaling_stats(self) -> dict[str, float]:
        """Return a deployment's report to Serve's controller, for `application_autoscaling_policy`."""
        decision = self.autoscaling.decision
        return {} if decision is None else {DESIRED_REPLICAS: float(decision.desired_replicas)}


def this_replica_id() -> str:
    """Return Serve's id of the process's replica."""
    return str(serve.get_replica_context().replica_id.unique_id)


def log_through_serve() -> None:
    """Give the loggers of the application and of its exporter of spans Serve's handlers.

    So their lines are JSON and carry the request id. The lines of requests go to Serve's log files alone: Ray
    carries what a process prints to the driver's terminal, which costs more than many a request.
    """
    serve_logger = logging.getLogger("ray.serve")
    for package in ("serve_app", "router", "replicas", "opentelemetry.exporter"):
        logger = logging.getLogger(package)
        logger.handlers = serve_logger.handlers
        logger.setLevel(serve_logger.level)
        logger.propagate = False
    for requests in map(logging.getLogger, _REQUEST_LOGGERS):
        requests.handlers = [handler for handler in serve_logger.handlers if not _prints(handler)]
        requests.propagate = False


def _prints(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
