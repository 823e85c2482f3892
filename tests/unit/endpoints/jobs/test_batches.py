"""Batches of files: OpenAI's objects and words, checked with its own client."""

from pathlib import Path
from typing import Any

import openai
import pytest

from replicas.errors import Overloaded
from replicas.protocol import Band
from serve_app.jobs.api.records import BatchError, BatchKind, BatchStatus, RequestCounts
from testkit.http.api import MODEL, Api, MakeApi, refusal
from testkit.http.scripted_dispatcher import write_keys

REFUSED = [
    ({"input_file_id": None}, "input_file_id", "missing"),
    ({"input_file_id": 5}, "input_file_id", "string"),
    ({"input_file_id": "f" * 65}, "input_file_id", "letters, digits"),
    ({"input_file_id": "file-\0"}, "input_file_id", "letters, digits"),
    ({"input_file_id": "file-1\n"}, "input_file_id", "letters, digits"),
    ({"endpoint": "/v1/images"}, "endpoint", "/v1/embeddings"),
    ({"completion_window": "24"}, "completion_window", "24h, 30m or 90s"),
    ({"completion_window": "0h"}, "completion_window", "duration"),
    ({"completion_window": 24}, "completion_window", "duration"),
    ({"completion_window": "31d"}, "completion_window", "at most 2592000 s"),
    ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "17 pairs; at most 16"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "key of 65 characters; at most 64"),
    ({"metadata": {"k": "v" * 513}}, "metadata", "value of 513 characters; at most 512"),
    ({"metadata": {"k": 5}}, "metadata.k", "string"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds", "3600"),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor", "created_at"),
    ({"priority": 0}, "priority", "not supported"),
    ({"callback_url": "ftp://example.com/x"}, "callback_url", "http or https"),
    ({"callback_url": "https://"}, "callback_url", "host"),
    ({"callback_url": "https://me:secret@example.com/"}, "callback_url", "password"),
    ({"callback_url": "https://example.com/" + "x" * 2048}, "callback_url", "2048"),
    ({"callback_url": "http://10.0.0.1/hook"}, "callback_url", "not public"),
    ({"callback_url": "http://localhost:9/hook"}, "callback_url", "not public"),
]


async def new_file(api: Api, client: Any = None) -> str:
    client = client or api.openai
    file = await client.files.create(file=("in.jsonl", b'{"custom_id": "a"}'), purpose="batch")
    return str(file.id)


async def new_batch(api: Api, **options: Any) -> Any:
    defaults = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    fields = {"input_file_id": await new_file(api), **defaults, **options}
    return await api.openai.batches.create(**fields)


