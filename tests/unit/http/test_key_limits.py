"""Limits of API keys over HTTP: refusals, headers, and the end of a request."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.keys.key_file import digest_of
from testkit.http.api import MODEL, Api, MakeApi, refusal

MakeLimited = Callable[..., Api]


@pytest.fixture
def make_limited(make_api: MakeApi, tmp_path: Path) -> MakeLimited:
    """Return a factory of applications whose one key has the given limits."""

    def make(**limits: int) -> Api:
        path = tmp_path / "keys.yaml"
        lines = [
            f"{digest_of('secret')}:",
            "  tenant: acme",
            *(f"  {name}: {limit}" for name, limit in limits.items()),
        ]
        path.write_text("\n".join(lines))
        return make_api(settings={"api_key_file": str(path)})

    return make


async def complete(api: Api, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return await api.post(path, {"model": MODEL, "prompt": "the quick", **fields}, authorization="Bearer secret")


async def test_a_key_out_of_requests_is_refused_with_its_limit(make_limited: MakeLimited) -> None:
    api = make_limited(requests_per_minute=2)
    first, _, third = [await complete(api) for _ in range(3)]
    assert (first.headers["x-ratelimit-limit-requests"], first.headers["x-ratelimit-remaining-requests"]) == ("2", "1")
    assert first.headers["x-ratelimit-limit-tokens"] == "1000", "the band's, since the key has no limit of tokens"
    assert refusal(third) == (429, "rate_limit_exceeded", None)
    assert "requests_per_minute, 2" in third.json()["error"]["message"]
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(third.headers["retry-after"]) <= 30
    assert len(api.replica.started) == 2


async def test_prompt_and_output_use_up_the_tokens_of_a_minute(make_limited: MakeLimited) -> None:
    api = make_limited(tokens_per_minute=10)
    streamed = await complete(api, stream=True, max_tokens=16)
    assert streamed.status_code == 200 and streamed.headers["x-ratelimit-limit-tokens"] == "10"
    assert refusal(await complete(api)) == (429, "rate_limit_exceeded", None)


async def test_a_request_that_ended_counts_no_longer_as_open(make_limited: MakeLimited) -> None:
    api = make_limited(max_concurrent_requests=1)
    invalid = await complete(api, temperature=9)
    statuses = [(await complete(api, stream=is_streamed)).status_code for is_streamed in (True, False, True)]
    assert (invalid.status_code, statuses) == (400, [200] * 3)


async def test_a_second_request_exceeds_a_concurrency_of_one(make_limited: MakeLimited) -> None:
    api = make_limited(max_concurrent_requests=1)
    answers = await asyncio.gather(complete(api), complete(api))
    assert sorted(answer.status_code for answer in answers) == [200, 429]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_more_output_than_a_key_may_ask_for_is_an_error(make_limited: MakeLimited, path: str) -> None:
    api = make_limited(max_tokens=8)
    prompt = {"messages": [{"role": "user", "content": "hi"}], "prompt": None} if "chat" in path else {}
    body = {name: value for name, value in {"prompt": "hi", **prompt}.items() if value is not None}
    refused = await api.post(path, {"model": MODEL, **body, "max_tokens": 9}, authorization="Bearer secret")
    assert refusal(refused) == (400, "invalid_value", "max_tokens")
    assert "`max_tokens` is 9; the max_tokens of this API key is 8" in refused.json()["error"]["message"]
    await api.post(path, {"model": MODEL, **body}, authorization="Bearer secret")
    assert api.replica.started[0].params.max_tokens == 8, "the default of a request that names none"


async def test_other_routes_are_not_limited(make_limited: MakeLimited) -> None:
    api = make_limited(requests_per_minute=1)
    await complete(api)
    assert (await api.http.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200


async def test_prompt_batches_are_counted_too(make_limited: MakeLimited) -> None:
    api = make_limited(tokens_per_minute=10)
    body = {"prompts": ["the quick", "hello"], "max_tokens": 16}
    assert (await api.post("/v1/batch/sync", body, authorization="Bearer secret")).status_code == 200
    assert refusal(await api.post("/v1/batch/sync", body, authorization="Bearer secret"))[0] == 429
