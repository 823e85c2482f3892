"""Services for the tests of this folder: one for each test, or one of a module, and clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import torch

from replicas.model_replica import ModelReplica, ReplicaOptions
from serve_app.ingress import IngressSettings
from tests.model.tiny import write_checkpoint
from tests.service.local_service import local_service

MODEL = "tiny"


@dataclass
class Service:
    """A running server, the replica behind it, and clients."""

    url: str
    replica: ModelReplica
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / MODEL)


@pytest.fixture
async def service(checkpoint: Path) -> AsyncIterator[Service]:
    options = ReplicaOptions(
        str(checkpoint), dtype="float32", num_threads=1, max_num_seqs=16, max_num_batched_tokens=64,
        kv_cache_bytes=2**20, max_queued_requests=4096, coalesce_interval_s=0.002,
    )  # fmt: skip
    settings = IngressSettings(model=str(checkpoint), served_model_name=MODEL)
    async with (
        local_service(options, settings) as local,
        httpx.AsyncClient(base_url=local.url, timeout=60) as http,
        openai.AsyncOpenAI(api_key="none", base_url=f"{local.url}/v1", max_retries=0) as client,
    ):
        yield Service(local.url, local.replica, http, client)
