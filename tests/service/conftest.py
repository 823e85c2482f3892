"""The HTTP application over the real engine and a tiny random model, in one process: all of it but Ray."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import torch

from replicas.engine.async_engine import AsyncEngine
from replicas.engine.config import EngineLimits
from replicas.model.options import ModelOptions, RunnerOptions
from replicas.model_replica import ModelReplica
from replicas.options import ReplicaOptions, StreamOptions
from replicas.protocol import Band, EngineMetrics, GenerateRequest, ModelCard, ReplicaStats, TokenDelta
from router.dispatch import Dispatcher
from router.flow_control import FlowController, FlowLimits
from router.flow_queue import BandLimits
from router.latency_targets import LatencyTargets
from router.load_table import LoadTable
from router.policy import LeastTokens
from serve_app.ingress import Backends, IngressSettings, create_api
from serve_app.metrics import HttpMetrics
from serve_app.router_metrics import RouterMetrics
from tests.http.conftest import serving
from tests.model.tiny import write_checkpoint

MODEL = "tiny"


class LocalReplicaClient:
    """Reaches one replica in this process; see `router.types.ReplicaClient`."""

    def __init__(self, engine: AsyncEngine, card: ModelCard) -> None:
        self._engine, self._card = engine, card

    def generate(self, request: GenerateRequest, ranking: list[str]) -> AsyncGenerator[TokenDelta, None]:
        return self._engine.generate(request)

    async def poll_stats(self) -> list[ReplicaStats]:
        return [self._engine.stats()]

    async def poll_metrics(self) -> list[EngineMetrics]:
        return [self._engine.metrics()]

    async def describe(self) -> ModelCard:
        return self._card


@dataclass
class Service:
    """A running server, the engine behind it, and clients."""

    url: str
    engine: AsyncEngine
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / MODEL)


@pytest.fixture
async def service(checkpoint: Path) -> AsyncIterator[Service]:
    options = ReplicaOptions(
        ModelOptions(str(checkpoint), dtype="float32", num_threads=1),
        RunnerOptions(kv_cache_bytes=2**20),
        EngineLimits(max_num_seqs=16, max_num_batched_tokens=64, max_queued_requests=4096),
        StreamOptions(coalesce_interval_s=0.002),
    )
    replica = ModelReplica(options, "replica-0", "node-0")
    engine = replica.start()
    table, metrics = LoadTable(time.monotonic), HttpMetrics(MODEL)
    observer = RouterMetrics(metrics.registry, dict.fromkeys(Band, LatencyTargets()))
    limits = FlowLimits({band: BandLimits(5000, 10**9) for band in Band}, promote_after_s=30.0)
    flow = FlowController(limits, table, LeastTokens(random.Random(0)), observer)
    dispatcher = Dispatcher(LocalReplicaClient(engine, replica.card), flow, observer)
    settings = IngressSettings(model=str(checkpoint), served_model_name=MODEL)
    app = create_api(settings, Backends(dispatcher), metrics=metrics)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        client = openai.AsyncOpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0)
        yield Service(url, engine, http, client)
        await client.close()
    await engine.stop()
