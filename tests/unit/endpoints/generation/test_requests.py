"""Single requests: where their time went, in answers, in the registry and in the log, and their cancellation."""

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from replicas.errors import NoReplicaAvailable
from router.timeline import Part, Timeline
from serve_app.errors import HttpError
from serve_app.http.exchange import Exchange
from serve_app.http.request_registry import MAX_AGE_S, RequestRegistry
from serve_app.keys.authenticator import ANONYMOUS
from serve_app.openai.reply.schema import RequestParts
from serve_app.openai.request.caller import Caller
from serve_app.openai.request.schema import CompletionBody
from testkit.http.api import MODEL, Api, MakeApi, events, refusal
from testkit.http.scripted_dispatcher import write_keys
from testkit.limits import until

TOLERANCE_MS = 2.0


def check_parts(metrics: dict[str, Any]) -> None:
    assert metrics["parts_ms"].keys() == {part.value for part in Part}
    assert sum(metrics["parts_ms"].values()) == pytest.approx(metrics["total_ms"], abs=TOLERANCE_MS)
    assert min(metrics["parts_ms"].values()) >= 0


def test_the_documented_parts_are_those_of_the_timeline() -> None:
    documented = TypeAdapter(RequestParts).json_schema()["properties"]
    assert list(documented) == [part.value for part in Part]


@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize("usage", [None, {"include_usage": True}])
async def test_metrics_are_in_the_answer_and_in_the_last_chunk(
    make_api: MakeApi, kind: str, usage: dict[str, bool] | None
) -> None:
    api = make_api(ttft_s=0.05, tpot_s=0.02)
    ask = getattr(api, kind)
    whole = (await ask(max_tokens=4, include_metrics=True)).json()["metrics"]
    chunks = [
        json.loads(each)
        for each in events((await ask(max_tokens=4, include_metrics=True, stream=True, stream_options=usage)).text)[:-1]
    ]
    assert [("metrics" in chunk, chunk["choices"] == []) for chunk in chunks[-2:]] == [(False, False), (True, True)]
    assert ("usage" in chunks[-1]) == (usage is not None)
    for metrics in (whole, chunks[-1]["metrics"]):
        check_parts(metrics)
        assert metrics["parts_ms"]["prefill"] >= 50 and metrics["parts_ms"]["decode"] >= 60
        assert metrics["time_to_first_token_ms"] == metrics["parts_ms"]["prefill"]
        assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 3, abs=0.001)
        [placed] = metrics["placements"]
        assert (placed["replica_id"], placed["reason"]) == ("replica-a", "only_one")


@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_without_being_asked_for_there_are_no_metrics(api: Api, kind: str) -> None:
    assert "metrics" not in (await getattr(api, kind)()).json()
    chunks = events((await getattr(api, kind)(stream=True)).text)
    assert not any("metrics" in chunk for chunk in chunks)


async def test_metrics_of_several_sequences_are_those_of_the_last(make_api: MakeApi) -> None:
    api = make_api(ttft_s=0.01)
    metrics = (await api.complete(n=3, max_tokens=2, include_metrics=True)).json()["metrics"]
    check_parts(metrics)


async def test_prompts_of_one_call_have_metrics_of_their_own(api: Api) -> None:
    body = {"model": MODEL, "prompts": ["a", "b"], "max_tokens": 2, "include_metrics": True}
    reply = (await api.post("/v1/batch/sync", body)).json()
    for output in reply["outputs"]:
        check_parts(output["metrics"])
    streamed = (await api.post("/v1/batch/sync?stream=true", body)).text.splitlines()
    ends = [json.loads(line) for line in streamed if '"metrics"' in line]
    assert sorted(end["index"] for end in ends) == [0, 1]


async def shown(api: Api, request_id: str, **headers: str) -> httpx.Response:
    return await api.http.get(f"/v1/requests/{request_id}", headers=headers)


