"""The error object everywhere, with the status, code and headers that clients act on."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest

from replicas.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    NoReplicaAvailable,
    Overloaded,
    ReplicaLost,
    RequestAborted,
    RequestQuarantined,
    SequenceFailed,
    ServingError,
)
from replicas.protocol import TokenDelta
from testkit.http.api import MODEL, Api, MakeApi, events, refusal


class RemoteError(Exception):
    """Error like Ray's: raised as a generated subclass of the cause, whose text is a traceback."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause
        self.args = (cause,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cause, name)

    def __str__(self) -> str:
        return f"Traceback (most recent call last): secret path\n{self.cause}"


def as_raised_by_ray(cause: ServingError) -> Exception:
    kind = type(f"RayTaskError({type(cause).__name__})", (RemoteError, type(cause)), {})
    error: Exception = kind(cause)
    return error


CASES = [
    (InvalidRequest("bad", "stop"), 400, "invalid_request_error", "invalid_value", {}),
    (
        Overloaded("full", retry_after_s=2.3),
        429,
        "rate_limit_error",
        "server_overloaded",
        {"retry-after": "3", "retry-after-ms": "2300"},
    ),
    (Overloaded("full", retry_after_s=500), 429, "rate_limit_error", "server_overloaded", {"retry-after": "60"}),
    (RequestAborted("cancelled"), 499, "invalid_request_error", "request_aborted", {}),
    (SequenceFailed("nan"), 500, "server_error", "internal_error", {"x-should-retry": "false"}),
    (
        RequestQuarantined("3 replicas died"),
        500,
        "server_error",
        "request_quarantined",
        {"x-should-retry": "false"},
    ),
    (EngineDead("dead"), 500, "server_error", "engine_dead", {}),
    (ReplicaLost("lost"), 502, "server_error", "replica_lost", {}),
    (
        NoReplicaAvailable("none", code="draining", retry_after_s=0.2),
        503,
        "service_unavailable_error",
        "draining",
        {"retry-after": "1"},
    ),
    (DeadlineExceeded("late"), 504, "timeout_error", "deadline_exceeded", {"x-should-retry": "false"}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("error", "status", "kind", "code", "headers"), CASES)
async def test_early_failure_has_its_own_status(
    make_api: MakeApi,
    error: ServingError,
    status: int,
    kind: str,
    code: str,
    headers: dict[str, str],
    wrapped: bool,
    stream: bool,
) -> None:
    api = make_api(fail_at=0, error=as_raised_by_ray(error) if wrapped else error)
    response = await api.complete(stream=stream)
    assert response.status_code == status
    param = error.param if isinstance(error, InvalidRequest) else None
    assert response.json() == {"error": {"message": error.message, "type": kind, "param": param, "code": code}}
    assert headers.items() <= dict(response.headers).items()
    for name in ("retry-after", "x-should-retry"):
        assert (name in response.headers) == (name in headers)


async def test_stock_client_does_not_send_a_quarantined_request_again(make_api: MakeApi) -> None:
    api = make_api(fail_at=0, error=RequestQuarantined("3 replicas died"))
    with pytest.raises(openai.InternalServerError) as caught:
        await api.openai.with_options(max_retries=3).completions.create(model=MODEL, prompt="hi")
    assert caught.value.code == "request_quarantined"
    assert len(api.replica.started) == 1


@pytest.mark.parametrize("wrapped", [False, True])
async def test_late_failure_is_one_event_and_no_done(make_api: MakeApi, wrapped: bool) -> None:
    error = ReplicaLost("the replica died")
    api = make_api(fail_at=2, error=as_raised_by_ray(error) if wrapped else error)
    response = await api.complete(stream=True)
    assert response.status_code == 200
    *_, last_chunk, failure = events(response.text)
    assert "error" not in json.loads(last_chunk)
    assert json.loads(failure)["error"]["code"] == "replica_lost"
    assert "[DONE]" not in response.text


async def test_stock_client_raises_on_a_late_failure(make_api: MakeApi) -> None:
    api = make_api(fail_at=2, error=EngineDead("the engine died"))
    texts: list[str] = []

    async def read() -> None:
        async for chunk in await api.openai.completions.create(model=MODEL, prompt="hi", stream=True):
            texts.append(chunk.choices[0].text)  # noqa: PERF401 - what came before the failure is what counts

    with pytest.raises(openai.APIError, match="the engine died"):
        await read()
    assert texts == ["hello", " "]


@pytest.mark.parametrize("stream", [False, True])
async def test_unforeseen_error_names_only_the_request_id(
    make_api: MakeApi, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    api = make_api(fail_at=0, error=ZeroDivisionError("secret detail"))
    with caplog.at_level(logging.ERROR, "serve_app"):
        response = await api.post(
            "/v1/completions", {"model": MODEL, "prompt": "hi", "stream": stream}, x_request_id="r-7"
        )
    assert refusal(response) == (500, "internal_error", None)
    error = response.json()["error"]
    assert error["type"] == "server_error"
    assert "r-7" in error["message"] and "secret" not in response.text
    assert "secret detail" in caplog.text
    assert [record.__dict__["request_id"] for record in caplog.records] == ["r-7"]


async def test_failure_of_the_framework_itself_is_answered(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> None:
        raise ZeroDivisionError("secret detail")

    api.dispatcher.model_card = broken  # type: ignore[assignment]
    response = await api.http.get("/v1/models")
    assert refusal(response) == (500, "internal_error", None)
    assert "x-request-id" in response.headers


async def test_stream_without_a_last_delta_is_an_error(make_api: MakeApi) -> None:
    api = make_api()
    api.dispatcher.streams = lambda requests, timelines=(): [_nothing() for _ in requests]  # type: ignore[method-assign]
    for stream in (False, True):
        assert (await api.complete(stream=stream)).status_code == 500


async def _nothing() -> AsyncGenerator[TokenDelta, None]:
    deltas: list[TokenDelta] = []
    for delta in deltas:
        yield delta


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/images", 404, "unsupported_endpoint"),
        ("GET", "/v1/responses/resp_1", 404, "unsupported_endpoint"),
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("GET", "/redoc", 404, "not_found"),
        ("POST", "/v1/completions//", 404, "unsupported_endpoint"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/org/other", 404, "model_not_found"),
    ],
)
async def test_unknown_route_is_404_with_the_error_object(
    api: Api, method: str, path: str, status: int, code: str
) -> None:
    response = await api.http.request(method, path)
    assert refusal(response)[:2] == (status, code)
    assert response.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "OPTIONS, POST"),
        ("HEAD", "/v1/completions", "OPTIONS, POST"),
        ("POST", "/metrics", "GET, HEAD, OPTIONS"),
        ("PUT", "/v1/files/file-1", "DELETE, GET, HEAD, OPTIONS"),
    ],
)
async def test_wrong_method_names_the_right_ones(api: Api, method: str, path: str, allowed: str) -> None:
    response = await api.http.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    if method != "HEAD":
        assert refusal(response) == (405, "method_not_allowed", None)
        assert f"does not accept {method}; it accepts {allowed}" in response.json()["error"]["message"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_other_media_type_is_415(api: Api, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = await api.http.post("/v1/completions", content=b"{}", headers=headers)
    assert (response.status_code, response.json()["error"]["type"]) == (415, "invalid_request_error")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"\xff", b'{"model": NaN}', b'{"prompt": "\\ud800"}', b"[" * 100_000, b'"text"', b"null"],
)
async def test_bad_json_is_400(api: Api, body: bytes) -> None:
    response = await api.http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json; charset=utf-8"}
    )
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "JSON" in response.json()["error"]["message"]


