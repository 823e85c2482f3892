"""More tokens than an ingress can carry: its replicas wait for it, and none is taken for hung."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from bench.serving import TIMED, serving
from serve_app.config import DEMO_MODEL_NAME
from testkit.serving.served import Served, wait_for

pytestmark = pytest.mark.deep

_NUM_STREAMS = 200
_OVERLOAD_S = 60.0
_MAX_GROWTH_BYTES = 150 * 2**20
"""Growth of a replica's memory under overload. A backlog without a bound grew by 20 MB a second."""


@pytest.fixture
def fast_app() -> Iterator[Served]:
    """Two replicas that compute nothing: together they generate more than one ingress on a few cores can carry."""
    fields: dict[str, object] = {
        "num_replicas": 2, "max_num_seqs": 128, "step_times": "slow-gpu", "cpus_per_replica": 0.01,
    }  # fmt: skip
    with serving(TIMED, fields) as served:
        yield served


async def overload(url: str) -> None:
    """Read streams to their ends, one after the other, for `_OVERLOAD_S`."""
    end_s = time.monotonic() + _OVERLOAD_S
    prompt = [{"role": "user", "content": "hello"}]
    body = {"model": DEMO_MODEL_NAME, "messages": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}

    async def read(http: aiohttp.ClientSession) -> None:
        while time.monotonic() < end_s:
            async with http.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                while time.monotonic() < end_s and await answer.content.readany():
                    pass

    limits, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=limits, connector=connector) as http:
        await asyncio.gather(*(read(http) for _ in range(_NUM_STREAMS)))


def controller_log(app: Served) -> str:
    folder = Path(app.places["token_path"]).parent / "ray" / "session_latest" / "logs" / "serve"
    return "".join(path.read_text() for path in folder.glob("controller_*.log"))


def replica_pids(app: Served) -> set[int]:
    return {replica["pid"] for replica in app.replicas()}


def memory(pids: set[int]) -> int:
    return max(int(psutil.Process(pid).memory_info().rss) for pid in pids)


def test_overload_kills_no_replica_and_builds_no_backlog(fast_app):
    pids = wait_for(lambda: replica_pids(fast_app) if len(replica_pids(fast_app)) == 2 else None, "two replicas")
    before = memory(pids)
    asyncio.run(overload(fast_app.url))
    assert "health check response" not in controller_log(fast_app)
    assert replica_pids(fast_app) == pids
    assert memory(pids) - before < _MAX_GROWTH_BYTES
