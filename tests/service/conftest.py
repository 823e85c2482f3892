"""Services for the tests of this folder: one for each test, or one of a module, and clients."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import torch

from replicas.engine.async_engine import AsyncEngine
from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions, StreamOptions
from serve_app.http_app import IngressSettings
from testkit.http.local_service import local_service
from testkit.model.tiny_checkpoints import write_checkpoint

MODEL = "tiny"


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
    async with serving(checkpoint) as served:
        yield served


@asynccontextmanager
async def serving(
    checkpoint: Path, kv_cache_bytes: int = 2**20, data_dir: Path | None = None
) -> AsyncIterator[Service]:
    options = ReplicaOptions(
        ModelOptions(str(checkpoint), dtype="float32", num_threads=1),
        RunnerOptions(kv_cache_bytes=kv_cache_bytes),
        EngineLimits(max_num_seqs=16, max_num_batched_tokens=64, max_queued_requests=4096),
        StreamOptions(coalesce_interval_s=0.002),
    )
    settings = IngressSettings(model=str(checkpoint), served_model_name=MODEL)
    async with (
        local_service(options, settings, data_dir) as local,
        httpx.AsyncClient(base_url=local.url, timeout=60) as http,
        openai.AsyncOpenAI(api_key="none", base_url=f"{local.url}/v1", max_retries=0) as client,
    ):
        yield Service(local.url, local.engine, http, client)
