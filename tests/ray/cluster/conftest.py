"""One application for all tests of this folder: two ingresses on the head, two model replicas, each on a raylet."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit.engine.faulty_runner import FAULTS_VARIABLE
from testkit.limits import LIMIT_S
from testkit.otlp_receiver import OtlpReceiver, otlp_receiver
from testkit.serving.raylets import Raylets, serving
from testkit.serving.served import wait_for
from testkit.serving.streams import Clients
from testkit.serving.streams import clients as open_clients
from tests.ray.conftest import MODEL_NAME

NUM_REPLICAS = 2
NUM_SLOTS = 4
"""Sequences that run together in each replica."""
NUM_INGRESSES = 2
LONG = 30_000
"""Output tokens that no test waits for."""


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy streamed completion of this length."""
    return {
        "model": MODEL_NAME,
        "prompt": "the quick brown fox",
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }


async def kill_busy_replica(served: Raylets, count: str = "num_running") -> None:
    """Kill a replica with several sequences by this count. A look from this event loop would stop its clients."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            replicas = await asyncio.to_thread(served.replicas)
            busiest = max(replicas, key=lambda replica: replica[count], default=None)
            if busiest is not None and busiest[count] > 1:
                return os.kill(busiest["pid"], signal.SIGKILL)


@pytest.fixture(scope="package")
def traces() -> Iterator[OtlpReceiver]:
    """Receiver of the application's traces: of requests whose `traceparent` is sampled, and no others."""
    with otlp_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="package")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which a file named by a replica's process breaks its device."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="package")
def application(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, traces: OtlpReceiver, faults: Path
) -> Iterator[Raylets]:
    with serving(
        tmp_path_factory.mktemp("home"),
        {FAULTS_VARIABLE: str(faults)},
        model=checkpoint,
        dtype="float32",
        num_replicas=NUM_REPLICAS,
        num_ingress_replicas=NUM_INGRESSES,
        max_num_seqs=NUM_SLOTS,
        kv_cache_bytes="128MiB",
        load_poll_period_s=0.2,
        otlp_traces_endpoint=traces.url,
        trace_sampling_ratio=0,
        webhook_allowed_hosts="127.0.0.1",
    ) as served:
        yield served


@pytest.fixture
def served(application: Raylets) -> Iterator[Raylets]:
    """The application, whole and idle; a test leaves it idle."""

    def is_whole() -> bool:
        return len(application.num_running()) == NUM_REPLICAS and len(application.ingress_pids()) == NUM_INGRESSES

    wait_for(is_whole, "all ingresses and replicas are there")
    application.wait_until_idle()
    yield application
    application.wait_until_idle()


@pytest.fixture
def clients(served: Raylets) -> Iterator[Clients]:
    """Clients that go away before `served` is looked at again."""
    with open_clients(served.app.url) as many:
        yield many
