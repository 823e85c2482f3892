"""Description of the API: it covers every route, is valid, and its pages load nothing from elsewhere."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from serve_app.reference.words import ANSWER_HEADERS, FAILURES, REQUEST_HEADERS
from testkit.http.api import MODEL, Api, MakeApi
from testkit.http.scripted_dispatcher import write_keys

OPEN = ("/", "/docs", "/dashboard", "/openapi.json", "/version", "/pages/{name}")
PAGES = ("/", "/dashboard", "/docs")
BROWSER = {"accept": "text/html,*/*;q=0.8"}
MAX_CHAT_BYTES = 40_000
ENDLESS = "/dashboard/events"
"""Path of a stream without an end, for which the client in this process would wait."""
API_PAGE = Path(__file__).resolve().parents[3] / "docs" / "api.md"


async def document_of(api: Api) -> dict[str, Any]:
    document: dict[str, Any] = (await api.http.get("/openapi.json")).json()
    return document


def routes_in(document: dict[str, Any]) -> set[str]:
    return {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}


@pytest.mark.parametrize("has_jobs", [True, False])
async def test_every_route_is_described_and_no_other(make_api: MakeApi, has_jobs: bool) -> None:
    api = make_api(has_jobs=has_jobs)
    served = {f"{method} {route.path_format}" for route in api.app.routes for method in route.methods}
    document = await document_of(api)
    assert routes_in(document) == served
    assert has_jobs == ("/v1/jobs" in document["paths"])
    assert all(operation["summary"] for methods in document["paths"].values() for operation in methods.values())


async def test_schemas_are_valid_and_every_reference_has_a_target(api: Api) -> None:
    document = await document_of(api)
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for reference in set(re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document))):
        target = document
        for part in reference.split("/"):
            target = target[part]


@pytest.mark.parametrize("with_keys", [True, False])
async def test_a_key_is_required_where_the_document_says(make_api: MakeApi, tmp_path: Path, with_keys: bool) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "acme")} if with_keys else {})
    document = await document_of(api)
    keyed = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if with_keys or path != ENDLESS:
                response = await api.http.request(method, re.sub("{.*}", "x", path))
                assert (response.status_code == 401) == bool(operation["security"]), path
            keyed |= {path} if operation["security"] else set()
    assert not keyed & {*OPEN, "/health", "/health/live", "/health/ready"}
    assert {"/v1/models", "/metrics", "/load"} <= keyed if with_keys else not keyed


async def files_of(api: Api, path: str) -> dict[str, str]:
    """Return the text of a page, and those of its scripts and styles, by their paths."""
    page = (await api.http.get(path, headers=BROWSER)).text
    loaded = re.findall(r'<(?:script src|link rel="stylesheet" href)="([^"]+)"', page)
    return {path: page} | {each: (await api.http.get(each)).text for each in loaded}


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_needs_no_key_and_loads_nothing_from_elsewhere(
    make_api: MakeApi, tmp_path: Path, path: str
) -> None:
    api = make_api(settings={"api_key_file": write_keys(tmp_path, "acme")})
    texts = await files_of(api, path)
    for each, text in texts.items():
        response = await api.http.get(each, headers=BROWSER)
        assert response.status_code == 200
        assert "default-src 'none'; script-src 'self'" in response.headers["content-security-policy"]
        assert "innerHTML" not in text and "onclick" not in text and " style=" not in text
        assert "<script>" not in text and 'src="http' not in text and "url(" not in text
    page = re.sub("<pre.*?</pre>", "", texts[path], flags=re.DOTALL)
    assert all(link.startswith(("/", "#", "data:,")) for link in re.findall('(?:href|src)="([^"]*)"', page))
    assert {'href="/"', 'href="/dashboard"', 'href="/docs"'} <= set(re.findall('href="[^"]*"', page))


@pytest.mark.parametrize("path", PAGES)
async def test_every_element_that_a_script_uses_is_on_its_page(api: Api, path: str) -> None:
    texts = await files_of(api, path)
    used = {name for text in texts.values() for name in re.findall(r'\$\("([\w-]+)"\)', text)}
    assert used <= set(re.findall(r'id="([\w-]+)"', texts[path]))


async def test_the_chat_page_is_small(api: Api) -> None:
    texts = await files_of(api, "/")
    assert len(texts) == 6
    assert sum(len(text.encode()) for text in texts.values()) < MAX_CHAT_BYTES


@pytest.mark.parametrize("name", ["chat.html", "unknown.js", "..%2Fapp.py", "."])
async def test_no_other_file_is_served(api: Api, name: str) -> None:
    assert (await api.http.get(f"/pages/{name}")).status_code == 404


async def test_the_address_of_rays_dashboard_is_told_where_it_is_known(make_api: MakeApi) -> None:
    for url in (None, "http://127.0.0.1:8265"):
        api = make_api(settings={"ray_dashboard_url": url})
        assert (await api.http.get("/")).json()["ray_dashboard"] == url


async def test_links_of_the_reference_lead_to_its_parts(api: Api) -> None:
    text = (await api.http.get("/docs")).text
    targets = re.findall('id="([^"]*)"', text)
    assert len(set(targets)) == len(targets)
    assert set(re.findall('href="#([^"]*)"', text)) <= set(targets)
    for route in routes_in(await document_of(api)):
        assert route.replace(" ", "") in targets


async def test_the_first_answer_leads_to_pages_that_answer(api: Api) -> None:
    welcome = (await api.http.get("/")).json()
    assert (welcome["name"], welcome["model"]) == ("headway", MODEL)
    docs = (await api.http.get("/docs")).text
    for path in welcome["links"].values():
        assert (await api.http.get(path)).status_code == 200
        assert f'id="GET{path}"' in docs


async def test_the_version_is_that_of_server_and_engine(api: Api) -> None:
    reply = (await api.http.get("/version")).json()
    assert reply["version"] == reply["engine"]["version"]
    assert (await document_of(api))["info"]["version"] == reply["version"]


async def test_docs_api_names_every_route_header_and_code(make_api: MakeApi) -> None:
    page, routes = API_PAGE.read_text(), routes_in(await document_of(make_api(stores_responses=True)))
    assert set(re.findall("`((?:GET|POST|DELETE) /[^`]*)`", page.partition("## Bodies")[0])) == routes
    text = page.lower()
    codes = {code for words in FAILURES.values() for code in re.findall("`([a-z_]+)`", words)}
    for name in [*REQUEST_HEADERS, *ANSWER_HEADERS, *codes]:
        assert f"`{name.lower()}`" in text, f"{name} is missing"
