"""A thousand requests, with preemptions and a killed replica: where the time went adds up, and usage is counted."""

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from replicas.protocol import Band
from router.timeline import Part
from serve_app.cli.clients.events import read_events
from testkit.limits import LIMIT_S
from testkit.serving.raylets import Raylets
from testkit.serving.served import wait_for
from tests.ray.cluster.conftest import body, kill_busy_replica

pytestmark = pytest.mark.rotated

NUM_REQUESTS, NUM_CLIENTS, KILL_AFTER = 1000, 40, 300
LONG_EVERY, LONG_TOKENS = 40, 600
"""Some requests are long, so that the killed replica has sequences however long the kill takes."""
TOLERANCE_MS = 2.0


@dataclass
class Load:
    """Requests of all bands from many clients."""

    http: httpx.AsyncClient
    rng: random.Random
    metrics: list[dict[str, Any]]
    num_output_tokens: int = 0

    async def run(self, num_requests: int) -> None:
        numbers = iter(range(num_requests))

        async def client() -> None:
            for number in numbers:
                await self._ask(number)

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))

    async def _ask(self, number: int) -> None:
        rng = self.rng
        asked = body(
            rng.randrange(4, 60) if number % LONG_EVERY else LONG_TOKENS,
            prompt=f"{rng.randrange(50)} the quick brown fox " * rng.randrange(1, 20),
            priority=int(rng.choice([Band.INTERACTIVE, Band.STANDARD, Band.BATCH, Band.BATCH])),
            include_metrics=True,
            stream=number % 2 == 0,
        )
        if asked["stream"]:
            asked["stream_options"] = {"include_usage": True}
        answer = await self.http.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        last = answer.json() if not asked["stream"] else last_chunk(answer)
        assert last["usage"]["completion_tokens"] == asked["max_tokens"]
        self.metrics.append(last["metrics"])
        self.num_output_tokens += last["usage"]["completion_tokens"]


def last_chunk(answer: httpx.Response) -> dict[str, Any]:
    *_, last = read_events(answer)
    return last


def usage(served: Raylets) -> dict[str, float]:
    """Return the sums of usage over days and bands."""
    rows = served.app.get("/v1/usage")["data"]
    names = ("num_requests", "output_tokens", "computed_tokens", "wasted_tokens", "device_seconds")
    return {name: sum(row[name] for row in rows) for name in names}


@pytest.mark.deep
async def test_parts_of_a_thousand_requests_add_up_and_their_usage_is_counted(served: Raylets) -> None:
    await asyncio.sleep(6.0)  # Earlier requests are reported within 5 s.
    before = await asyncio.to_thread(usage, served)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.app.url, timeout=2 * LIMIT_S, limits=limits, trust_env=False) as http:
        load = Load(http, random.Random(7), [])
        running = asyncio.create_task(load.run(NUM_REQUESTS))
        while len(load.metrics) < KILL_AFTER and not running.done():
            await asyncio.sleep(0.05)
        await kill_busy_replica(served)
        await running
    assert len(load.metrics) == NUM_REQUESTS
    for metrics in load.metrics:
        assert metrics["parts_ms"].keys() == {part.value for part in Part}
        assert min(metrics["parts_ms"].values()) >= 0.0
        assert sum(metrics["parts_ms"].values()) == pytest.approx(metrics["total_ms"], abs=TOLERANCE_MS)
    num_preempted = sum(metrics["num_preemptions"] > 0 for metrics in load.metrics)
    num_migrated = sum(metrics["num_migrations"] > 0 for metrics in load.metrics)
    worst_ms = max(abs(sum(metrics["parts_ms"].values()) - metrics["total_ms"]) for metrics in load.metrics)
    print(f"{num_preempted} preempted, {num_migrated} migrated, at most {worst_ms:.3f} ms off")
    assert num_preempted > 0 and num_migrated > 0

    def is_reported() -> bool:
        return usage(served)["num_requests"] - before["num_requests"] == NUM_REQUESTS

    await asyncio.to_thread(wait_for, is_reported, "every process has reported its usage")
    after = await asyncio.to_thread(usage, served)
    spent = {name: after[name] - before[name] for name in after}
    assert spent["output_tokens"] == load.num_output_tokens
    assert 0 < spent["wasted_tokens"] < spent["computed_tokens"] and spent["device_seconds"] > 0
    print(spent)
