"""The `x-ratelimit-*` headers; a refusal is counted once."""

from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replicas.errors import Overloaded
from replicas.protocol import Band
from router.types import Headroom
from serve_app.http.exchange_middleware import duration_text
from testkit.http.api import MODEL, Api, MakeApi

HEADROOMS = {
    Band.INTERACTIVE: Headroom(5, 5, 100, 40, wait_s=0.02),
    Band.STANDARD: Headroom(1024, 24, 4_000_000, 1500, wait_s=360.0),
    Band.BATCH: Headroom(9, 2, 900, 100, wait_s=None),
}


def rate_limits(headers: Any) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {name.lower().removeprefix(prefix): headers[name] for name in headers if name.lower().startswith(prefix)}


def limited(make_api: MakeApi, **replica: Any) -> Api:
    return make_api(dispatcher={"headrooms": HEADROOMS}, **replica)


STANDARD = {
    "limit-requests": "1024",
    "limit-tokens": "4000000",
    "remaining-requests": "1000",
    "remaining-tokens": "3998500",
    "reset-requests": "6m0s",
    "reset-tokens": "6m0s",
}


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_answers_have_the_rate_limits_of_their_band(make_api: MakeApi, fields: dict[str, Any]) -> None:
    api = limited(make_api)
    for response in (await api.complete(**fields), await api.chat(**fields)):
        assert response.status_code == 200
        assert rate_limits(response.headers) == STANDARD


async def test_the_headers_are_of_the_band_the_request_ran_in(make_api: MakeApi) -> None:
    api = limited(make_api)
    urgent = rate_limits((await api.complete(priority=0)).headers)
    assert (urgent["limit-requests"], urgent["remaining-requests"], urgent["reset-tokens"]) == ("5", "0", "20ms")
    batch = rate_limits((await api.complete(service_tier="flex")).headers)
    assert batch["remaining-tokens"] == "800"
    assert not [name for name in batch if name.startswith("reset")], "nobody knows when"


async def test_the_stock_client_reads_the_rate_limit_headers(make_api: MakeApi) -> None:
    api = limited(make_api)
    raw = await api.openai.completions.with_raw_response.create(model=MODEL, prompt="the quick", max_tokens=2)
    assert rate_limits(raw.headers) == STANDARD
    assert raw.parse().choices


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_refusals_have_rate_limit_headers_too(make_api: MakeApi, fields: dict[str, Any]) -> None:
    api = limited(make_api, fail_at=0, error=Overloaded("full"))
    with pytest.raises(openai.RateLimitError) as refusal:
        await api.openai.completions.create(model=MODEL, prompt="the quick", **fields)
    assert rate_limits(refusal.value.response.headers) == STANDARD


async def test_requests_without_a_band_have_no_rate_limit_headers(make_api: MakeApi) -> None:
    api = limited(make_api)
    for response in (await api.complete(temperature=9), await api.http.get("/v1/models")):
        assert rate_limits(response.headers) == {}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.0004, "1ms"), (0.02, "20ms"), (0.9991, "1s"), (1, "1s"), (1.1, "1.1s"), (8.64, "8.64s"),
        (59.999, "59.999s"), (59.9999, "1m0s"), (360, "6m0s"), (61.2, "1m2s"), (3600, "1h0m0s"), (3723.5, "1h2m4s"),
    ],
)  # fmt: skip
def test_durations_are_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


async def refusals(api: Api) -> dict[str, float]:
    page = (await api.http.get("/metrics")).text
    return {
        sample.labels["reason"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "vllm:admission_rejections_total" and sample.labels["model_name"] == MODEL
    }


NONE = {
    "max_num_queued_reqs": 0,
    "max_num_queued_tokens": 0,
    "max_tenant_queued_reqs": 0,
    "max_tenant_queued_tokens": 0,
    "max_predicted_wait": 0,
    "deadline": 0,
    "key_requests_per_minute": 0,
    "key_tokens_per_minute": 0,
    "key_max_concurrent_requests": 0,
}


@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"stream": True}, {"stream": True, "n": 4}])
@pytest.mark.parametrize("reason", ["max_num_queued_reqs", "max_tenant_queued_reqs"])
async def test_a_refusal_that_a_client_sees_counts_once(make_api: MakeApi, fields: dict[str, Any], reason: str) -> None:
    api = make_api(fail_at=0, error=Overloaded("full", reason=reason))
    assert await refusals(api) == NONE
    assert (await api.complete(**fields)).status_code == 429
    assert await refusals(api) == {**NONE, reason: 1}


async def test_a_refusal_after_the_status_counts_too(make_api: MakeApi) -> None:
    api = make_api(fail_at=2, error=Overloaded("full", reason="max_num_queued_tokens"))
    assert (await api.complete(stream=True)).status_code == 200
    assert await refusals(api) == {**NONE, "max_num_queued_tokens": 1}


async def test_other_failures_are_no_refusals(make_api: MakeApi) -> None:
    api = make_api(fail_at=0)
    assert (await api.complete()).status_code == 500
    assert (await api.complete(temperature=9)).status_code == 400
    assert await refusals(api) == NONE