async def test_an_ended_request_is_found_by_either_id(api: Api) -> None:
    reply = await api.post("/v1/completions", {"model": MODEL, "prompt": "a private matter"}, x_request_id="mine-1")
    by_mine, by_reply = await shown(api, "mine-1"), await shown(api, reply.json()["id"])
    assert by_mine.json() == by_reply.json()
    found = by_mine.json()
    assert (found["status"], found["part"], found["http_status"]) == ("completed", None, 200)
    assert found["response_id"] == reply.json()["id"]
    assert found["completion_tokens"] == reply.json()["usage"]["completion_tokens"]
    assert "private" not in by_mine.text
    check_parts(found["metrics"])


async def test_a_running_request_shows_the_part_that_it_is_in(make_api: MakeApi) -> None:
    gate = asyncio.Event()
    api = make_api(gate=gate, gate_at=2)
    running = asyncio.create_task(api.post("/v1/completions", {"model": MODEL, "prompt": "a"}, x_request_id="mine-2"))
    await until(lambda: api.replica.num_deltas == 2)
    found = (await shown(api, "mine-2")).json()
    assert (found["status"], found["part"], found["http_status"]) == ("running", "decode", None)
    check_parts(found["metrics"])
    gate.set()
    await running
    assert (await shown(api, "mine-2")).json()["status"] == "completed"


