"""Request ids, timing headers and log lines."""

import json
import logging
from typing import Any

import pytest

from replicas.errors import ReplicaLost
from testkit.http.api import MODEL, Api, MakeApi


async def test_every_response_has_an_id_and_a_time(make_api: MakeApi) -> None:
    api = make_api()
    responses = [
        await api.complete(),
        await api.complete(stream=True),
        await api.complete(temperature=9),
        await api.http.get("/nowhere"),
        await api.http.get("/v1/completions"),
        await api.http.get("/metrics"),
    ]
    assert len({response.headers["x-request-id"] for response in responses}) == len(responses)
    assert all(int(response.headers["openai-processing-ms"]) >= 0 for response in responses)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_toy_model_says_so_in_every_completion(make_api: MakeApi, stream: bool) -> None:
    toy, real = make_api(settings={"is_toy_model": True}), make_api()
    for _ in range(2):
        response = await toy.complete(stream=stream)
        assert response.headers["x-headway-toy-model"] == f"{MODEL} is for tests; serve another model"
    assert "x-headway-toy-model" not in (await real.complete(stream=stream)).headers
    assert "x-headway-toy-model" not in (await toy.http.get("/health")).headers


@pytest.mark.parametrize("stream", [False, True])
async def test_id_of_the_client_is_kept(api: Api, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "hi", "stream": stream}
    for _ in range(2):
        response = await api.post("/v1/completions", body, x_request_id="mine-1")
        assert response.headers["x-request-id"] == "mine-1"
    # A client may repeat its id. The engine's requests still need distinct ids.
    assert len({request.request_id for request in api.replica.started}) == 2


@pytest.mark.parametrize("given", ["", "x" * 129, "h\u00e9"])
async def test_unusable_id_is_replaced(api: Api, given: str) -> None:
    response = await api.http.get("/health", headers={b"x-request-id": given.encode("latin-1")})
    assert response.headers["x-request-id"] != given
    assert len(response.headers["x-request-id"]) == 32


async def test_server_that_announces_the_id_does_it_alone(make_api: MakeApi) -> None:
    api = make_api(settings={"server_sets_request_id": True})
    assert "x-request-id" not in (await api.http.get("/health", headers={"x-request-id": "mine-1"})).headers
    assert "x-request-id" in (await api.http.get("/health", headers={"x-request-id": "x" * 200})).headers


async def test_stock_client_finds_the_id(api: Api) -> None:
    answer = await api.openai.completions.create(model=MODEL, prompt="hi", extra_headers={"x-request-id": "mine-2"})
    assert answer._request_id == "mine-2"


@pytest.mark.parametrize("stream", [False, True])
async def test_replica_is_named(api: Api, stream: bool) -> None:
    assert (await api.complete(stream=stream)).headers["x-model-replica"] == "replica-a"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the fields of each line that not every log record has."""
    plain = logging.makeLogRecord({}).__dict__
    return [
        {"message": record.message} | {key: value for key, value in record.__dict__.items() if key not in plain}
        for record in caplog.records
        if record.name.startswith("serve_app")
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_line_at_the_start_and_one_at_the_end(
    make_api: MakeApi, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    api = make_api(cached_tokens=1)
    body = {"model": MODEL, "prompt": "a very private matter", "n": 2, "max_tokens": 3, "stream": stream}
    with caplog.at_level(logging.INFO, "serve_app"):
        await api.post("/v1/completions", body, x_request_id="mine-3")
    start, end = lines(caplog)
    assert (start["message"], end["message"]) == ("request started", "request finished")
    assert start["request_id"] == end["request_id"] == "mine-3"
    expected = {
        "path": "/v1/completions",
        "http_method": "POST",
        "status": 200,
        "stream": stream,
        "band": "standard",
        "tenant": "anonymous",
        "num_sequences": 2,
        "finish_reasons": ["length", "length"],
        "prompt_tokens": len(api.replica.started[0].prompt_token_ids),
        "completion_tokens": 6,
        "cached_tokens": 1,
        "replica_id": "replica-a",
        "error_code": None,
    }
    assert {key: end[key] for key in expected} == expected
    assert 0 <= end["headers_after_s"] <= end["duration_s"]
    assert end["response_bytes"] > 0
    assert "private" not in json.dumps([start, end])


async def test_end_of_a_failed_request_says_why(make_api: MakeApi, caplog: pytest.LogCaptureFixture) -> None:
    api = make_api(fail_at=1, error=ReplicaLost("gone"))
    with caplog.at_level(logging.INFO, "serve_app"):
        for fields in ({}, {"stream": True}, {"temperature": 9}):
            await api.complete(**fields)
    ends = [line for line in lines(caplog) if line["message"] == "request finished"]
    assert [(line["status"], line["error_code"]) for line in ends] == [
        (502, "replica_lost"),
        (200, "replica_lost"),
        (400, "invalid_value"),
    ]


async def test_polling_is_not_logged(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "serve_app"):
        for path in ("/health", "/health/live", "/health/ready", "/metrics", "/load"):
            await api.http.get(path)
    assert lines(caplog) == []


async def test_a_failed_receive_counts_as_a_disconnect(api: Api) -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise RuntimeError("the call that receives was cancelled")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"10")],
    }  # fmt: skip
    await api.app(scope, receive, send)
    assert all(message.get("status", 499) == 499 for message in sent)
    assert not api.replica.running