async def test_new_batch_is_openais_object(api: Api) -> None:
    batch = await new_batch(
        api, metadata={"night": "1"}, output_expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", "/v1/chat/completions")
    assert (batch.completion_window, batch.metadata, batch.model) == ("24h", {"night": "1"}, MODEL)
    assert batch.expires_at - batch.created_at == 86_400
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (0, 0, 0)
    assert batch.errors is batch.output_file_id is batch.error_file_id is batch.in_progress_at is None
    assert await api.openai.batches.retrieve(batch.id) == batch
    new = api.jobs.new[batch.id]
    assert (new.kind, new.band, new.tenant, new.window_s) == (BatchKind.FILE, Band.BATCH, "anonymous", 86_400.0)
    assert (new.output_expires_after_s, new.input_file_id, new.request_id) == (
        7200.0, batch.input_file_id, batch._request_id,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("window", "shown", "window_s"),
    [("24h", "24h", 86_400), ("1h", "1h", 3600), ("30m", "30m", 1800), ("90s", "90s", 90), ("2d", "48h", 172_800)],
)
async def test_windows_of_other_lengths_are_taken(api: Api, window: str, shown: str, window_s: int) -> None:
    batch = await new_batch(api, completion_window=window)
    assert (batch.completion_window, api.jobs.new[batch.id].window_s) == (shown, window_s)


async def test_batch_has_its_times_counts_and_files(api: Api) -> None:
    batch = await new_batch(api)
    now = batch.created_at
    api.jobs.change(
        batch.id,
        status=BatchStatus.COMPLETED,
        counts=RequestCounts(3, 2, 1),
        in_progress_unix_s=now + 1.5,
        finalizing_unix_s=now + 2.5,
        completed_unix_s=now + 3.5,
        output_file_id="file-out",
        error_file_id="file-err",
        num_prompt_tokens=30,
        num_output_tokens=12,
        num_cached_tokens=8,
    )
    batch = await api.openai.batches.retrieve(batch.id)
    assert (batch.in_progress_at, batch.finalizing_at, batch.completed_at) == (now + 1, now + 2, now + 3)
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    assert (batch.output_file_id, batch.error_file_id) == ("file-out", "file-err")
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (30, 12, 42)
    assert batch.usage.input_tokens_details.cached_tokens == 8


async def test_failed_validation_says_where(api: Api) -> None:
    batch = await new_batch(api)
    errors = (BatchError("duplicate_custom_id", "twice", "custom_id", 7), BatchError("empty_file", "nothing in it"))
    api.jobs.change(batch.id, status=BatchStatus.FAILED, errors=errors, failed_unix_s=5.0)
    batch = await api.openai.batches.retrieve(batch.id)
    assert (batch.status, batch.failed_at, batch.errors.object) == ("failed", 5, "list")
    assert [(e.code, e.message, e.param, e.line) for e in batch.errors.data] == [
        ("duplicate_custom_id", "twice", "custom_id", 7),
        ("empty_file", "nothing in it", None, None),
    ]


async def test_pages_of_batches_join_without_gap(api: Api) -> None:
    ids = [(await new_batch(api)).id for _ in range(5)]
    assert [batch.id async for batch in api.openai.batches.list(limit=2)] == ids[::-1]
    assert [batch.id async for batch in api.openai.batches.list(after=ids[3])] == ids[2::-1]
    page = (await api.http.get("/v1/batches?limit=2")).json()
    del page["data"]
    assert page == {"object": "list", "first_id": ids[4], "last_id": ids[3], "has_more": True}
    assert refusal(await api.http.get("/v1/batches?limit=101")) == (400, "invalid_value", "limit")


async def test_cancel_begins_and_is_refused_once_it_ended(api: Api) -> None:
    batch = await new_batch(api)
    batch = await api.openai.batches.cancel(batch.id)
    assert batch.status == "cancelling" and batch.cancelling_at is not None
    api.jobs.change(batch.id, status=BatchStatus.CANCELLED, cancelled_unix_s=9.0)
    with pytest.raises(openai.ConflictError) as caught:
        await api.openai.with_options(max_retries=3).batches.cancel(batch.id)
    assert (caught.value.code, caught.value.type) == ("batch_not_cancellable", "conflict")
    assert caught.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(("fields", "param", "what"), REFUSED)
async def test_bad_body_is_400_that_names_field_and_limit(
    api: Api, fields: dict[str, Any], param: str, what: str
) -> None:
    body = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h", **fields}
    response = await api.post("/v1/batches", body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert what in error["message"]
    assert not api.jobs.new


async def test_input_must_be_a_file_for_batches(api: Api) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await new_batch(api, input_file_id="file-none")
    assert missing.value.code == "file_not_found"
    file = await api.openai.files.create(file=("f", b"x"), purpose="user_data")
    with pytest.raises(openai.BadRequestError) as caught:
        await new_batch(api, input_file_id=file.id)
    assert caught.value.param == "input_file_id"


async def test_callback_goes_with_the_batch_where_it_may(api: Api) -> None:
    for url in ("https://example.com/hook?a=1", "http://hooks.internal:8080/x"):
        batch = await new_batch(api, extra_body={"callback_url": url})
        assert api.jobs.new[batch.id].callback_url == url


async def test_an_idempotency_key_with_another_body_is_409(api: Api) -> None:
    file_id = await new_file(api)
    options = {"input_file_id": file_id, "extra_headers": {"Idempotency-Key": "k-1"}}
    first = await new_batch(api, **options)
    assert (await new_batch(api, **options)).id == first.id
    assert len(api.jobs.new) == 1
    with pytest.raises(openai.ConflictError) as caught:
        await new_batch(api, **options, metadata={"a": "b"})
    assert caught.value.code == "idempotency_key_in_use"


@pytest.mark.parametrize("key", ["", "a b", "k" * 256, "ä"])
async def test_unusable_idempotency_key_is_400(api: Api, key: str) -> None:
    response = await api.http.post("/v1/batches", json={}, headers={b"idempotency-key": key.encode("latin-1")})
    assert refusal(response) == (400, "invalid_value", "idempotency-key")


async def test_batches_of_other_tenants_and_kinds_are_unknown(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "one", "two")})
    one, two = (api.openai.with_options(api_key=name) for name in ("one", "two"))
    window: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await one.batches.create(input_file_id=await new_file(api, one), **window)
    job = await api.post("/v1/jobs", {"model": MODEL, "prompt": "hi"}, authorization="Bearer one")
    asks = [(client, id_) for client, id_ in ((two, batch.id), (one, job.json()["id"]), (one, "batch_none"))]
    for client, batch_id in asks:
        for ask in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(openai.NotFoundError) as caught:
                await ask(batch_id)
            assert caught.value.code == "batch_not_found"
    assert [listed async for listed in two.batches.list()] == []
    with pytest.raises(openai.NotFoundError) as missing:
        await two.batches.create(input_file_id=batch.input_file_id, **window)
    assert missing.value.code == "file_not_found"


async def test_tenant_with_too_much_waiting_is_429_with_retry_after(api: Api) -> None:
    file_id = await new_file(api)
    api.jobs.error = Overloaded("too many batches", 30.0, "max_batches", "rate_limit_exceeded")
    with pytest.raises(openai.RateLimitError) as caught:
        await api.openai.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
    assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("rate_limit_exceeded", "30")
