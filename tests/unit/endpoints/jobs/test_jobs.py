"""Jobs: accepted at once, polled or waited for, cancelled; and the short forms /generate and /status."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from replicas.errors import NoReplicaAvailable
from replicas.protocol import Band, PoolCard, Pooling, PoolTask
from serve_app.jobs.api.records import BatchError, BatchKind, BatchStatus, LineStatus
from testkit.http.api import MODEL, Api, MakeApi, card_of, refusal, serving, stored_reply
from testkit.http.scripted_dispatcher import write_keys
from testkit.limits import LIMIT_S, until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": MODEL, "prompt": "the quick"}
EMBEDDINGS = {"model": MODEL, "input": ["the quick", "fox"]}
SCORES = {"model": MODEL, "text_1": "the quick", "text_2": ["fox"]}
RANKS = {"model": MODEL, "query": "the quick", "documents": ["fox", {"text": "dog"}]}
REPLY = stored_reply(" brown fox")
ERROR = {"message": "too long", "type": "invalid_request_error", "param": "prompt", "code": "context_length_exceeded"}

SHORT = {"code": "batch_expired", "message": "too late"}


def late(kind: str) -> dict[str, Any]:
    """Return the error object that is made of `SHORT`, which lacks fields."""
    return SHORT | {"type": kind, "param": None}


async def submit(api: Api, body: dict[str, Any] = COMPLETION, **headers: str) -> dict[str, Any]:
    response = await api.post("/v1/jobs", body, **headers)
    assert response.status_code == 202, response.text
    job: dict[str, Any] = response.json()
    return job


async def get(api: Api, path: str, **params: Any) -> httpx.Response:
    async with asyncio.timeout(LIMIT_S):
        return await api.http.get(path, params=params)


def complete(api: Api, job_id: str) -> None:
    api.jobs.set_line(job_id, 0, LineStatus.SUCCEEDED, status_code=200, response=REPLY)
    api.jobs.change(job_id, status=BatchStatus.COMPLETED, completed_unix_s=7.0)


@pytest.mark.parametrize(
    ("body", "endpoint"), [(CHAT, "/v1/chat/completions"), (COMPLETION, "/v1/completions")], ids=["chat", "prompt"]
)
async def test_job_is_accepted_with_its_place(api: Api, body: dict[str, Any], endpoint: str) -> None:
    response = await api.post("/v1/jobs", body | {"max_tokens": 5}, x_request_id="mine-1")
    assert response.status_code == 202
    job = response.json()
    assert (job["object"], job["status"], job["endpoint"]) == ("job", "queued", endpoint)
    assert job["result"] is job["error"] is job["finished_at"] is job["expires_at"] is None
    assert (response.headers["location"], response.headers["retry-after"]) == (f"/v1/jobs/{job['id']}", "1")
    new = api.jobs.new[job["id"]]
    assert (new.kind, new.tenant, new.band, new.window_s) == (BatchKind.JOB, "anonymous", Band.BATCH, None)
    assert (new.request_id, new.callback_url) == ("mine-1", None)
    assert [line.body for line in new.lines] == [body | {"max_tokens": 5}]
    assert (await get(api, response.headers["location"])).json() == job


@pytest.mark.parametrize(
    ("body", "endpoint", "task"),
    [
        (EMBEDDINGS, "/v1/embeddings", PoolTask.EMBED),
        (SCORES, "/v1/score", PoolTask.SCORE),
        (RANKS, "/v1/rerank", PoolTask.SCORE),
    ],
)
async def test_jobs_are_for_embeddings_scores_and_ranks_too(
    make_api: MakeApi, tokenizer: Any, body: dict[str, Any], endpoint: str, task: PoolTask
) -> None:
    pool = PoolCard(task, Pooling.LAST, 8)
    api = make_api(dispatcher={"card": replace(card_of(tokenizer), pool=pool)})
    job = await submit(api, body | {"deadline_ms": 90_500, "priority": 1})
    new = api.jobs.new[job["id"]]
    assert (job["endpoint"], new.endpoint, new.window_s, new.band) == (endpoint, endpoint, 90.5, Band.STANDARD)
    assert [line.body for line in new.lines] == [body]
    usage = {"prompt_tokens": 3, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
    vector = {"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}
    reply = {"id": "embd-1", "object": "list", "created": 0, "model": MODEL, "data": [vector], "usage": usage}
    api.jobs.set_line(job["id"], 0, LineStatus.SUCCEEDED, status_code=200, response=reply)
    assert (await get(api, f"/v1/jobs/{job['id']}")).json()["result"] == reply


@pytest.mark.parametrize(
    ("fields", "param", "code", "words"),
    [
        ({"input": []}, "input", "invalid_value", "not empty"),
        ({"input": ["a"] * 2049}, "input", "invalid_value", "at most 2048"),
        ({"input": "a", "prompt": "b"}, "input", "invalid_value", "both given"),
        ({"input": "a", "temperature": 1}, "temperature", "unsupported_parameter", "temperature"),
        ({"input": "a" * 5000}, "model", "invalid_value", "no pooling"),
        ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "invalid_value", "or as many"),
        ({"query": "a"}, "documents", "missing_required_parameter", "documents"),
    ],
)
async def test_a_job_of_texts_is_refused_as_its_endpoint_would(
    api: Api, fields: dict[str, Any], param: str, code: str, words: str
) -> None:
    response = await api.post("/v1/jobs", {"model": MODEL, **fields})
    assert refusal(response) == (400, code, param) and words in response.json()["error"]["message"]
    assert not api.jobs.new


async def test_poll_follows_the_job_to_its_result(api: Api) -> None:
    job = await submit(api)
    api.jobs.set_line(job["id"], 0, LineStatus.RUNNING)
    response = await get(api, f"/v1/jobs/{job['id']}")
    assert (response.json()["status"], response.headers["retry-after"]) == ("running", "1")
    complete(api, job["id"])
    response = await get(api, f"/v1/jobs/{job['id']}")
    assert "retry-after" not in response.headers
    done = response.json()
    assert (done["status"], done["result"], done["error"], done["finished_at"]) == ("completed", REPLY, None, 7)


@pytest.mark.parametrize(
    ("line", "batch", "status", "error"),
    [
        ({"status": LineStatus.FAILED, "response": {"error": ERROR}}, BatchStatus.COMPLETED, "failed", ERROR),
        ({"status": LineStatus.FAILED, "error": ERROR}, BatchStatus.COMPLETED, "failed", ERROR),
        ({"status": LineStatus.EXPIRED, "error": SHORT}, BatchStatus.EXPIRED, "expired", late("timeout_error")),
        (
            {"status": LineStatus.CANCELLED, "error": SHORT},
            BatchStatus.CANCELLED,
            "cancelled",
            late("invalid_request_error"),
        ),
    ],
)
async def test_unsuccessful_job_has_its_error(
    api: Api, line: dict[str, Any], batch: BatchStatus, status: str, error: dict[str, Any]
) -> None:
    job = await submit(api)
    api.jobs.set_line(job["id"], 0, **line)
    api.jobs.change(job["id"], status=batch)
    found = (await get(api, f"/v1/jobs/{job['id']}")).json()
    assert (found["status"], found["result"], found["error"]) == (status, None, error)


async def test_job_whose_batch_failed_has_that_error(api: Api) -> None:
    job = await submit(api)
    api.jobs.change(job["id"], status=BatchStatus.FAILED, errors=(BatchError("internal_error", "lost"),))
    found = (await get(api, f"/v1/jobs/{job['id']}")).json()
    assert (found["status"], found["error"]["code"], found["error"]["message"]) == ("failed", "internal_error", "lost")


async def test_long_poll_answers_when_the_job_ends(api: Api) -> None:
    job = await submit(api)
    poll = asyncio.create_task(get(api, f"/v1/jobs/{job['id']}", wait=60))
    await until(lambda: api.jobs.num_waiting == 1)
    complete(api, job["id"])
    assert (await poll).json()["status"] == "completed"
    assert (await get(api, f"/v1/jobs/{job['id']}", wait=60)).json()["result"] == REPLY


async def test_long_poll_answers_when_its_time_is_over(api: Api) -> None:
    job = await submit(api)
    response = await get(api, f"/v1/jobs/{job['id']}", wait=0.01)
    assert (response.status_code, response.json()["status"]) == (200, "queued")


async def test_client_that_leaves_its_long_poll_is_not_waited_for(make_api: MakeApi) -> None:
    api = make_api()
    job = await submit(api)
    async with serving(api.app) as url, httpx.AsyncClient(base_url=url) as http:
        poll = asyncio.create_task(http.get(f"/v1/jobs/{job['id']}?wait=60"))
        await until(lambda: api.jobs.num_waiting == 1)
        poll.cancel()
        await until(lambda: api.jobs.num_waiting == 0)


@pytest.mark.parametrize("wait", ["-1", "61", "nan", "long"])
async def test_wait_is_bounded(api: Api, wait: str) -> None:
    job = await submit(api)
    assert refusal(await get(api, f"/v1/jobs/{job['id']}", wait=wait)) == (400, "invalid_value", "wait")


async def test_cancel_ends_the_job_once(api: Api) -> None:
    job = await submit(api)
    response = await api.http.delete(f"/v1/jobs/{job['id']}")
    assert (response.status_code, response.json()["status"]) == (200, "cancelling")
    api.jobs.set_line(job["id"], 0, LineStatus.CANCELLED)
    api.jobs.change(job["id"], status=BatchStatus.CANCELLED)
    assert (await get(api, f"/v1/jobs/{job['id']}")).json()["status"] == "cancelled"
    response = await api.http.delete(f"/v1/jobs/{job['id']}")
    assert refusal(response) == (409, "batch_not_cancellable", None)
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("fields", "headers", "band"),
    [
        ({}, {}, Band.BATCH),
        ({"service_tier": "flex"}, {}, Band.BATCH),
        ({"service_tier": "auto"}, {}, Band.STANDARD),
        ({"priority": 2}, {"x_headway_priority": "interactive"}, Band.BATCH),
        ({"priority": 1}, {}, Band.STANDARD),
        ({"priority": 0}, {}, Band.STANDARD),
        ({}, {"x_headway_priority": "interactive"}, Band.STANDARD),
    ],
)
async def test_band_is_batch_unless_asked_for_up_to_the_ceiling(
    make_api: MakeApi, tmp_path: Path, fields: dict[str, Any], headers: dict[str, str], band: Band
) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "acme")})  # its ceiling is `standard`, the default
    job = await submit(api, COMPLETION | fields, authorization="Bearer acme", **headers)
    new = api.jobs.new[job["id"]]
    assert (new.tenant, new.band, job["priority"]) == ("acme", band, band.value)


async def test_job_options_stay_out_of_the_stored_request(api: Api) -> None:
    url = "https://example.com/hook"
    options = {"priority": 1, "deadline_ms": 90_500, "callback_url": url, "stream": False, "service_tier": "flex"}
    job = await submit(api, COMPLETION | options | {"seed": 3, "stop": None})
    new = api.jobs.new[job["id"]]
    assert (new.window_s, new.callback_url, new.band) == (90.5, url, Band.STANDARD)
    assert new.lines[0].body == COMPLETION | {"seed": 3}
    assert (job["callback_url"], job["expires_at"] - job["created_at"] in (90, 91)) == (url, True)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "messages", "missing_required_parameter"),
        ({"messages": CHAT["messages"]}, "prompt", "invalid_value"),
        ({"model": None}, "model", "missing_required_parameter"),
        ({"stream": True}, "stream", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"deadline_ms": 0}, "deadline_ms", "invalid_value"),
        ({"deadline_ms": 30 * 86_400_000 + 1}, "deadline_ms", "invalid_value"),
        ({"priority": 3}, "priority", "invalid_value"),
        ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
        ({"callback_url": "example.com"}, "callback_url", "invalid_value"),
        ({"callback_url": "http://127.0.0.1:8000/"}, "callback_url", "invalid_value"),
        ({"callback_url": "http://[::1]/"}, "callback_url", "invalid_value"),
        ({"callback_url": "http://0x7f000001/"}, "callback_url", "invalid_value"),
        ({"callback_url": "http://example.com:port/"}, "callback_url", "invalid_value"),
    ],
)
async def test_bad_job_is_400_and_named(api: Api, fields: dict[str, Any], param: str, code: str) -> None:
    assert refusal(await api.post("/v1/jobs", COMPLETION | fields)) == (400, code, param)
    assert not api.jobs.new


@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "prompt"])
async def test_job_beyond_the_context_is_refused_at_once(make_api: MakeApi, body: dict[str, Any]) -> None:
    api = make_api()
    for path in ("/v1/jobs", "/generate"):
        response = await api.post(path, body | {"max_tokens": 300})
        assert refusal(response) == (400, "context_length_exceeded", "max_tokens")
        assert "maximum context length is 256 tokens" in response.json()["error"]["message"]
    assert not api.jobs.new


async def test_job_is_accepted_while_the_model_is_unknown(make_api: MakeApi) -> None:
    api = make_api(dispatcher={"error": NoReplicaAvailable("loading", code="model_loading")})
    await submit(api, COMPLETION | {"max_tokens": 300})


async def test_job_for_another_model_is_404(api: Api) -> None:
    assert refusal(await api.post("/v1/jobs", COMPLETION | {"model": "other"}))[:2] == (404, "model_not_found")


async def test_job_with_a_used_key_is_the_same_or_409(api: Api) -> None:
    first = await submit(api, COMPLETION | {"seed": 1, "n": 2}, idempotency_key="k-1")
    complete(api, first["id"])
    again = await submit(api, {"n": 2, "seed": 1} | COMPLETION, idempotency_key="k-1")
    assert (again["id"], again["status"], again["result"]) == (first["id"], "completed", REPLY)
    for path, body in (("/v1/jobs", COMPLETION), ("/generate", COMPLETION | {"seed": 1, "n": 2})):
        response = await api.post(path, body, idempotency_key="k-1")
        assert refusal(response) == (409, "idempotency_key_in_use", None)
        assert response.headers["x-should-retry"] == "false"
    assert len(api.jobs.new) == 1


async def test_jobs_of_other_tenants_and_batches_are_unknown(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "one", "two")})
    job = await submit(api, authorization="Bearer one")
    batch = await api.post("/v1/batch/async", {"prompts": ["a"]}, authorization="Bearer two")
    two = {"authorization": "Bearer two"}
    for job_id in (job["id"], batch.json()["batch_id"], "job_none", "x" * 500):
        for method, path in (("GET", "/v1/jobs/"), ("DELETE", "/v1/jobs/"), ("GET", "/status/")):
            response = await api.http.request(method, path + job_id, headers=two)
            assert refusal(response) == (404, "job_not_found", None)
            assert len(response.json()["error"]["message"]) < 200
    assert api.jobs.all_batches[job["id"]].status is BatchStatus.IN_PROGRESS
    assert (await api.http.get(f"/v1/jobs/{job['id']}")).status_code == 401


async def test_generate_takes_the_short_form(api: Api) -> None:
    response = await api.post("/generate", {"prompt": "hi"})
    assert response.status_code == 202
    job_id = response.json()["job_id"]
    assert response.json() == {"job_id": job_id, "status": "queued"}
    assert response.headers["location"] == f"/status/{job_id}"
    assert api.jobs.new[job_id].lines[0].body == {"model": MODEL, "prompt": "hi", "max_tokens": 50}
    waiting = {"job_id": job_id, "status": "queued", "result": None, "error": None}
    assert (await get(api, f"/status/{job_id}")).json() == waiting
    complete(api, job_id)
    done = {"job_id": job_id, "status": "completed", "result": REPLY, "error": None}
    assert (await get(api, f"/status/{job_id}", wait=30)).json() == done


async def test_generate_takes_whole_bodies_too(api: Api) -> None:
    job_id = (await api.post("/generate", CHAT | {"max_tokens": 9, "priority": 1})).json()["job_id"]
    new = api.jobs.new[job_id]
    assert (new.endpoint, new.band) == ("/v1/chat/completions", Band.STANDARD)
    assert new.lines[0].body == CHAT | {"max_tokens": 9}
    job_id = (await api.post("/generate", {"messages": CHAT["messages"]})).json()["job_id"]
    assert api.jobs.new[job_id].lines[0].body == CHAT


async def test_large_job_is_read_outside_the_event_loop(make_api: MakeApi, tokenizer: Any) -> None:
    api = make_api(dispatcher={"card": card_of(tokenizer, max_model_len=200_000)})
    job = await submit(api, COMPLETION | {"prompt": "x" * 100_000}, idempotency_key="k")
    assert len(api.jobs.new[job["id"]].lines[0].body["prompt"]) == 100_000


async def test_job_is_named_in_the_log_and_its_text_is_not(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "serve_app"):
        job = await submit(api, COMPLETION | {"prompt": "a very private matter"}, x_request_id="mine-2")
    [line] = [record.__dict__ for record in caplog.records if record.message == "request finished"]
    assert (line["job_id"], line["tenant"], line["request_id"]) == (job["id"], "anonymous", "mine-2")
    assert "private" not in json.dumps(line, default=str)


ASKS: list[tuple[str, str]] = [
    ("POST", "/v1/files"),
    ("GET", "/v1/files/file-1/content"),
    ("POST", "/v1/batches"),
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs/job_1"),
    ("POST", "/v1/batch/async"),
    ("GET", "/v1/batch/stats"),
]


@pytest.mark.parametrize(("method", "path"), ASKS)
async def test_without_a_jobs_deployment_its_routes_are_404(make_api: MakeApi, method: str, path: str) -> None:
    assert refusal(await make_api(has_jobs=False).http.request(method, path)) == (404, "unsupported_endpoint", None)


@pytest.mark.parametrize(("method", "path"), ASKS)
async def test_without_a_key_every_jobs_route_is_401(make_api: MakeApi, tmp_path: Path, method: str, path: str) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "acme")})
    assert (await api.http.request(method, path)).status_code == 401
