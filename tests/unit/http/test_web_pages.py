"""Web pages of other origins: allowed ones read every answer, others read none and change nothing."""

from pathlib import Path

import httpx
import pytest

from serve_app.http.settings import AllowedOrigins
from testkit.http.api import MODEL, Api, MakeApi, refusal
from testkit.http.scripted_dispatcher import write_keys

PAGE = "http://localhost:3000"
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 2}


async def preflight(api: Api, origin: str, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    return await api.http.options(path, headers=asked | headers)


@pytest.mark.parametrize(
    ("allowed", "origin", "is_allowed"),
    [
        ("loopback", "http://localhost", True),
        ("loopback", "https://localhost:5173", True),
        ("loopback", "http://127.0.0.1:3000", True),
        ("loopback", "http://[::1]:3000", True),
        ("loopback", "http://app.localhost:3000", True),
        ("loopback", "http://localhost.evil.test", False),
        ("loopback", "http://evil.test:3000", False),
        ("loopback", "http://evil-localhost", False),
        ("loopback", "null", False),
        ("https://a.test, http://b.test:81", "https://a.test", True),
        ("https://a.test, http://b.test:81", "http://b.test:81", True),
        ("https://a.test, http://b.test:81", "http://a.test", False),
        ("https://a.test, http://b.test:81", "http://localhost", False),
        ("loopback,HTTPS://A.test", "https://a.test", True),
        ("null", "null", True),
        ("*", "https://anything.test", True),
        ("", "http://localhost", False),
        (None, "http://localhost", False),
    ],
)
async def test_only_pages_of_allowed_origins_read_answers(
    make_api: MakeApi, allowed: str | None, origin: str, is_allowed: bool
) -> None:
    api = make_api(settings={"allowed_origins": allowed})
    assert AllowedOrigins.parse(allowed).allows(origin) is is_allowed
    shown = ("*" if allowed == "*" else origin) if is_allowed else None
    for response in (await preflight(api, origin), await api.http.get("/v1/models", headers={"origin": origin})):
        assert response.headers.get("access-control-allow-origin") == shown
    assert (await preflight(api, origin)).is_success is is_allowed


async def test_refused_preflight_says_why(api: Api) -> None:
    response = await preflight(api, "https://evil.test")
    assert refusal(response) == (403, "origin_not_allowed", None)
    assert "'https://evil.test'" in response.json()["error"]["message"]


async def test_preflight_needs_no_key_and_allows_what_was_asked(make_api: MakeApi, tmp_path: Path) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "acme")})
    response = await preflight(api, PAGE, **{"access-control-request-private-network": "true"})
    assert response.status_code == 200
    assert "x-stainless-os" in response.headers["access-control-allow-headers"]
    assert {"DELETE", "GET", "POST"} <= set(response.headers["access-control-allow-methods"].split(", "))
    assert response.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere", "/v1/models"])
async def test_page_reads_errors_and_their_headers(make_api: MakeApi, tmp_path: Path, path: str) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "acme")})
    response = await api.http.post(path, json=BODY, headers={"origin": PAGE})
    assert response.status_code in (401, 404, 405)
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["access-control-expose-headers"] == "*"


async def test_page_reads_streams_and_failures_of_the_server(make_api: MakeApi) -> None:
    for api in (make_api(), make_api(fail_at=0, error=ZeroDivisionError())):
        response = await api.http.post("/v1/completions", json=BODY | {"stream": True}, headers={"origin": PAGE})
        assert response.status_code in (200, 500)
        assert response.headers["access-control-allow-origin"] == PAGE


async def test_other_clients_get_no_cors_headers(api: Api) -> None:
    response = await api.http.get("/v1/models")
    assert not [name for name in response.headers if name.startswith("access-control")]


async def upload(api: Api, **headers: str) -> httpx.Response:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    form = {"file": ("a.txt", b"some text")}
    return await api.http.post("/v1/files", files=form, data={"purpose": "user_data"}, headers=headers)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_foreign_page_cannot_upload_without_asking(api: Api, site: str) -> None:
    refused = await upload(api, origin="https://evil.test", sec_fetch_site=site)
    assert refusal(refused) == (403, "origin_not_allowed", None)
    assert refusal(await upload(api, sec_fetch_site=site)) == (403, "origin_not_allowed", None)
    assert not api.jobs.store.files
    assert (await upload(api, origin=PAGE, sec_fetch_site=site)).status_code == 200


async def test_page_of_this_server_may_write_behind_any_proxy(make_api: MakeApi) -> None:
    api = make_api(settings={"allowed_origins": None})
    assert (await upload(api, origin="https://api.test", sec_fetch_site="same-origin")).status_code == 200


async def test_wrong_host_is_refused_to_pages_of_allowed_origins_too(make_api: MakeApi) -> None:
    api = make_api(settings={"allowed_hosts": "localhost"})
    response = await api.http.get("/v1/models", headers={"host": "rebound.test", "origin": PAGE})
    assert refusal(response) == (403, "host_not_allowed", None)


@pytest.mark.parametrize("entry", ["a.test", "https://a.test/", "https://*.a.test", "https://", "everything"])
async def test_setting_that_is_no_origin_is_refused_at_start(make_api: MakeApi, entry: str) -> None:
    with pytest.raises(ValueError, match="allowed_origins has `"):
        make_api(settings={"allowed_origins": f"loopback,{entry}"})
