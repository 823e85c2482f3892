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

PAGES = ("/", "/docs", "/openapi.json", "/version")
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
    assert not keyed & {*PAGES, "/health", "/health/live", "/health/ready"}
    assert {"/v1/models", "/metrics", "/load"} <= keyed if with_keys else not keyed


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_a_page_loads_nothing_from_elsewhere(api: Api, path: str) -> None:
    response = await api.http.get(path, headers={"accept": "text/html,*/*;q=0.8"})
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "<script" not in response.text and "src=" not in response.text
    assert all(link.startswith(("/", "#")) for link in re.findall('href="([^"]*)"', response.text))


async def test_links_of_the_reference_lead_to_its_parts(api: Api) -> None:
    text = (await api.http.get("/docs")).text
    targets = re.findall('id="([^"]*)"', text)
    assert len(set(targets)) == len(targets)
    assert set(re.findall('href="#([^"]*)"', text)) <= set(targets)
    for route in routes_in(await document_of(api)):
        assert route.replace(" ", "") in targets


async def test_the_first_page_leads_to_pages_that_answer(api: Api) -> None:
    welcome = (await api.http.get("/")).json()
    assert (welcome["name"], welcome["model"]) == ("headway", MODEL)
    page = (await api.http.get("/", headers={"accept": "text/html"})).text
    assert MODEL in page
    for path in welcome["links"].values():
        assert (await api.http.get(path)).status_code == 200
        assert f'href="{path}"' in page


async def test_a_model_name_is_text_in_the_page(make_api: MakeApi) -> None:
    api = make_api(settings={"served_model_name": "<b>'&"})
    page = (await api.http.get("/", headers={"accept": "text/html"})).text
    assert "<b>" not in page and "&lt;b&gt;" in page


async def test_the_version_is_that_of_server_and_engine(api: Api) -> None:
    reply = (await api.http.get("/version")).json()
    assert reply["version"] == reply["engine"]["version"]
    assert (await document_of(api))["info"]["version"] == reply["version"]


async def test_docs_api_names_every_route_header_and_code(api: Api) -> None:
    page, routes = API_PAGE.read_text(), routes_in(await document_of(api))
    assert set(re.findall("`((?:GET|POST|DELETE) /[^`]*)`", page.partition("## Bodies")[0])) == routes
    text = page.lower()
    codes = {code for words in FAILURES.values() for code in re.findall("`([a-z_]+)`", words)}
    for name in [*REQUEST_HEADERS, *ANSWER_HEADERS, *codes]:
        assert f"`{name.lower()}`" in text, f"{name} is missing"
