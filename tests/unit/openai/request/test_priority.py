"""Bands, deadlines and tenants of requests, from their bodies, headers and keys."""

import json
from pathlib import Path

import httpx2
import openai
import pytest

from replicas.protocol import Band, GenerateRequest
from serve_app.keys.key_file import digest_of
from testkit.http.api import MODEL, Api, MakeApi

HELLO = [{"role": "user", "content": "hello"}]


def last(api: Api) -> GenerateRequest:
    return api.replica.started[-1]


def allowed_s(api: Api) -> float | None:
    """Seconds from the arrival of the last request to its deadline."""
    request = last(api)
    if request.deadline_unix_s is None:
        return None
    assert request.arrival_unix_s is not None
    return round(request.deadline_unix_s - request.arrival_unix_s, 3)


@pytest.mark.parametrize(
    ("fields", "headers", "band"),
    [
        ({}, {}, Band.STANDARD),
        ({"priority": 0}, {}, Band.INTERACTIVE),
        ({"priority": 2}, {"x_headway_priority": "interactive"}, Band.BATCH),
        ({}, {"x_headway_priority": "0"}, Band.INTERACTIVE),
        ({}, {"x_headway_priority": "Batch"}, Band.BATCH),
        ({"service_tier": "auto"}, {"x_headway_priority": "batch"}, Band.BATCH),
        ({"service_tier": "priority"}, {}, Band.INTERACTIVE),
        ({"service_tier": "fast"}, {}, Band.INTERACTIVE),
        ({"service_tier": "flex"}, {}, Band.BATCH),
        ({"service_tier": "scale"}, {}, Band.STANDARD),
        ({"service_tier": "default"}, {}, Band.STANDARD),
    ],
)
async def test_band_comes_from_priority_then_header_then_tier(
    api: Api, fields: dict[str, object], headers: dict[str, str], band: Band
) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1, **fields}
    response = await api.post("/v1/completions", body, **headers)
    assert last(api).band is band
    assert response.json()["service_tier"] == ["priority", "default", "flex"][band]


async def test_stream_names_the_tier_used(api: Api) -> None:
    response = await api.chat(stream=True, service_tier="flex", max_tokens=1)
    assert json.loads(response.text.split("\n\n")[0].removeprefix("data: "))["service_tier"] == "flex"


@pytest.mark.parametrize(
    ("tenant", "ceiling", "band", "tier"),
    [
        ("acme", "", Band.STANDARD, "default"),
        ("bulk", "ceiling: batch", Band.BATCH, "flex"),
        ("anonymous", "ceiling: interactive", Band.INTERACTIVE, "priority"),
    ],
)
async def test_key_decides_the_tenant_and_the_most_urgent_band(
    make_api: MakeApi, tmp_path: Path, tenant: str, ceiling: str, band: Band, tier: str
) -> None:
    """The body's `user` is of no account with a key, not even with one whose tenant is named `anonymous`."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{digest_of('k')}: {{tenant: {tenant}, {ceiling}}}\n")
    api = make_api(settings={"api_key_file": str(keys)})
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1, "priority": 0, "user": "someone"}
    response = await api.post("/v1/completions", body, authorization="Bearer k")
    assert (last(api).tenant, last(api).band, response.json()["service_tier"]) == (tenant, band, tier)


@pytest.mark.parametrize(
    ("fields", "tenant"),
    [
        ({}, "anonymous"),
        ({"user": "u"}, "u"),
        ({"safety_identifier": "s"}, "s"),
        ({"user": "", "metadata": {}}, "anonymous"),
    ],
)
async def test_anonymous_clients_are_separate_tenants_by_user(api: Api, fields: dict[str, object], tenant: str) -> None:
    await api.complete(max_tokens=1, **fields)
    assert last(api).tenant == tenant


@pytest.mark.parametrize(
    ("fields", "headers", "expected_s"),
    [
        ({}, {}, None),
        ({"deadline_ms": 1500}, {}, 1.5),
        ({}, {"request_timeout_ms": "2500"}, 2.5),
        ({}, {"x_stainless_read_timeout": "12.5"}, 12.5),
        ({}, {"x_stainless_read_timeout": "600"}, None),
        ({}, {"x_stainless_read_timeout": "600.0"}, None),
        ({}, {"x_stainless_read_timeout": "inf"}, None),
        ({}, {"x_stainless_timeout": "12"}, 12.0),
        ({}, {"x_stainless_timeout": "0"}, None),
        ({}, {"x_stainless_timeout": "600"}, None),
        ({"deadline_ms": 9000}, {"request_timeout_ms": "4000", "x_stainless_timeout": "12"}, 4.0),
        ({"stream": True}, {"x_stainless_read_timeout": "12.5"}, None),
        ({"stream": True}, {"x_stainless_timeout": "12"}, None),
        ({"stream": True, "deadline_ms": 1500}, {"x_stainless_read_timeout": "1"}, 1.5),
        ({"stream": True}, {"request_timeout_ms": "2500"}, 2.5),
    ],
)
async def test_the_earliest_named_deadline_counts(
    api: Api, fields: dict[str, object], headers: dict[str, str], expected_s: float | None
) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1, **fields}
    assert (await api.post("/v1/completions", body, **headers)).status_code == 200
    assert allowed_s(api) == expected_s


async def test_time_out_of_the_stock_client_is_understood(api: Api) -> None:
    await api.openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert allowed_s(api) is None
    timeout = httpx2.Timeout(30.0, read=7.5)
    await api.openai.with_options(timeout=timeout).chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert allowed_s(api) == 7.5
    await api.openai.with_options(timeout=9).completions.create(model=MODEL, prompt="hi", max_tokens=1)
    assert allowed_s(api) == 9


@pytest.mark.parametrize(
    ("header", "value"),
    [("x-headway-priority", "urgent"), ("request-timeout-ms", "soon"), ("x-stainless-timeout", "-1")],
)
async def test_bad_header_is_a_400_that_names_it(api: Api, header: str, value: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.openai.completions.create(model=MODEL, prompt="hi", extra_headers={header: value})
    assert caught.value.param == header
