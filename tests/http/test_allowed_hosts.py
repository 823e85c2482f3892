"""Requests whose `Host` is not in the list are refused, whatever they ask for."""

from __future__ import annotations

import pytest

from tests.http.conftest import MakeApi

ALLOWED = "localhost, 127.0.0.1,[::1],*.Example.com"


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]", True),
        ("[::1]:8000", True),
        ("api.example.com:80", True),
        ("example.com", False),
        ("badexample.com", False),
        ("rebound.test:8000", False),
        ("localhost.rebound.test", False),
        ("127.0.0.1:8000:9", False),
        ("[::1", False),
        ("", False),
    ],
)
async def test_only_listed_hosts_are_answered(make_api: MakeApi, host: str, is_allowed: bool) -> None:
    api = make_api(settings={"allowed_hosts": ALLOWED})
    for path in ("/v1/models", "/health/live", "/nowhere"):
        response = await api.http.get(path, headers={"host": host})
        assert (response.status_code != 403) is is_allowed
        if not is_allowed:
            error = response.json()["error"]
            assert error["code"] == "host_not_allowed" and f"{host!r}" in error["message"]
            assert response.headers["x-request-id"]


async def test_every_host_is_answered_by_default(make_api: MakeApi) -> None:
    assert (await make_api().http.get("/v1/models", headers={"host": "anything.test"})).is_success
