"""Traces and usage of completions, jobs and batches on the real engine, with preemptions."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from replicas.engine.config import EngineLimits
from replicas.model.loading.options import ModelOptions, RunnerOptions
from replicas.options import ReplicaOptions, StreamOptions
from replicas.protocol import Band
from serve_app.http_app import IngressSettings
from serve_app.tracing.settings import TracingSettings
from testkit.http.local_service import local_service
from testkit.limits import LIMIT_S, until
from testkit.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.service.conftest import MODEL

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NUM_LATE_TOKENS = 450
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}


@pytest.fixture
def receiver() -> Any:
    with otlp_receiver() as server:
        yield server


@pytest.fixture
async def http(checkpoint: Path, tmp_path: Path, receiver: OtlpReceiver) -> AsyncIterator[httpx.AsyncClient]:
    """Client of a service with two slots, whose traces the receiver gets if the client samples them."""
    options = ReplicaOptions(
        ModelOptions(str(checkpoint), dtype="float32", num_threads=1),
        RunnerOptions(kv_cache_bytes=2**20),
        # Without a prefix cache a preempted sequence is computed again, wherever in a block it stops.
        EngineLimits(max_num_seqs=2, enable_prefix_caching=False),
        StreamOptions(),
    )
    tracing = TracingSettings(receiver.url, trace_sampling_ratio=0.0)
    settings = IngressSettings(model=str(checkpoint), served_model_name=MODEL, tracing=tracing)
    async with (
        local_service(options, settings, tmp_path) as local,
        httpx.AsyncClient(base_url=local.url, timeout=LIMIT_S) as client,
    ):
        yield client


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "the quick brown fox", "max_tokens": max_tokens, "ignore_eos": True, **fields}


async def read_stream(http: httpx.AsyncClient, max_tokens: int, has_begun: asyncio.Event) -> None:
    """Read a sampled stream of the band `standard` to its end; `has_begun` is set when it has output."""
    request = body(max_tokens, priority=int(Band.STANDARD), stream=True)
    async with http.stream("POST", "/v1/completions", json=request, headers=SAMPLED) as response:
        assert response.status_code == 200
        async for _ in response.aiter_lines():
            has_begun.set()


async def usage(http: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """Return the usage by band."""
    return {row["band"]: row for row in (await http.get("/v1/usage")).json()["data"]}


async def test_a_preemption_is_in_the_trace_and_what_it_repeats_in_the_usage(
    http: httpx.AsyncClient, receiver: OtlpReceiver
) -> None:
    have_begun = [asyncio.Event(), asyncio.Event()]
    late = [asyncio.create_task(read_stream(http, NUM_LATE_TOKENS, begun)) for begun in have_begun]
    await until(lambda: all(begun.is_set() for begun in have_begun) or any(each.done() for each in late))
    urgent = await asyncio.gather(
        *(http.post("/v1/completions", json=body(8, priority=int(Band.INTERACTIVE))) for _ in range(4))
    )
    assert [answer.status_code for answer in urgent] == [200] * 4
    await asyncio.gather(*late)
    await until(lambda: len(receiver.named("POST /v1/completions")) == 2)
    assert receiver.named("preempted"), sorted({span.name for span in receiver.spans})
    for root in receiver.named("POST /v1/completions"):
        assert root.parent_id == SPAN_ID
    rows: dict[str, dict[str, Any]] = {}

    async def is_reported() -> bool:
        rows.update(await usage(http))
        return bool(sum(row["num_requests"] for row in rows.values()) == 6)

    async with asyncio.timeout(LIMIT_S):
        while not await is_reported():
            await asyncio.sleep(0.05)
    assert (rows["interactive"]["output_tokens"], rows["standard"]["output_tokens"]) == (32, 2 * NUM_LATE_TOKENS)
    assert rows["standard"]["wasted_tokens"] > 0 == rows["interactive"]["wasted_tokens"]
    for row in rows.values():
        computed = row["input_tokens"] - row["cached_tokens"] + row["output_tokens"] - row["num_requests"]
        assert row["computed_tokens"] == computed + row["wasted_tokens"]
        assert row["device_seconds"] > 0


async def test_a_job_is_traced_below_its_submission_shown_and_charged(
    http: httpx.AsyncClient, receiver: OtlpReceiver
) -> None:
    job = (await http.post("/v1/jobs", json=body(4), headers=SAMPLED)).json()
    ended = (await http.get(f"/v1/jobs/{job['id']}", params={"wait": 30})).json()
    assert ended["status"] == "completed", ended
    await until(lambda: bool(receiver.named("job") and receiver.named("POST /v1/jobs")))
    [span] = receiver.named("job")
    [submission] = receiver.named("POST /v1/jobs")
    assert (span.trace_id, span.parent_id, submission.parent_id) == (TRACE_ID, submission.span_id, SPAN_ID)
    assert "placement" in {each.name for each in receiver.spans if each.trace_id == TRACE_ID}
    shown = (await http.get(f"/v1/requests/{job['id']}")).json()
    assert (shown["status"], shown["completion_tokens"], shown["band"]) == ("completed", 4, "batch")
    async with asyncio.timeout(LIMIT_S):
        while not (row := (await usage(http)).get("batch")):
            await asyncio.sleep(0.05)
    assert (row["num_requests"], row["output_tokens"]) == (1, 4)


async def test_agents_requests_are_traced_and_charged_as_chats(http: httpx.AsyncClient, receiver: OtlpReceiver) -> None:
    hello = [{"role": "user", "content": "hello"}]
    message = {"model": MODEL, "messages": hello, "max_tokens": 3, "stream": True}
    response = {"model": MODEL, "input": hello, "max_output_tokens": 5, "service_tier": "flex"}
    answers = [
        await http.post("/v1/messages", json=message, headers=SAMPLED),
        await http.post("/v1/responses", json=response, headers=SAMPLED),
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    tokens = answers[1].json()["usage"]
    await until(lambda: all(receiver.named(f"POST {path}") for path in ("/v1/messages", "/v1/responses")))
    for path in ("/v1/messages", "/v1/responses"):
        [root] = receiver.named(f"POST {path}")
        assert (root.trace_id, root.parent_id) == (TRACE_ID, SPAN_ID)
        [chat] = [span for span in receiver.below(root) if span.name == f"chat {MODEL}"]
        [placement] = [span for span in receiver.below(chat) if span.name == "placement"]
        assert {"prefill", "decode"} <= {span.name for span in receiver.below(placement)}
    async with asyncio.timeout(LIMIT_S):
        while (rows := await usage(http)).keys() < {"standard", "batch"}:
            await asyncio.sleep(0.05)
    assert (rows["standard"]["output_tokens"], rows["batch"]["output_tokens"]) == (3, 5)
    assert rows["batch"]["input_tokens"] == tokens["input_tokens"]