async def test_large_body_is_413_declared_or_not(make_api: MakeApi) -> None:
    api = make_api(settings={"max_body_bytes": 1000})
    headers = {"content-type": "application/json"}
    declared = await api.http.post("/v1/completions", content=b"x" * 1001, headers=headers)

    async def parts() -> Any:
        for _ in range(11):
            yield b"x" * 100

    undeclared = await api.http.post("/v1/completions", content=parts(), headers=headers)
    for response in (declared, undeclared):
        assert refusal(response) == (413, "request_too_large", None)
        assert "1000 bytes" in response.json()["error"]["message"]
    assert (await api.http.post("/v1/completions", content=b"x" * 1000, headers=headers)).status_code == 400


async def test_slow_upload_is_408_and_not_retried(make_api: MakeApi) -> None:
    api = make_api(settings={"upload_timeout_s": 0.01})

    async def receive() -> Any:
        await asyncio.Event().wait()

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
    }
    await api.app(scope, receive, send)
    assert sent[0]["status"] == 408
    assert (b"x-should-retry", b"false") in sent[0]["headers"]


async def test_no_replica_is_503_before_anything_is_tokenized(make_api: MakeApi) -> None:
    api = make_api(dispatcher={"error": NoReplicaAvailable("the model is loading", code="model_loading")})
    response = await api.complete()
    assert refusal(response) == (503, "model_loading", None)
    assert response.headers["retry-after"] == "5"