async def test_a_failed_request_says_so(api: Api) -> None:
    await api.post("/v1/completions", {"model": "other", "prompt": "a"}, x_request_id="mine-3")
    found = (await shown(api, "mine-3")).json()
    assert (found["status"], found["http_status"], found["error_code"]) == ("failed", 404, "model_not_found")
    assert found["response_id"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_request_ends_with_an_error_and_frees_its_slot(make_api: MakeApi, stream: bool) -> None:
    gate = asyncio.Event()
    api = make_api(gate=gate, gate_at=2)
    body = {"model": MODEL, "prompt": "a", "stream": stream}
    running = asyncio.create_task(api.post("/v1/completions", body, x_request_id="mine-4"))
    await until(lambda: api.replica.num_deltas == 2)
    reply = await api.http.post("/v1/requests/mine-4/cancel")
    assert (reply.status_code, reply.json()["status"]) == (200, "cancelling")
    ended = await running
    if stream:
        assert json.loads(events(ended.text)[-1])["error"]["code"] == "request_aborted"
    else:
        assert refusal(ended) == (499, "request_aborted", None)
    assert len(api.replica.aborted) == 1 and not api.replica.running
    assert (await shown(api, "mine-4")).json()["status"] == "cancelled"
    assert refusal(await api.http.post("/v1/requests/mine-4/cancel")) == (409, "request_not_cancellable", "request_id")


async def test_a_request_before_its_first_token_can_be_cancelled(make_api: MakeApi) -> None:
    api = make_api(first_token_gate=asyncio.Event())
    body = {"model": MODEL, "prompt": "a", "stream": True}
    running = asyncio.create_task(api.post("/v1/completions", body, x_request_id="mine-5"))
    await until(lambda: bool(api.replica.running))
    await api.http.post("/v1/requests/mine-5/cancel")
    assert refusal(await running) == (499, "request_aborted", None)


async def test_a_tenant_sees_and_cancels_its_own_requests_alone(make_api: MakeApi, tmp_path: Path) -> None:
    gate = asyncio.Event()
    keys = write_keys(tmp_path, "acme", "rival", "ops", operator="ops")
    api = make_api(settings={"api_key_file": keys}, gate=gate, gate_at=0)
    body = {"model": MODEL, "prompt": "a"}
    running = asyncio.create_task(api.post("/v1/completions", body, x_request_id="mine-6", authorization="Bearer acme"))
    await until(lambda: bool(api.replica.running))
    rival, ops, acme = ({"authorization": f"Bearer {key}"} for key in ("rival", "ops", "acme"))
    not_found = (404, "request_not_found", "request_id")
    assert refusal(await shown(api, "mine-6", **rival)) == not_found
    assert refusal(await api.http.post("/v1/requests/mine-6/cancel", headers=rival)) == not_found
    assert (await shown(api, "mine-6")).status_code == 401
    for viewer in (ops, acme):
        assert (await shown(api, "mine-6", **viewer)).json()["tenant"] == "acme"
    # Another tenant's request of the same id hides nothing from its owner.
    theirs = asyncio.create_task(api.post("/v1/completions", body, x_request_id="mine-6", **rival))
    await until(lambda: len(api.replica.running) == 2)
    assert (await shown(api, "mine-6", **acme)).json()["tenant"] == "acme"
    assert (await api.http.post("/v1/requests/mine-6/cancel", headers=acme)).status_code == 200
    assert (await running).status_code == 499
    gate.set()
    assert (await theirs).status_code == 200


async def test_all_running_requests_of_an_id_are_cancelled(make_api: MakeApi) -> None:
    gate = asyncio.Event()
    api = make_api(gate=gate, gate_at=1)
    body = {"model": MODEL, "prompt": "a"}
    running = [asyncio.create_task(api.post("/v1/completions", body, x_request_id="mine-8")) for _ in range(2)]
    await until(lambda: len(api.replica.running) == 2)
    assert (await api.http.post("/v1/requests/mine-8/cancel")).json()["status"] == "cancelling"
    assert [(await each).status_code for each in running] == [499, 499]


async def test_an_operator_cancels_no_tenant_by_the_id_of_another(make_api: MakeApi, tmp_path: Path) -> None:
    gate = asyncio.Event()
    keys = write_keys(tmp_path, "acme", "rival", "ops", operator="ops")
    api = make_api(settings={"api_key_file": keys}, gate=gate, gate_at=1)
    acme, rival, ops = ({"authorization": f"Bearer {key}"} for key in ("acme", "rival", "ops"))
    body = {"model": MODEL, "prompt": "a"}
    running = [
        asyncio.create_task(api.post("/v1/completions", body, x_request_id="mine-9", **each)) for each in (acme, rival)
    ]
    await until(lambda: len(api.replica.running) == 2)
    refused = await api.http.post("/v1/requests/mine-9/cancel", headers=ops)
    assert refusal(refused) == (409, "request_id_ambiguous", "request_id")
    ids = re.findall("`([^`]+)`", refused.json()["error"]["message"])
    tenants = {(await shown(api, each, **ops)).json()["tenant"]: each for each in ids}
    assert tenants.keys() == {"acme", "rival"}
    assert (await api.http.post(f"/v1/requests/{tenants['rival']}/cancel", headers=ops)).status_code == 200
    assert (await running[1]).status_code == 499
    gate.set()
    assert (await running[0]).status_code == 200


async def test_an_unknown_request_is_not_found(api: Api) -> None:
    assert refusal(await shown(api, "unknown")) == (404, "request_not_found", "request_id")


async def test_lines_of_jobs_and_batches_are_asked_of_the_jobs_process(make_api: MakeApi, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "acme", "other", "root", operator="root")
    api = make_api(settings={"api_key_file": str(keys)})
    chat = await api.http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        headers={"authorization": "Bearer acme"},
    )
    like = (await shown(api, chat.json()["id"], authorization="Bearer acme")).json()
    line_id = f"{'a' * 32}-0"
    api.jobs.line_requests[line_id] = "acme", {**like, "id": line_id}
    for key, status in (("acme", 200), ("root", 200), ("other", 404)):
        for request_id in (line_id, f"job_{'a' * 32}"):
            answer = await shown(api, request_id, authorization=f"Bearer {key}")
            assert answer.status_code == status, answer.text
            assert status == 404 or answer.json()["id"] == line_id
    cancelled = await api.post(f"/v1/requests/{line_id}/cancel", {}, authorization="Bearer acme")
    assert refusal(cancelled)[:2] == (409, "request_not_cancellable")
    assert "cancel the job or the batch" in cancelled.json()["error"]["message"]


