"""HEAD, OPTIONS and trailing slashes on every route."""

import httpx
import pytest

from testkit.http.api import MODEL, Api, MakeApi, serving


async def upload(api: Api) -> str:
    sent = await api.http.post("/v1/files", files={"file": ("a.txt", b"some text")}, data={"purpose": "user_data"})
    return str(sent.json()["id"])


async def test_head_is_get_without_the_body(api: Api) -> None:
    file = f"/v1/files/{await upload(api)}"
    paths = ["/health", "/v1/models", f"/v1/models/{MODEL}", "/load", "/v1/files", file, f"{file}/content", "/nowhere"]
    async with serving(api.app) as url, httpx.AsyncClient(base_url=url) as http:
        for path in paths:
            got, head = await http.get(path), await http.head(path)
            assert (head.status_code, head.content) == (got.status_code, b"")
            for name in ("content-type", "content-length"):
                assert head.headers[name] == got.headers[name]


async def test_head_of_a_file_reads_only_its_start(api: Api) -> None:
    file_id, api.jobs.store.part_bytes = await upload(api), 4
    await api.http.head(f"/v1/files/{file_id}/content")
    assert (api.jobs.store.num_read_bytes, api.jobs.store.num_open_reads) == (4, 0)


async def test_head_is_counted_as_head(api: Api) -> None:
    await api.http.head("/v1/models")
    page = (await api.http.get("/metrics")).text
    assert 'http_requests_total{handler="/v1/models",method="HEAD",status="2xx"} 1.0' in page
    assert 'http_response_size_bytes_sum{handler="/v1/models"} 0.0' in page


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/chat/completions", "OPTIONS, POST"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/files/file-1/", "DELETE, GET, HEAD, OPTIONS"),
        ("/v1/batches", "GET, HEAD, OPTIONS, POST"),
    ],
)
async def test_options_names_the_methods_of_a_path(api: Api, path: str, allowed: str) -> None:
    response = await api.http.options(path)
    assert (response.status_code, response.headers["allow"], response.content) == (204, allowed, b"")


async def test_options_of_an_unknown_path_is_404(api: Api) -> None:
    assert (await api.http.options("/nowhere")).status_code == 404


async def test_trailing_slash_changes_nothing(api: Api) -> None:
    answer = await api.post("/v1/completions/", {"model": MODEL, "prompt": "hi", "max_tokens": 1})
    assert answer.json()["usage"]["completion_tokens"] == 1
    file_id = await upload(api)
    for path in ("/health/", "/v1/models/", f"/v1/models/{MODEL}/", f"/v1/files/{file_id}/", "/v1/files/?limit=1"):
        assert (await api.http.get(path)).status_code == 200
    content = await api.http.get(f"/v1/files/{file_id}/content/")
    assert content.text == "some text"


async def test_encoded_slash_belongs_to_the_id(make_api: MakeApi) -> None:
    api = make_api(settings={"served_model_name": "org/tiny"})
    for path in ("/v1/models/org%2Ftiny", "/v1/models/org%2Ftiny/"):
        assert (await api.http.get(path)).json()["id"] == "org/tiny"
    for path in ("/v1/models/org%2Ftiny%2F", "/v1/files/file-1%2F"):
        assert (await api.http.get(path)).status_code == 404
