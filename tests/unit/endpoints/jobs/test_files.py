"""Files: uploaded in a stream, listed, downloaded, deleted; nobody sees another's."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from replicas.errors import NoReplicaAvailable
from serve_app.jobs.api.records import FileRecord
from testkit.http.api import Api, MakeApi, refusal, serving
from testkit.http.scripted_dispatcher import write_keys
from testkit.limits import until

LINES = b'{"custom_id": "a"}\n' * 3
BOUNDARY = "XX"


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


async def send(api: Api, body: bytes, content_type: str = f"multipart/form-data; boundary={BOUNDARY}") -> Any:
    return await api.http.post("/v1/files", content=body, headers={"content-type": content_type})


async def upload(api: Api, content: bytes = LINES, name: str = "in.jsonl", **fields: str) -> httpx.Response:
    return await api.http.post("/v1/files", data={"purpose": "batch", **fields}, files={"file": (name, content)})


async def test_stock_client_uploads_lists_downloads_and_deletes(api: Api, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(LINES)
    file = await api.openai.files.create(file=path, purpose="batch")
    shown = (file.object, file.bytes, file.filename, file.purpose, file.status)
    assert shown == ("file", len(LINES), "requests.jsonl", "batch", "processed")
    assert file.id.startswith("file-")
    assert file.expires_at - file.created_at == 30 * 86_400
    assert await api.openai.files.retrieve(file.id) == file
    assert [listed async for listed in api.openai.files.list()] == [file]
    assert (await api.openai.files.content(file.id)).read() == LINES
    deleted = await api.openai.files.delete(file.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (file.id, "file", True)
    assert not api.jobs.store.files
    with pytest.raises(openai.NotFoundError) as caught:
        await api.openai.files.retrieve(file.id)
    assert caught.value.code == "file_not_found"


async def test_expiry_of_a_file_is_its_uploaders_choice(api: Api) -> None:
    chosen = await api.openai.files.create(
        file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert chosen.expires_at - chosen.created_at == 3600
    assert (await api.openai.files.create(file=("a", b"x"), purpose="user_data")).expires_at is None


async def test_pages_of_files_join_without_gap(api: Api) -> None:
    ids = [(await upload(api, name=f"{i}", purpose="batch" if i % 2 else "user_data")).json()["id"] for i in range(7)]
    newest_first = [file.id async for file in api.openai.files.list(limit=2)]
    assert newest_first == ids[::-1]
    assert [file.id async for file in api.openai.files.list(limit=3, order="asc", purpose="batch")] == ids[1::2]
    page = (await api.http.get("/v1/files", params={"limit": 2, "after": newest_first[1]})).json()
    del page["data"]
    assert page == {"object": "list", "first_id": newest_first[2], "last_id": newest_first[3], "has_more": True}
    empty = (await api.http.get("/v1/files", params={"purpose": "vision"})).json()
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize(
    ("query", "param", "what"),
    [
        ({"limit": "0"}, "limit", "at least 1"),
        ({"limit": "10001"}, "limit", "10001"),
        ({"limit": "many"}, "limit", "many"),
        ({"order": "up"}, "order", "up"),
        ({"colour": "red"}, "colour", "not supported"),
    ],
)
async def test_bad_query_is_400_and_named(api: Api, query: dict[str, str], param: str, what: str) -> None:
    response = await api.http.get("/v1/files", params=query)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert what in error["message"]


async def test_fields_may_stand_before_or_behind_the_file(api: Api) -> None:
    purpose, file = part("purpose", b"batch"), part("file", LINES, "in.jsonl")
    for body in (form(purpose, file), form(file, purpose)):
        response = await send(api, body)
        assert (response.status_code, response.json()["bytes"]) == (200, len(LINES))
        assert api.jobs.store.files[response.json()["id"]] == LINES


async def test_content_that_looks_like_a_boundary_comes_through(api: Api) -> None:
    content = b"\r\n--X\r\n--XY\r\n\r\n--" * 1000 + b"\r\n-"
    body = form(part("purpose", b"batch"), part("file", content, "f"))

    async def pieces(size: int) -> Any:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    for size in (1, 7, 64):
        assert api.jobs.store.files[(await send(api, pieces(size))).json()["id"]] == content


@pytest.mark.parametrize(
    "many",
    [[part("n" * 1000 + str(number), b"") for number in range(66)], [part(f"{number}", b"") for number in range(1024)]],
    ids=["long names", "many"],
)
async def test_fields_count_whatever_their_values(api: Api, many: list[bytes]) -> None:
    response = await send(api, form(*many, part("file", LINES, "f"), part("purpose", b"batch")))
    assert response.status_code == 413 and "the form beside its file" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "what"),
    [
        (form(part("purpose", b"batch")), "file", "missing"),
        (form(part("file", LINES, "f")), "purpose", "missing"),
        (form(part("file", b"", "f"), part("purpose", b"batch")), "file", "empty"),
        (form(part("file", LINES, ""), part("purpose", b"batch")), "file", "name"),
        (form(part("file", LINES, "f" * 513), part("purpose", b"batch")), "file", "513"),
        (form(part("file", LINES, "a\0b"), part("purpose", b"batch")), "file", "printable"),
        (form(part("file", LINES, "f"), part("purpose", b"dinner")), "purpose", "dinner"),
        (form(part("purpose", b"batch"), part("purpose", b"batch"), part("file", LINES, "f")), "purpose", "twice"),
        (form(part("file", LINES, "f"), part("file", LINES, "g"), part("purpose", b"batch")), "file", "more than one"),
        (form(part("data", LINES, "f"), part("purpose", b"batch")), "data", "not supported"),
        (form(part("file", LINES, "f"), part("purpose", b"batch"), part("size", b"5")), "size", "not supported"),
        (
            form(part("file", LINES, "f"), part("purpose", b"batch"), part("expires_after[seconds]", b"3600")),
            "expires_after.anchor",
            "missing",
        ),
        (
            form(
                part("file", LINES, "f"),
                part("purpose", b"batch"),
                part("expires_after[anchor]", b"created_at"),
                part("expires_after[seconds]", b"10"),
            ),
            "expires_after.seconds",
            "3600",
        ),
        (form(part("file", LINES, "f"), part("purpose", b"batch"))[:-8], None, "too early"),
        (form(part("file", LINES, "f"))[:60], None, "too early"),
        (b"no form at all", None, "malformed"),
        (b"", None, "too early"),
    ],
)
async def test_malformed_upload_is_400_and_leaves_nothing(api: Api, body: bytes, param: str | None, what: str) -> None:
    response = await send(api, body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert what in error["message"]
    assert not api.jobs.store.files and not api.jobs.records


async def test_other_content_type_is_415_and_no_boundary_400(api: Api) -> None:
    for content_type in ("application/json", "application/x-www-form-urlencoded"):
        response = await send(api, b"{}", content_type)
        assert response.status_code == 415
        assert "multipart/form-data" in response.json()["error"]["message"]
    for content_type in ("multipart/form-data", f"multipart/form-data; boundary={'x' * 300}"):
        assert (await send(api, b"", content_type)).status_code == 400


async def test_form_beside_the_file_is_bounded(api: Api) -> None:
    body = form(part("purpose", b"x" * 100_000), part("file", LINES, "f"))
    assert refusal(await send(api, body)) == (413, "request_too_large", None)


async def test_file_over_the_limit_is_413_declared_or_not(make_api: MakeApi) -> None:
    api = make_api(job_limits={"max_file_bytes": 1000})
    assert (await upload(api, b"x" * 1000)).status_code == 200
    body = form(part("purpose", b"batch"), part("file", b"x" * 1001, "f"))

    async def pieces() -> Any:
        yield body

    for response in (
        await upload(api, b"x" * 1001),
        await upload(api, b"x" * 100_000),
        await send(api, pieces()),
    ):
        assert refusal(response) == (413, "request_too_large", None)
        assert "the file has more than 1000 bytes" in response.json()["error"]["message"]
    assert len(api.jobs.store.files) == len(api.jobs.records) == 1


async def test_file_reaches_the_store_while_it_is_sent(api: Api) -> None:
    body = form(part("purpose", b"batch"), part("file", b"x" * 300_000, "f"))

    async def pieces() -> Any:
        yield body[:200_000]
        await until(lambda: api.jobs.store.num_written_bytes > 190_000)
        yield body[200_000:]

    assert (await send(api, pieces())).json()["bytes"] == 300_000


async def upload_until(api: Api, body: bytes, receive_next: Callable[[], Awaitable[Any]]) -> int:
    """Return the status of an upload that begins with `body`."""
    begin = [{"type": "http.request", "body": body, "more_body": True}]

    async def receive() -> Any:
        return begin.pop() if begin else await receive_next()

    sent: list[Any] = []

    async def answer(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/files", "raw_path": b"/v1/files", "query_string": b"",
        "root_path": "", "headers": [(b"content-type", f"multipart/form-data; boundary={BOUNDARY}".encode())],
    }  # fmt: skip
    await api.app(scope, receive, answer)
    status: int = sent[0]["status"]
    return status


async def test_client_that_leaves_in_mid_upload_leaves_nothing(api: Api) -> None:
    async def leave() -> Any:
        return {"type": "http.disconnect"}

    body = form(part("purpose", b"batch"), part("file", b"x" * 300_000, "f"))
    assert await upload_until(api, body[:200_000], leave) == 499
    assert api.jobs.store.num_written_bytes > 190_000
    assert not api.jobs.store.files and not api.jobs.records


async def test_upload_that_stalls_is_408(make_api: MakeApi) -> None:
    api = make_api(settings={"upload_timeout_s": 0.02})
    body = form(part("purpose", b"batch"), part("file", LINES, "f"))
    assert await upload_until(api, body[:100], asyncio.Event().wait) == 408
    assert not api.jobs.store.files


async def test_file_whose_record_fails_is_not_kept(api: Api) -> None:
    api.jobs.error = NoReplicaAvailable("the jobs deployment is starting")
    assert (await upload(api)).status_code == 503
    assert not api.jobs.store.files


async def test_file_is_kept_if_only_the_answer_to_its_record_is_lost(api: Api) -> None:
    api.jobs.error, api.jobs.loses_answers = NoReplicaAvailable("the jobs process does not answer"), True
    uploaded = await upload(api)
    assert uploaded.status_code == 200
    content = await api.http.get(f"/v1/files/{uploaded.json()['id']}/content")
    assert content.status_code == 200


async def test_bytes_stay_while_their_record_is_uncertain(api: Api) -> None:
    async def no_answer(tenant: str, file_id: str) -> FileRecord:
        raise NoReplicaAvailable("the jobs process does not answer")

    api.jobs.error, api.jobs.file = NoReplicaAvailable("it died"), no_answer  # type: ignore[method-assign]
    assert (await upload(api)).status_code == 503
    assert len(api.jobs.store.files) == 1


async def test_download_is_streamed_with_its_length(make_api: MakeApi) -> None:
    api = make_api()
    content = bytes(range(256)) * 20_000
    file_id = (await upload(api, content)).json()["id"]
    api.jobs.store.part_bytes = 100_000
    async with serving(api.app) as url, httpx.AsyncClient(base_url=url) as http:
        response = await http.get(f"/v1/files/{file_id}/content")
    shown = (response.headers["content-length"], response.headers["content-type"], response.content)
    assert shown == (str(len(content)), "application/octet-stream", content)


async def test_download_of_lost_bytes_is_404_and_a_half_one_is_cut(make_api: MakeApi) -> None:
    api = make_api()
    file_id = (await upload(api, b"x" * 1000)).json()["id"]
    content = api.jobs.store.files.pop(file_id)
    assert (await api.http.get(f"/v1/files/{file_id}/content")).status_code == 404
    api.jobs.store.files[file_id] = content[:500]
    async with serving(api.app) as url, httpx.AsyncClient(base_url=url) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(f"/v1/files/{file_id}/content")


async def test_leaving_a_download_closes_the_file(make_api: MakeApi) -> None:
    api = make_api()
    file_id = (await upload(api, b"x" * 50_000_000)).json()["id"]
    async with serving(api.app) as url:
        async with httpx.AsyncClient(base_url=url) as http, http.stream("GET", f"/v1/files/{file_id}/content"):
            await until(lambda: api.jobs.store.num_open_reads == 1)
        await until(lambda: api.jobs.store.num_open_reads == 0)


@pytest.mark.parametrize("file_id", ["%00", "a.b", "x" * 300, "file%0a", "%ff"])
async def test_malformed_id_is_never_looked_up(api: Api, file_id: str) -> None:
    api.jobs.records = None  # type: ignore[assignment]
    for method, path in (("GET", f"/v1/files/{file_id}"), ("DELETE", f"/v1/files/{file_id}")):
        response = await api.http.request(method, path)
        assert refusal(response) == (404, "file_not_found", None)
        assert len(response.text) < 300


async def test_file_in_use_cannot_be_deleted(api: Api) -> None:
    file_id = (await upload(api)).json()["id"]
    await api.openai.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")
    response = await api.http.delete(f"/v1/files/{file_id}")
    assert refusal(response) == (409, "file_in_use", None)
    assert response.headers["x-should-retry"] == "false"


async def test_files_of_other_tenants_are_unknown(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "one", "two")})
    one, two = (api.openai.with_options(api_key=name) for name in ("one", "two"))
    file = await one.files.create(file=("f", LINES), purpose="batch")
    for ask in (two.files.retrieve, two.files.content, two.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(file.id)
        assert caught.value.code == "file_not_found"
    assert [listed async for listed in two.files.list()] == []
    assert (await one.files.content(file.id)).read() == LINES
    with pytest.raises(openai.AuthenticationError):
        await api.openai.files.create(file=("f", LINES), purpose="batch")


async def test_uploads_and_downloads_are_counted_in_bytes(api: Api) -> None:
    file_id = (await upload(api, b"x" * 5000)).json()["id"]
    await api.http.get(f"/v1/files/{file_id}/content")
    samples = dict(
        line.rsplit(" ", 1) for line in (await api.http.get("/metrics")).text.splitlines() if not line.startswith("#")
    )
    assert 5000 < float(samples['http_request_size_bytes_sum{handler="/v1/files"}']) < 6000
    assert float(samples['http_response_size_bytes_sum{handler="/v1/files/{file_id}/content"}']) == 5000


async def test_counted_bytes_ignore_the_declared_size(make_api: MakeApi) -> None:
    api = make_api()
    headers = {"content-type": "application/json", "content-length": "999999999999999"}
    assert (await api.http.post("/v1/completions", content=b"{}", headers=headers)).status_code == 413
    assert 'http_request_size_bytes_sum{handler="/v1/completions"} 0.0' in (await api.http.get("/metrics")).text
