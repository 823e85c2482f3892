"""Serve deployment of the model replicas.

No `from __future__ import annotations` here: Serve inspects the classes of deployments.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import ray
from ray import serve

from replicas.errors import EngineDead
from replicas.protocol import EngineMetrics, ModelCard
from replicas.transport.channels import ReplicaChannels
from replicas.transport.wire import ChannelId, NumberedRequest, StreamFailure, encoded
from router.scaling.ingress_reports import (
    MAX_REPORT_AGE_S,
    IngressLiveness,
    IngressReport,
    IngressReportBoard,
    PollReply,
)
from serve_app.deployments.process import log_through_serve
from serve_app.deployments.serve_hooks import free_cancelled_streams, listen_on_loopback
from serve_app.models.local_models import local_checkpoint
from serve_app.monitoring.ray_metrics import Instruments, engine_exporter, export_forever
from serve_app.process import trim_heaps, without_collection
from serve_app.settings.processes import ModelProcess

if TYPE_CHECKING:
    from replicas.model_replica import LoadBackend


class Model:
    """Serve deployment around one engine with its model."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: ModelProcess, load_backend: "LoadBackend | None" = None
    ) -> None:
        with without_collection():
            from replicas import model_replica  # imports torch, which takes seconds and only a model replica needs

        log_through_serve()
        listen_on_loopback()
        free_cancelled_streams()
        settings = settings.with_model(await asyncio.to_thread(local_checkpoint, settings.model_path))
        self._board = IngressReportBoard(time.monotonic)
        self._ingresses = IngressLiveness(max(MAX_REPORT_AGE_S, 3 * settings.load_poll_period_s), time.monotonic)
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        replica = await asyncio.to_thread(
            model_replica.ModelReplica,
            settings.replica,
            self._replica_id,
            ray.get_runtime_context().get_node_id(),
            load_backend or model_replica.load_torch_backend,
        )
        self._card = replica.card
        self._engine = replica.start()
        self._channels = ReplicaChannels(self._replica_id, self._engine, self._ingresses.is_lost)
        self._exporting = asyncio.create_task(
            export_forever(engine_exporter(settings.model_name, self._engine.metrics, Instruments.of_serve()))
        )
        gc.collect()
        gc.freeze()
        trim_heaps()

    async def submit(
        self, requests: Sequence[NumberedRequest], channel_id: ChannelId, ranking: Sequence[str] = ()
    ) -> AsyncGenerator[str | StreamFailure, None]:
        """Generate requests as streams of a channel. Yields this replica's id, then the streams that fail.

        It ends with the last stream. `ranking` is for `RankedRouter`, which has already used it to choose this replica.
        """
        self._ingresses.heartbeat(channel_id.ingress_id)
        async with aclosing(self._channels.submit(requests, channel_id)) as answers:
            async for answer in answers:
                yield answer

    async def abort(
        self, replica_id: str, channel_id: ChannelId, numbers: Sequence[int], ranking: Sequence[str] = ()
    ) -> bool:
        """Abort streams of a channel, if this is the replica that is meant; return whether it is.

        `ranking` is for `RankedRouter`.
        """
        if replica_id != self._replica_id:
            return False
        self._channels.abort(channel_id, numbers)
        return True

    async def read(
        self, replica_id: str, channel_id: ChannelId, ranking: Sequence[str] = ()
    ) -> AsyncGenerator[bytes, None]:
        """Yield messages with the deltas of a channel's streams, no faster than the ingress acknowledges them.

        Yields none if another replica is meant. `ranking` is for `RankedRouter`.
        """
        if replica_id == self._replica_id:
            self._ingresses.heartbeat(channel_id.ingress_id)
            async with aclosing(self._channels.read(channel_id)) as batches:
                async for batch in batches:
                    yield encoded(batch)

    async def acknowledge(
        self, replica_id: str, channel_id: ChannelId, num_batches: int, ranking: Sequence[str] = ()
    ) -> bool:
        """Note that an ingress has read the first `num_batches` of a channel; return whether this replica is meant.

        `ranking` is for `RankedRouter`.
        """
        if replica_id != self._replica_id:
            return False
        self._ingresses.heartbeat(channel_id.ingress_id)
        self._channels.acknowledge(channel_id, num_batches)
        return True

    async def poll(self, report: IngressReport | None, ranking: Sequence[str] = ()) -> PollReply:
        """Return the present load and the other ingresses' reports; `report` is the calling ingress's own report.

        `ranking` is for `RankedRouter`.
        """
        if report is not None:
            self._ingresses.heartbeat(report.ingress_id)
        with contextlib.suppress(EngineDead):  # A dead engine reports that it takes no requests.
            self._engine.check_alive()
        return PollReply(self._engine.stats(), self._board.publish(report))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this replica's report for `deployment_autoscaling_policy`; Serve calls it."""
        return self._board.autoscaling_stats()

    async def drain(self, replica_id: str, ranking: Sequence[str] = ()) -> bool:
        """Refuse new requests from now on, if this is the replica that is meant; return whether it is.

        Once its streams have ended or moved, the replica fails its health checks, so that Serve replaces it. `ranking`
        is for `RankedRouter`.
        """
        if replica_id != self._replica_id:
            return False
        self._engine.begin_drain()
        return True

    async def metrics(self) -> EngineMetrics:
        """Return all metrics of the engine."""
        return self._engine.metrics()

    async def describe(self, ranking: Sequence[str] = ()) -> ModelCard:
        """Return the model's card; `ranking` is for `RankedRouter`."""
        return self._card

    async def check_health(self) -> None:
        """Raise if the engine is dead, hung or drained, so that Serve replaces the replica."""
        self._engine.check_alive()
        stats = self._engine.stats()
        if stats.is_draining and stats.num_running + stats.num_waiting == 0:
            raise RuntimeError("the replica has been drained and may be replaced")

    async def __del__(self) -> None:
        """Stop the engine; Serve calls it when no request is left or the time for graceful shutdown is over."""
        if hasattr(self, "_exporting"):
            self._exporting.cancel()
        if hasattr(self, "_engine"):
            await self._engine.drain()
            await self._engine.stop()
