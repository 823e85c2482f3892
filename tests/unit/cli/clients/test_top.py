"""`headway top`: a snapshot of a served application as text."""

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from replicas.errors import NoReplicaAvailable
from replicas.protocol import Band
from router.flow.flow_queue import TenantQueue
from router.timeline import Part
from serve_app.cli.clients.top import bar
from serve_app.cli.main import app
from serve_app.jobs.api.records import BatchProgress, JobsCounts, RequestCounts
from serve_app.jobs.api.responses import StoredSize, StoredSums
from testkit.http.api import MODEL, Api, MakeApi, serving
from testkit.http.scripted_dispatcher import write_keys
from testkit.limits import LIMIT_S


async def top(api: Api, *arguments: str) -> Result:
    async with serving(api.app) as url, asyncio.timeout(LIMIT_S):
        return await asyncio.to_thread(CliRunner().invoke, app, ["top", "--url", url, "--once", *arguments])


async def test_a_snapshot_names_replicas_bands_and_requests(make_api: MakeApi) -> None:
    api = make_api(ttft_s=0.02)
    api.dispatcher.queued = {Band.BATCH: {"nightly": TenantQueue(1234, 5678)}}
    running = (BatchProgress("batch_1", "nightly", RequestCounts(3000, 1000, 12), True),)
    api.jobs.counted = JobsCounts(running=running, stored=StoredSums(StoredSize(1200, 0, 2**21, 1.0), 1, {}))
    await api.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2}, x_request_id="mine-1")
    result = await top(api)
    assert result.exit_code == 0, result.output
    assert "MOSTLY CHOSEN FOR" in result.stdout
    assert "1,200 stored responses, 2.0 MiB" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["replica-a", "idle", "0/8", "25", "%", "3", "12", "0.2", "s", "only", "one,", "1", "of", "1"] in lines
    assert ["batch", "1,234", "1", *["-"] * 6] in lines
    assert ["batch_1", "nightly", "1,012", "3,000", "12", "at", "its", "end"] in lines
    [request] = [line for line in lines if line[:1] == ["mine-1"]]
    assert request[1:4] == ["completed", "anonymous", "standard"]
    assert "prefill" in request


async def test_a_jobs_process_that_is_away_is_named(make_api: MakeApi) -> None:
    api = make_api()
    assert "0 batches in progress" in (await top(api)).stdout
    away = make_api()
    away.jobs.error = NoReplicaAvailable("away")
    assert "the jobs process does not answer" in (await top(away)).stdout


async def test_a_key_that_is_no_operators_is_an_error(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "acme", "ops", operator="ops")})
    refused = await top(api, "--api-key", "acme")
    assert (refused.exit_code, "needs an operator's API key" in refused.stderr) == (1, True)
    assert (await top(api, "--api-key", "ops")).exit_code == 0


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ({}, ""),
        ({Part.DECODE: 1.0}, "d" * 30),
        ({Part.QUEUED_FAIRNESS: 1.0, Part.QUEUED_REPLICA: 1.0, Part.PREEMPTED: 1.0}, "q" * 20 + "x" * 10),
    ],
)
def test_a_bar_has_the_shares_of_the_parts(parts: dict[Part, float], shown: str) -> None:
    every = {part.value: parts.get(part, 0.0) for part in Part}
    assert bar({"parts_ms": every, "total_ms": sum(every.values())}).plain == shown