async def test_only_ids_of_lines_ask_the_jobs_process(make_api: MakeApi) -> None:
    api = make_api()
    api.jobs.error = NoReplicaAvailable("the jobs process does not answer")
    assert (await shown(api, "mine")).status_code == 404
    assert (await shown(api, f"{'a' * 32}-0")).status_code == 503


@pytest.mark.parametrize(("limit_s", "is_logged"), [(0.02, True), (30.0, False), (None, False)])
async def test_a_slow_request_is_logged_once_with_its_longest_part(
    make_api: MakeApi, caplog: pytest.LogCaptureFixture, limit_s: float | None, is_logged: bool
) -> None:
    api = make_api(settings={"slow_request_s": limit_s}, ttft_s=0.05)
    with caplog.at_level(logging.WARNING, "serve_app"):
        await api.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1}, x_request_id="mine-7")
    lines = [(record.request_id, record.slowest_part) for record in caplog.records if "slow" in record.message]  # type: ignore[attr-defined]
    assert lines == ([("mine-7", "prefill")] if is_logged else [])


async def test_seconds_of_the_parts_are_a_metric(make_api: MakeApi) -> None:
    api = make_api(ttft_s=0.05)
    await api.complete(max_tokens=1)
    lines = (await api.http.get("/metrics")).text.splitlines()
    value = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if "part_seconds_total{" in line}
    assert value['headway:request_part_seconds_total{band="standard",part="prefill"}'] >= 0.05
    assert value['headway:request_part_seconds_total{band="batch",part="decode"}'] == 0


class Registry:
    """Registry on a clock that the test sets, with exchanges without a connection."""

    def __init__(self, max_ended: int) -> None:
        self.now = 0.0
        self.registry = RequestRegistry(lambda: self.now, max_ended)

    def begin(self, request_id: str, number: int) -> Exchange:
        exchange = Exchange(request_id, f"seq-{number}", "POST", "/v1/completions", 0.0, Timeline(self.now))
        body = CompletionBody(model=MODEL, prompt=["a"])
        owner = Caller("r", 0.0, ANONYMOUS).owner_of(body)
        self.registry.begin(exchange, body, owner)
        return exchange

    def end(self, exchange: Exchange) -> None:
        exchange.status = 200
        exchange.end(self.now)
        self.registry.end(exchange)
        self.registry.check_invariants()


def test_ended_requests_are_bounded_in_number_and_age() -> None:
    world = Registry(max_ended=3)
    running = world.begin("same", 0)
    for number in range(1, 6):
        world.now += 1.0
        world.end(world.begin("same", number))
    for number, is_kept in ((0, True), (1, False), (2, False), (3, True), (5, True)):
        try:
            world.registry.find(f"seq-{number}", ANONYMOUS)
        except HttpError:
            assert not is_kept
        else:
            assert is_kept
    world.now += MAX_AGE_S + 1.0
    assert world.registry.find("seq-0", ANONYMOUS)["status"] == "running"
    world.end(running)
    assert not world.registry._by_key.keys() & {(None, f"seq-{number}") for number in range(1, 6)}
    world.registry.check_invariants()


def test_a_running_request_is_found_after_a_newer_one_of_its_id_is_forgotten() -> None:
    world = Registry(max_ended=1)
    running = world.begin("same", 0)
    world.end(world.begin("same", 1))
    assert world.registry.find("same", ANONYMOUS)["status"] == "completed"
    world.end(world.begin("another", 2))
    assert world.registry.find("same", ANONYMOUS)["status"] == "running"
    assert world.registry.cancel("same", ANONYMOUS)["status"] == "cancelling"
    world.end(running)
    world.end(world.begin("another", 3))
    with pytest.raises(HttpError):
        world.registry.find("same", ANONYMOUS)
