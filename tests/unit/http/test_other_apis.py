"""Each endpoint of other servers is answered, or refused with what to use in its place.

`python -m tests.unit.http.test_other_apis` prints the table.
"""

import re
from pathlib import Path

import pytest

from serve_app.http.other_apis import OTHER_APIS, hint_for
from testkit.http.api import Api, MakeApi

LINES = Path(__file__).with_name("other_endpoints.txt").read_text().splitlines()
ENDPOINTS = [tuple(line.split()) for line in LINES if not line.startswith("#")]
HINTS = {hint for hints in OTHER_APIS.values() for hint in hints.values()}


async def test_an_endpoint_is_answered_or_refused_with_a_hint(make_api: MakeApi) -> None:
    api = make_api(stores_responses=True)
    for method, path in ENDPOINTS:
        response = await api.http.request(method, path)
        if method == "HEAD":
            assert response.status_code == 404, path
            continue
        error = response.json()["error"] if response.status_code in (404, 405) else {}
        code = error.get("code", "unsupported_endpoint" if "not supported by this server" in str(error) else None)
        if code in ("unsupported_endpoint", "not_found", "method_not_allowed"):
            assert (response.status_code, code) == (404, "unsupported_endpoint"), path
            hint = hint_for(path)
            assert hint is not None and error["message"].endswith(f"by this server: {hint}")


def test_many_endpoints_have_their_place() -> None:
    assert len(set(ENDPOINTS)) == len(ENDPOINTS) > 60
    refused = {path for hints in OTHER_APIS.values() for path in hints}
    beginnings = {"/".join(path.split("/")[:end]) for _, path in ENDPOINTS for end in range(2, 9)}
    assert refused - beginnings <= {"/v1/fine-tunes", "/responses", "/batches", "/files", "/models/unload", "/api",
                                    "/get_tokenizer_info"}  # fmt: skip


async def test_what_a_hint_names_exists(make_api: MakeApi) -> None:
    api = make_api(stores_responses=True)
    routes = (await api.http.get("/openapi.json")).json()["paths"]
    for method, path in re.findall(r"\b(GET|POST) (/[\w/{}]+)", "\n".join(HINTS)):
        assert method.lower() in routes[path], path


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/api/chat", "it is Ollama's API; use POST /v1/chat/completions"),
        ("/v1/complete/b", "it is Anthropic's API; use POST /v1/completions"),
        ("/v1/threads/t/runs", "it is OpenAI's API; use POST /v1/responses and POST /v1/conversations"),
        ("/apis", None),
        ("/v1/nowhere", None),
        ("/", None),
    ],
)
def test_a_path_has_the_hint_of_its_longest_beginning(path: str, hint: str | None) -> None:
    assert (hint_for(path) or "").startswith(hint or "") and (hint_for(path) is None) is (hint is None)


async def test_a_stream_is_refused_in_the_same_form(api: Api) -> None:
    body = {"model": "m", "messages": [], "stream": True}
    refused = await api.http.post("/api/chat", json=body)
    assert (refused.status_code, refused.headers["content-type"]) == (404, "application/json")


if __name__ == "__main__":
    for endpoint in ENDPOINTS:
        print(f"{' '.join(endpoint):<42}{hint_for(endpoint[1]) or 'answered'}")
