"""The dashboard: its page loads nothing from elsewhere, and its events show the server to operators."""

import asyncio
import json
import re
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from replicas.errors import Overloaded
from replicas.protocol import Band, Metric, MetricKind
from router.flow.flow_queue import TenantQueue
from router.timeline import Part
from router.types import ReplicaView
from serve_app.cli.clients.events import aread_events
from serve_app.http.live_feed import LiveFeed
from serve_app.jobs.api.records import BatchProgress, JobsCounts, RequestCounts
from serve_app.jobs.api.responses import StoredSize, StoredSums
from serve_app.jobs.metrics import stored_metrics
from serve_app.openai.reply.format import JsonObject
from testkit.http.api import MODEL, Api, MakeApi, documented_answers, operations_of, refusal, serving
from testkit.http.documented_answers import Given
from testkit.http.scripted_dispatcher import write_keys
from testkit.limits import LIMIT_S, until


async def snapshot(app: Any, **headers: str) -> dict[str, Any]:
    """Return the first snapshot that a real server sends, which is as the OpenAPI document has it."""
    async with (
        serving(app) as url,
        httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http,
        http.stream("GET", "/dashboard/events", headers=headers) as response,
    ):
        assert response.status_code == 200
        shown: dict[str, Any] = await anext(aread_events(response))
    data = f"data: {json.dumps(shown)}\n\n".encode()
    event = Given("GET", "/dashboard/events", 200, "text/event-stream", data, is_cut=True)
    assert not documented_answers(operations_of(app)).problems(event)
    return shown


async def test_the_script_shows_every_part(api: Api) -> None:
    script = (await api.http.get("/pages/dashboard.js")).text
    groups = script[script.index("const GROUPS") : script.index("};")]
    assert set(re.findall(r'"(\w+)"', groups)) == {part.value for part in Part}
    style = (await api.http.get("/pages/dashboard.css")).text
    for group in re.findall(r"^  (\w+): \[", groups, re.MULTILINE):
        assert f".{group} {{ fill: var(--{group}); }}" in style


async def test_a_snapshot_shows_replicas_queues_latencies_jobs_and_requests(make_api: MakeApi) -> None:
    api = make_api(ttft_s=0.01, tpot_s=0.001)
    api.dispatcher.queued = {Band.BATCH: {str(n): TenantQueue(n, 10 * n) for n in range(12)}}
    counts = (Metric("headway:jobs", "", MetricKind.GAUGE, 3, (("state", "in_progress"),)),)
    batch = BatchProgress("batch_1", "nightly", RequestCounts(30, 10, 2), has_webhook=True)
    sizes = {f"tenant-{n}": StoredSize(n, 0, 100 * n, 50.0) for n in range(12, 0, -1)}
    stored = StoredSums(StoredSize(90, 4, 9000, 40.0), 20, sizes)
    api.jobs.counted = JobsCounts((*counts, *stored_metrics(stored, 100.0)), running=(batch,), stored=stored)
    for _ in range(3):
        await api.complete(max_tokens=4)
    await api.complete(temperature=9)
    found = await snapshot(api.app)
    assert (found["model"], found["autoscaling"]) == (MODEL, None)
    [replica] = found["replicas"]
    assert (replica["replica_id"], replica["num_slots"]) == ("replica-a", 8)
    assert replica["chosen_for"] == {"reason": "only_one", "num_placements": 3, "of": 3}
    batch = found["queues"][Band.BATCH]
    assert (batch["band"], batch["num_requests"], batch["num_tenants"]) == ("batch", sum(range(12)), 12)
    assert [each["tenant"] for each in batch["tenants"]] == [str(n) for n in range(11, 3, -1)]
    standard = found["latencies"][Band.STANDARD]
    assert standard["num_requests"] == 3 and 0.01 <= standard["ttft_s"]["p50"] <= standard["ttft_s"]["p95"]
    assert found["jobs"] == [{"name": "jobs", "labels": {"state": "in_progress"}, "value": 3}]
    assert found["batches"] == [
        {
            "id": "batch_1",
            "tenant": "nightly",
            "num_lines": 30,
            "num_completed": 10,
            "num_failed": 2,
            "has_webhook": True,
        }
    ]
    shown = found["stored"]
    assert [size["tenant"] for size in shown.pop("tenants")] == [f"tenant-{n}" for n in range(12, 4, -1)]
    assert shown == {
        "num_tenants": 20, "num_responses": 90, "num_conversations": 4, "num_bytes": 9000, "oldest_response_at": 40,
    }  # fmt: skip
    # A body that is refused while it is read is no completion.
    assert [request["status"] for request in found["requests"]] == ["completed"] * 3


async def test_an_infinite_value_is_null(make_api: MakeApi) -> None:
    api = make_api()
    api.jobs.counted = JobsCounts((Metric("headway:batch_eta_seconds", "", MetricKind.GAUGE, float("inf")),))
    assert (await snapshot(api.app))["jobs"][0]["value"] is None


async def test_events_are_for_operators(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "acme", "ops", operator="ops")})
    assert (await api.http.get("/dashboard/events")).status_code == 401
    refused = await api.http.get("/dashboard/events", headers={"authorization": "Bearer acme"})
    assert refusal(refused) == (403, "operator_key_required", None)
    assert (await snapshot(api.app, authorization="Bearer ops"))["model"] == MODEL


class Built:
    """Feed whose snapshots are counted."""

    def __init__(self, max_viewers: int = 16) -> None:
        self.num_built = 0
        self.is_open = True
        self.feed = LiveFeed(self._build, lambda: self.is_open, 0.005, max_viewers)

    async def _build(self) -> JsonObject:
        self.num_built += 1
        if self.num_built == 2:
            raise RuntimeError("broken")
        return {"number": self.num_built}


async def test_a_snapshot_is_built_once_for_all_viewers() -> None:
    built = Built()
    async with aclosing(built.feed.events()) as one, aclosing(built.feed.events()) as other:
        first, second = await asyncio.gather(anext(one), anext(other))
        assert first == second == b'data: {"number":1}\n\n'
        assert b"data: " not in await anext(one), "a snapshot that cannot be built is left out"
        assert await anext(one) == b'data: {"number":3}\n\n'
    num_built = built.num_built
    await asyncio.sleep(0.03)
    assert built.num_built == num_built and built.feed.num_viewers == 0
    async with aclosing(built.feed.events()) as again:
        assert b"data: " in await anext(again)


async def test_viewers_are_bounded() -> None:
    built = Built(max_viewers=1)
    async with aclosing(built.feed.events()) as one:
        await anext(one)
        with pytest.raises(Overloaded, match="1 viewers watch; the limit is 1"):
            await anext(built.feed.events())
    async with aclosing(built.feed.events()) as another:
        await anext(another)


async def test_the_feed_ends_when_the_server_stops() -> None:
    built = Built()
    async with asyncio.timeout(LIMIT_S), aclosing(built.feed.events()) as events:
        await anext(events)
        built.is_open = False
        async for _ in events:
            pass


async def test_a_viewer_that_leaves_is_forgotten(make_api: MakeApi) -> None:
    api = make_api()
    api.dispatcher.views = [ReplicaView(replace(api.replica.stats(), is_draining=True), age_s=0.1)]
    found = await snapshot(api.app)
    assert found["replicas"][0]["is_draining"]
    await until(lambda: not [task for task in asyncio.all_tasks() if "LiveFeed._run" in repr(task)])
