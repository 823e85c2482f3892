"""Prompt batches: answered at once, streamed or not, or run later."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from replicas.errors import Overloaded, ReplicaLost, SequenceFailed
from replicas.protocol import Band
from serve_app.jobs.api.records import BatchKind, BatchStatus, LineStatus
from serve_app.openai.request.validation import RequestLimits
from testkit.http.api import MODEL, Api, MakeApi, refusal, serving, stored_reply
from testkit.limits import LIMIT_S, until

PROMPTS = ["the quick", "brown fox", "hello"]
LINE_REPLY = stored_reply(" there")


async def sync(api: Api, prompts: list[Any], path: str = "/v1/batch/sync", **fields: Any) -> httpx.Response:
    return await api.post(path, {"prompts": prompts, **fields})


async def test_outputs_come_in_order_with_what_they_cost(api: Api) -> None:
    response = await sync(api, PROMPTS, max_tokens=4)
    assert response.status_code == 200
    batch = response.json()
    whole = [(await api.complete(prompt=prompt, max_tokens=4)).json() for prompt in PROMPTS]
    assert batch["outputs"] == [
        {**reply["choices"][0], "index": index, "status": "completed", "usage": reply["usage"], "error": None}
        for index, reply in enumerate(whole)
    ]
    assert {output["finish_reason"] for output in batch["outputs"]} == {"length"}
    counts = (batch["status"], batch["num_prompts"], batch["num_completed"], batch["num_failed"])
    assert counts == ("completed", 3, 3, 0)
    assert batch["total_tokens"] == sum(reply["usage"]["total_tokens"] for reply in whole)
    assert batch["latency_ms"] > 0
    expected = batch["total_tokens"] / (batch["latency_ms"] / 1000)
    assert batch["throughput_tokens_per_sec"] == pytest.approx(expected, rel=0.01)
    assert batch["batch_id"].startswith("batch_")


async def test_sampling_fields_and_urgency_reach_every_sequence(api: Api) -> None:
    await sync(api, ["a", [1, 2, 3]], max_tokens=3, temperature=0.5, seed=7, priority=0, stop=["x"], model=MODEL)
    started = api.replica.started
    sampled = [(one.band, one.params.seed, one.params.temperature, one.params.stop) for one in started]
    assert sampled == [(Band.INTERACTIVE, 7, 0.5, ("x",))] * 2
    assert len({one.request_id for one in started}) == 2
    assert (1, 2, 3) in [one.prompt_token_ids for one in started]


async def test_one_bad_prompt_does_not_fail_the_others(api: Api) -> None:
    prompts = ["the quick", "", "x " * 5000, 5, ["two", "texts"], [], {"a": 1}, None, "hello"]
    batch = (await sync(api, prompts, max_tokens=2)).json()
    assert [output["status"] for output in batch["outputs"]] == ["completed", *["failed"] * 7, "completed"]
    assert (batch["num_completed"], batch["num_failed"]) == (2, 7)
    errors = [output["error"] for output in batch["outputs"][1:8]]
    assert errors[1]["code"] == "context_length_exceeded"
    assert {error["type"] for error in errors} == {"invalid_request_error"}
    assert all(output["text"] is None for output in batch["outputs"][1:8])


async def test_sequence_that_fails_fails_alone(make_api: MakeApi) -> None:
    api = make_api(fail_at=1, error=SequenceFailed("nan"), fail_only=lambda request: len(request.prompt_token_ids) == 2)
    batch = (await sync(api, [[1], [1, 2], [1, 2, 3]], max_tokens=3)).json()
    assert [output["status"] for output in batch["outputs"]] == ["completed", "failed", "completed"]
    assert batch["outputs"][1]["error"]["code"] == "internal_error"


async def test_overload_of_every_prompt_is_a_429(make_api: MakeApi) -> None:
    response = await sync(make_api(fail_at=0, error=Overloaded("full", 3.0)), PROMPTS)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["code"] == "server_overloaded"


async def test_unforeseen_failure_is_logged_and_not_shown(make_api: MakeApi, caplog: pytest.LogCaptureFixture) -> None:
    response = await sync(make_api(fail_at=0, error=ZeroDivisionError("secret detail")), ["a"])
    assert response.json()["outputs"][0]["error"]["code"] == "internal_error"
    assert "secret" not in response.text and "secret detail" in caplog.text


@pytest.mark.parametrize("path", ["/v1/batch/sync", "/v1/batch/async"])
@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"prompts": None}, "prompts", "missing"),
        ({"prompts": []}, "prompts", "at least 1"),
        ({"prompts": "text"}, "prompts", "list"),
        ({"prompt": "a"}, "prompt", "send `prompts`"),
        ({"temperature": 3}, "temperature", "2"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"n": 2}, "n", "repeat the prompt"),
        ({"suffix": "red"}, "suffix", "not supported"),
        ({"messages": []}, "messages", "not supported"),
    ],
)
async def test_shared_fields_are_checked_before_the_prompts(
    api: Api, path: str, fields: dict[str, Any], param: str, what: str
) -> None:
    response = await api.post(path, {"prompts": ["a"], **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert what in error["message"]
    assert not api.replica.started and not api.jobs.new


async def test_too_many_prompts_are_refused_with_both_numbers(make_api: MakeApi) -> None:
    api = make_api(settings={"limits": RequestLimits(max_prompts=2)}, job_limits={"max_batch_lines": 3})
    for path, most in (("/v1/batch/sync", 2), ("/v1/batch/async", 3)):
        response = await sync(api, ["a"] * 4, path)
        assert refusal(response) == (400, "invalid_value", "prompts")
        assert f"`prompts` has 4 items; at most {most} are accepted" in response.json()["error"]["message"]
    assert (await sync(api, ["a"] * 2)).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        ("/v1/batch/sync", {"callback_url": "https://example.com"}, "unsupported_parameter", "callback_url"),
        ("/v1/batch/async", {"stream": True}, "unsupported_parameter", "stream"),
        ("/v1/batch/async", {"callback_url": "http://192.168.0.1/"}, "invalid_value", "callback_url"),
    ],
)
async def test_fields_of_the_other_form_are_refused(
    api: Api, path: str, fields: dict[str, Any], code: str, param: str
) -> None:
    assert refusal(await sync(api, ["a"], path, **fields)) == (400, code, param)


@pytest.mark.parametrize("path", ["/v1/batch/sync", "/v1/batch/async"])
async def test_unknown_model_is_404(api: Api, path: str) -> None:
    assert refusal(await sync(api, ["a"], path, model="other"))[:2] == (404, "model_not_found")


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.mark.parametrize(("query", "fields"), [("?stream=true", {}), ("", {"stream": True})])
async def test_stream_says_what_the_whole_answer_says(api: Api, query: str, fields: dict[str, Any]) -> None:
    whole = (await sync(api, PROMPTS, max_tokens=5)).json()
    first, *pieces, last = lines_of(await sync(api, PROMPTS, f"/v1/batch/sync{query}", max_tokens=5, **fields))
    assert (first["status"], first["num_prompts"]) == ("processing", 3)
    for output in whole["outputs"]:
        mine = [piece for piece in pieces if piece["index"] == output["index"]]
        assert "".join(piece["text"] for piece in mine[:-1]) == output["text"]
        assert mine[-2]["finish_reason"] == "length"
        assert mine[-1] == {"index": output["index"], "status": "completed", "usage": output["usage"], "error": None}
    assert (last["status"], last["num_completed"], last["total_tokens"]) == ("completed", 3, whole["total_tokens"])


async def test_stream_interleaves_its_prompts(make_api: MakeApi) -> None:
    api = make_api(tpot_s=0.001)
    _, *pieces, _ = lines_of(await sync(api, ["a", "b"], "/v1/batch/sync?stream=true", max_tokens=8))
    order = [piece["index"] for piece in pieces]
    assert order != sorted(order) and order != sorted(order, reverse=True)


async def test_failure_in_a_stream_is_a_line_of_its_own(make_api: MakeApi) -> None:
    api = make_api(fail_at=1, error=ReplicaLost("gone"), fail_only=lambda request: len(request.prompt_token_ids) == 1)
    lines = lines_of(await sync(api, [[1], [1, 2], 5], "/v1/batch/sync?stream=true", max_tokens=2))
    ends = {line["index"]: line for line in lines[1:-1] if "status" in line}
    assert {index: line["status"] for index, line in ends.items()} == {0: "failed", 1: "completed", 2: "failed"}
    assert ends[0]["error"]["code"] == "replica_lost"
    assert (lines[-1]["num_completed"], lines[-1]["num_failed"]) == (1, 2)


async def test_silence_in_a_stream_is_broken_with_the_progress(make_api: MakeApi) -> None:
    gate = asyncio.Event()
    api = make_api(settings={"keep_alive_s": 0.01}, first_token_gate=gate)
    async with serving(api.app) as url, httpx.AsyncClient(base_url=url) as http:
        body = {"prompts": ["a", 5], "max_tokens": 2}
        async with asyncio.timeout(LIMIT_S), http.stream("POST", "/v1/batch/sync?stream=true", json=body) as response:
            lines = response.aiter_lines()
            seen = [json.loads(await anext(lines)) for _ in range(5)]
            gate.set()
            seen += [json.loads(line) async for line in lines]
    progress = [line for line in seen[1:5] if "index" not in line]
    assert progress and {(line["status"], line["num_prompts"]) for line in progress} == {("processing", 2)}
    assert seen[-1]["status"] == "completed"


@pytest.mark.parametrize("query", ["", "?stream=true"])
async def test_client_that_leaves_aborts_every_sequence(make_api: MakeApi, query: str) -> None:
    api = make_api(gate=asyncio.Event(), gate_at=1)
    async with serving(api.app) as url, httpx.AsyncClient(base_url=url) as http:
        body = {"prompts": PROMPTS, "max_tokens": 5}
        asking = asyncio.create_task(http.post(f"/v1/batch/sync{query}", json=body))
        await until(lambda: len(api.replica.running) == 3)
        asking.cancel()
        await until(lambda: not api.replica.running)
    assert len(api.replica.aborted) == 3


async def test_sync_needs_no_jobs_deployment(make_api: MakeApi) -> None:
    assert (await sync(make_api(has_jobs=False), ["a"])).status_code == 200


async def test_async_batch_is_accepted_line_by_line(api: Api) -> None:
    response = await sync(
        api, ["a", [1, 2], 5], "/v1/batch/async", max_tokens=3, priority=1, callback_url="https://example.com/x"
    )
    assert response.status_code == 202
    batch_id = response.json()["batch_id"]
    assert response.json() == {"batch_id": batch_id, "status": "pending"}
    assert response.headers["location"] == f"/v1/batch/{batch_id}"
    new = api.jobs.new[batch_id]
    assert (new.kind, new.endpoint, new.band) == (BatchKind.PROMPTS, "/v1/completions", Band.STANDARD)
    assert (new.callback_url, new.window_s) == ("https://example.com/x", None)
    shared = {"model": MODEL, "max_tokens": 3}
    # A list is wrapped, so that it can only be token ids; a number is left for its line to fail by.
    assert [line.body for line in new.lines] == [shared | {"prompt": prompt} for prompt in ("a", [[1, 2]], 5)]
    assert [line.custom_id for line in new.lines] == ["0", "1", "2"]


async def test_progress_and_partial_outputs_show_as_they_come(api: Api) -> None:
    batch_id = (await sync(api, PROMPTS, "/v1/batch/async")).json()["batch_id"]
    batch = (await api.http.get(f"/v1/batch/{batch_id}")).json()
    assert (batch["status"], batch["progress"], batch["eta_seconds"]) == ("pending", 0, None)
    assert [output["status"] for output in batch["outputs"]] == ["queued"] * 3
    api.jobs.set_line(batch_id, 0, LineStatus.RUNNING)
    assert (await api.http.get(f"/v1/batch/{batch_id}")).json()["status"] == "processing"
    api.jobs.set_line(batch_id, 0, LineStatus.SUCCEEDED, response=LINE_REPLY)
    api.jobs.set_line(batch_id, 1, LineStatus.FAILED, response={"error": {"code": "invalid_value"}})
    api.jobs.change(batch_id, eta_s=4.5, num_prompt_tokens=3, num_output_tokens=2)
    batch = (await api.http.get(f"/v1/batch/{batch_id}")).json()
    assert (batch["status"], batch["progress"], batch["num_done"]) == ("processing", 0.6667, 2)
    assert (batch["eta_seconds"], batch["total_tokens"], batch["has_more"]) == (4.5, 5, False)
    assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 1}
    done, failed, queued = batch["outputs"]
    assert (done["status"], done["text"], done["finish_reason"], done["usage"]["total_tokens"]) == (
        "completed", " there", "stop", 5,
    )  # fmt: skip
    assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_value")
    assert (queued["index"], queued["status"], queued["text"]) == (2, "queued", None)


async def test_outputs_have_pages(api: Api) -> None:
    batch_id = (await sync(api, ["a"] * 5, "/v1/batch/async")).json()["batch_id"]
    seen, after, has_more = [], -1, True
    while has_more:
        page = (await api.http.get(f"/v1/batch/{batch_id}", params={"after": after, "limit": 2})).json()
        seen += [output["index"] for output in page["outputs"]]
        after, has_more = seen[-1], page["has_more"]
    assert seen == [0, 1, 2, 3, 4]
    assert (await api.http.get(f"/v1/batch/{batch_id}?limit=1001")).json()["error"]["param"] == "limit"


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (BatchStatus.FINALIZING, "processing"),
        (BatchStatus.CANCELLING, "processing"),
        (BatchStatus.COMPLETED, "completed"),
        (BatchStatus.FAILED, "failed"),
        (BatchStatus.EXPIRED, "failed"),
        (BatchStatus.CANCELLED, "cancelled"),
    ],
)
async def test_every_state_has_its_word(api: Api, status: BatchStatus, word: str) -> None:
    batch_id = (await sync(api, ["a"], "/v1/batch/async")).json()["batch_id"]
    api.jobs.change(batch_id, status=status)
    assert (await api.http.get(f"/v1/batch/{batch_id}")).json()["status"] == word


async def test_async_batch_can_be_cancelled(api: Api) -> None:
    batch_id = (await sync(api, ["a"], "/v1/batch/async")).json()["batch_id"]
    response = await api.http.post(f"/v1/batch/{batch_id}/cancel")
    assert (response.status_code, response.json()["status"]) == (200, "processing")
    assert api.jobs.all_batches[batch_id].status is BatchStatus.CANCELLING


async def test_stats_are_no_batch_id(api: Api) -> None:
    await sync(api, ["a"], "/v1/batch/async")
    assert (await api.http.get("/v1/batch/stats")).json() == {
        "total_batches": 1, "pending": 1, "processing": 0, "completed": 0, "failed": 0, "cancelled": 0,
        "tokens_per_sec": 12.5,
    }  # fmt: skip
    assert refusal(await api.http.get("/v1/batch/statistics")) == (404, "batch_not_found", None)


async def test_same_key_and_body_is_the_same_batch(api: Api) -> None:
    body = {"prompts": PROMPTS}
    first = await api.post("/v1/batch/async", body, idempotency_key="k")
    assert (await api.post("/v1/batch/async", body, idempotency_key="k")).json() == first.json()
    other = await api.post("/v1/batch/async", {"prompts": ["other"]}, idempotency_key="k")
    assert refusal(other) == (409, "idempotency_key_in_use", None)


async def test_what_prompts_share_counts_once_for_each(make_api: MakeApi) -> None:
    api = make_api(job_limits={"max_file_bytes": 10_000})
    long = {"stop": ["x" * 200]}
    assert (await api.post("/v1/batch/async", {"prompts": ["a"] * 30, **long})).status_code == 202
    response = await api.post("/v1/batch/async", {"prompts": ["a"] * 50, **long})
    assert refusal(response) == (400, "invalid_value", "prompts")
    assert "at most 10000 are accepted" in response.json()["error"]["message"]
