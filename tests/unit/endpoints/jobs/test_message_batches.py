"""Anthropic's message batches: the six calls, their objects, results and errors, over a jobs service in memory."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from replicas.protocol import Band
from serve_app.jobs.api.records import BatchKind, BatchStatus, LineStatus
from testkit.http.api import MODEL, Api, MakeApi
from testkit.http.scripted_dispatcher import write_keys

PATH = "/v1/messages/batches"
PARAMS = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
FAILURE = {
    "type": "error", "request_id": "r-1",
    "error": {"type": "invalid_request_error", "message": "no", "details": {"error_code": "invalid_value"}},
}  # fmt: skip


def requests(*names: str) -> list[dict[str, Any]]:
    return [{"custom_id": name, "params": PARAMS} for name in names]


async def create(api: Api, *names: str) -> dict[str, Any]:
    response = await api.post(PATH, {"requests": requests(*names)})
    assert response.status_code == 200 and response.headers["request-id"], response.text
    batch: dict[str, Any] = response.json()
    return batch


async def test_a_new_batch_is_anthropics_object(api: Api) -> None:
    batch = await create(api, "a", "b")
    assert batch == {
        "id": batch["id"], "type": "message_batch", "processing_status": "in_progress", "archived_at": None,
        "request_counts": {"processing": 2, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0},
        "created_at": batch["created_at"], "expires_at": batch["expires_at"], "ended_at": None,
        "cancel_initiated_at": None, "results_url": None,
    }  # fmt: skip
    assert batch["created_at"].endswith("Z") and batch["expires_at"][10:19] == batch["created_at"][10:19]
    assert (await api.http.get(f"{PATH}/{batch['id']}")).json() == batch
    new = api.jobs.new[batch["id"]]
    assert (new.kind, new.endpoint, new.band, new.window_s) == (
        BatchKind.MESSAGES, "/v1/messages", Band.BATCH, 86_400.0,
    )  # fmt: skip
    assert [(line.custom_id, line.body) for line in new.lines] == [("a", PARAMS), ("b", PARAMS)]


@pytest.mark.parametrize(
    ("status", "num_undone", "counts"),
    [
        (BatchStatus.COMPLETED, 0, {"succeeded": 1, "errored": 3, "canceled": 0, "expired": 0}),
        (BatchStatus.CANCELLED, 2, {"succeeded": 1, "errored": 1, "canceled": 2, "expired": 0}),
        (BatchStatus.EXPIRED, 2, {"succeeded": 1, "errored": 1, "canceled": 0, "expired": 2}),
    ],
)
async def test_counts_of_an_ended_batch_tell_why_each_request_ended(
    api: Api, status: BatchStatus, num_undone: int, counts: dict[str, int]
) -> None:
    batch = await create(api, "a", "b", "c", "d")
    api.jobs.set_line(batch["id"], 0, LineStatus.SUCCEEDED, response={})
    for index in (1, 2, 3):
        api.jobs.set_line(batch["id"], index, LineStatus.FAILED, response=FAILURE)
    api.jobs.change(batch["id"], status=status, num_undone=num_undone, **{f"{status.value}_unix_s": 5.0})
    shown = (await api.http.get(f"{PATH}/{batch['id']}", headers={"x-forwarded-proto": "https"})).json()
    assert shown["request_counts"] == {"processing": 0, **counts}
    assert (shown["processing_status"], shown["ended_at"]) == ("ended", "1970-01-01T00:00:05Z")
    assert shown["results_url"] == f"https://{api.http.base_url.host}{PATH}/{batch['id']}/results"


async def test_results_have_a_line_for_each_request(api: Api) -> None:
    names = [f"r-{index}" for index in range(70)]
    batch = await create(api, *names)
    early = await api.http.get(f"{PATH}/{batch['id']}/results")
    assert (early.status_code, early.json()["error"]["type"]) == (409, "conflict_error")
    message = (await api.post("/v1/messages", PARAMS)).json()
    message["content"][0]["text"] = "hi\u2028there"
    results = [
        (LineStatus.SUCCEEDED, {"response": message}, {"type": "succeeded", "message": message}),
        (LineStatus.FAILED, {"response": FAILURE}, {"type": "errored", "error": FAILURE}),
        (LineStatus.EXPIRED, {"error": {"code": "batch_expired"}}, {"type": "expired"}),
        (LineStatus.CANCELLED, {"error": {"code": "batch_cancelled"}}, {"type": "canceled"}),
    ]
    for index in range(70):
        status, fields, _ = results[index % 4]
        api.jobs.set_line(batch["id"], index, status, **fields)
    api.jobs.change(batch["id"], status=BatchStatus.COMPLETED, completed_unix_s=5.0)
    url = (await api.http.get(f"{PATH}/{batch['id']}")).json()["results_url"]
    response = await api.http.get(url)
    assert response.headers["content-type"] == "application/x-jsonl"
    assert [json.loads(line) for line in response.text.splitlines()] == [
        {"custom_id": name, "result": results[index % 4][2]} for index, name in enumerate(names)
    ]


async def test_pages_go_forward_and_backward(api: Api) -> None:
    ids = [(await create(api, "a"))["id"] for _ in range(5)][::-1]

    async def page(query: str) -> tuple[list[str], bool]:
        given = (await api.http.get(f"{PATH}?{query}")).json()
        listed = [batch["id"] for batch in given["data"]]
        assert (given["first_id"], given["last_id"]) == ((listed[0], listed[-1]) if listed else (None, None))
        return listed, given["has_more"]

    assert await page("limit=2") == (ids[:2], True)
    assert await page(f"limit=2&after_id={ids[1]}") == (ids[2:4], True)
    assert await page(f"limit=2&after_id={ids[3]}") == (ids[4:], False)
    assert await page(f"limit=2&before_id={ids[4]}") == (ids[2:4], True)
    assert await page(f"before_id={ids[2]}") == (ids[:2], False)
    both = await api.http.get(f"{PATH}?after_id={ids[0]}&before_id={ids[1]}")
    assert (both.status_code, both.json()["error"]["type"]) == (400, "invalid_request_error")
    too_many = await api.http.get(f"{PATH}?limit=1001")
    assert "`limit` must be at most 1000" in too_many.json()["error"]["message"]


async def test_a_batch_is_cancelled_then_deleted(api: Api) -> None:
    batch_id = (await create(api, "a"))["id"]
    refused = await api.http.delete(f"{PATH}/{batch_id}")
    assert (refused.status_code, refused.json()["error"]["type"]) == (409, "conflict_error")
    cancelled = (await api.post(f"{PATH}/{batch_id}/cancel", {})).json()
    assert cancelled["processing_status"] == "canceling" and cancelled["cancel_initiated_at"] is not None
    api.jobs.change(batch_id, status=BatchStatus.CANCELLED, cancelled_unix_s=5.0)
    assert (await api.post(f"{PATH}/{batch_id}/cancel", {})).status_code == 409
    deleted = (await api.http.delete(f"{PATH}/{batch_id}")).json()
    assert deleted == {"id": batch_id, "type": "message_batch_deleted"}
    assert (await api.http.get(f"{PATH}/{batch_id}")).status_code == 404


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "`requests` is missing"),
        ({"requests": []}, "`requests` has 0 items; it must have at least 1"),
        ({"requests": requests("a", "b", "c", "d")}, "`requests` has 4 items; at most 3 are accepted"),
        ({"requests": requests("a", "b", "a")}, "`requests[2].custom_id` is `a`, as that of `requests[0]` is"),
        ({"requests": requests("a b")}, "`requests[0].custom_id` must be 1 to 64 characters: letters, digits"),
        ({"requests": requests("a" * 65)}, "`requests[0].custom_id` must be 1 to 64 characters"),
        ({"requests": [{"custom_id": "a"}]}, "`requests[0].params` is missing"),
        ({"requests": [{"custom_id": "a", "params": []}]}, "`requests[0].params` must be an object"),
    ],
)
async def test_a_wrong_body_is_refused_by_field_limit_and_value(
    make_api: MakeApi, body: dict[str, Any], message: str
) -> None:
    api = make_api(job_limits={"max_batch_lines": 3})
    response = await api.post(PATH, body)
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert error["error"]["message"].startswith(message)
    assert not api.jobs.new


async def test_batches_of_other_tenants_and_kinds_are_unknown(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "one", "two")})

    async def ask(key: str, method: str, path: str, body: Any = None) -> httpx.Response:
        return await api.http.request(method, path, json=body, headers={"x-api-key": key})

    batch_id = (await ask("one", "POST", PATH, {"requests": requests("a")})).json()["id"]
    job_id = (await ask("one", "POST", "/v1/jobs", {"model": MODEL, "prompt": "hi"})).json()["id"]
    for key, unknown in (("two", batch_id), ("one", job_id), ("one", "msgbatch_none")):
        place = f"{PATH}/{unknown}"
        calls = (("GET", place), ("POST", f"{place}/cancel"), ("DELETE", place), ("GET", f"{place}/results"))
        for method, path in calls:
            response = await ask(key, method, path)
            assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error"), path
    assert (await ask("two", "GET", PATH)).json()["data"] == []
    assert (await ask("one", "GET", f"/v1/batches/{batch_id}")).status_code == 404
    assert (await ask("one", "GET", PATH)).json()["data"][0]["id"] == batch_id
