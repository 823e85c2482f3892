"""API keys: who gets in, and which key files are refused at start-up."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from replicas.protocol import Band
from serve_app.auth import ANONYMOUS, Authenticator, Principal
from testkit.http.api import MODEL, MakeApi
from testkit.http.scripted_dispatcher import key_digest


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.yaml"
    path.write_text(f"{key_digest('secret')}:\n  tenant: acme\n  ceiling: interactive\n")
    return str(path)


async def test_stock_client_with_the_key_gets_in(make_api: MakeApi, key_file: str) -> None:
    api = make_api(settings={"api_key_file": key_file})
    await api.openai.completions.create(model=MODEL, prompt="hi", extra_body={"priority": 0})
    assert api.replica.started[0].tenant == "acme"
    assert api.replica.started[0].band is Band.INTERACTIVE
    with pytest.raises(openai.AuthenticationError) as caught:
        await api.openai.with_options(api_key="wrong").completions.create(model=MODEL, prompt="hi")
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ],
)
@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer ", "Basic c2VjcmV0", "secret"])
async def test_without_a_key_nothing_is_served(
    make_api: MakeApi, key_file: str, method: str, path: str, authorization: str | None
) -> None:
    api = make_api(settings={"api_key_file": key_file})
    headers = {} if authorization is None else {"authorization": authorization}
    response = await api.http.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/metrics", "/load"])
async def test_operators_need_no_key(make_api: MakeApi, key_file: str, path: str) -> None:
    api = make_api(settings={"api_key_file": key_file})
    assert (await api.http.get(path)).status_code == 200


def test_json_is_yaml_too(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(f'{{"{key_digest("k")}": {{"tenant": "acme", "ceiling": "batch"}}}}')
    authenticator = Authenticator.from_file(str(path))
    assert authenticator.authenticate({"authorization": "bearer k"}) == Principal("acme", Band.BATCH)


def test_without_a_file_everybody_is_anonymous() -> None:
    assert Authenticator.from_file(None).authenticate({"authorization": "Bearer whatever"}) == ANONYMOUS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping"),
        ("- a", "expected a mapping"),
        ("secret: {tenant: a}", "not a SHA-256 digest"),
        (f"{'a' * 64}: {{}}", "no `tenant`"),
        (f"{'a' * 64}: acme", "no `tenant`"),
        (f"{'a' * 64}: {{tenant: a, ceiling: king}}", "must be a band"),
        (f"{'a' * 64}: {{tenant: a, celing: batch}}", "celing"),
    ],
)
def test_bad_key_file_is_refused_at_start(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Authenticator.from_file(str(path))
