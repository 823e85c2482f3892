"""API keys, key files that are refused at start-up, and the hosts that are answered."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from replicas.protocol import Band
from serve_app.keys.authenticator import ANONYMOUS, Authenticator, Principal
from serve_app.keys.key_file import digest_of
from serve_app.openai.request.validation import RequestLimits
from testkit.http.api import MODEL, MakeApi, operations_of, refusal
from testkit.limits import LIMIT_S

OPEN = {"/", "/docs", "/openapi.json", "/version", "/health", "/health/live", "/health/ready"}
OPEN |= {"/dashboard", "/pages/{name}"}


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.yaml"
    path.write_text(f"{digest_of('secret')}:\n  tenant: acme\n  ceiling: interactive\n")
    return str(path)


async def test_stock_client_with_the_key_gets_in(make_api: MakeApi, key_file: str) -> None:
    api = make_api(settings={"api_key_file": key_file})
    await api.openai.completions.create(model=MODEL, prompt="hi", extra_body={"priority": 0})
    assert (api.replica.started[0].tenant, api.replica.started[0].band) == ("acme", Band.INTERACTIVE)
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
    assert refusal(response) == (401, "invalid_api_key", None)
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert response.json()["error"]["type"] == "authentication_error"


async def test_missing_key_is_reported_before_a_malformed_header(make_api: MakeApi, key_file: str) -> None:
    api = make_api(settings={"api_key_file": key_file})
    malformed = {"idempotency-key": "two words", "x-headway-priority": "soon", "request-timeout-ms": "-"}
    malformed |= {"content-type": "text/plain", "content-length": "x", "x-stainless-timeout": "-"}
    for operation in operations_of(api.app):
        if operation.path not in OPEN:
            path = re.sub("[{}]", "", operation.plain_path)
            response = await api.http.request(operation.method, path, headers=malformed)
            given = (response.status_code, response.json()["error"]["type"])
            assert given == (401, "authentication_error"), path


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
async def test_probes_need_no_key(make_api: MakeApi, key_file: str, path: str) -> None:
    assert (await make_api(settings={"api_key_file": key_file}).http.get(path)).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/load", "/load/"])
async def test_all_tenants_load_is_shown_to_operators_alone(make_api: MakeApi, key_file: str, path: str) -> None:
    with Path(key_file).open("a") as file:
        file.write(f"{digest_of('watch')}:\n  tenant: ops\n  operator: true\n")
    api = make_api(settings={"api_key_file": key_file})
    assert refusal(await api.http.get(path)) == (401, "invalid_api_key", None)
    tenants = await api.http.get(path, headers={"authorization": "Bearer secret"})
    assert refusal(tenants) == (403, "operator_key_required", None)
    assert (await api.http.get(path, headers={"authorization": "Bearer watch"})).status_code == 200


async def test_replicas_are_drained_by_operators_alone(make_api: MakeApi, key_file: str) -> None:
    with Path(key_file).open("a") as file:
        file.write(f"{digest_of('watch')}:\n  tenant: ops\n  operator: true\n")
    api = make_api(settings={"api_key_file": key_file})
    path, operator = "/v1/replicas/replica-a/drain", {"authorization": "Bearer watch"}
    tenants = await api.http.post(path, headers={"authorization": "Bearer secret"})
    assert refusal(tenants) == (403, "operator_key_required", None) and not api.dispatcher.drained
    assert (await api.http.post(path, headers=operator)).json() == {"replica_id": "replica-a", "status": "draining"}
    assert api.dispatcher.drained == ["replica-a"]
    unknown = await api.http.post("/v1/replicas/nobody/drain", headers=operator)
    assert refusal(unknown) == (404, "replica_not_found", "replica_id")


async def test_a_model_in_a_directory_does_not_show_its_path(make_api: MakeApi) -> None:
    api = make_api()
    card = (await api.http.get("/v1/models")).json()["data"][0]
    assert card["root"] == MODEL and str(Path.home()) not in str(card) and "/" not in card["root"]


async def test_a_revoked_key_is_refused_while_the_server_runs(make_api: MakeApi, key_file: str) -> None:
    api = make_api(settings={"api_key_file": key_file})
    headers = {"authorization": "Bearer secret"}
    assert (await api.http.get("/v1/models", headers=headers)).status_code == 200
    Path(key_file).write_text("{}")
    async with asyncio.timeout(LIMIT_S):
        while (await api.http.get("/v1/models", headers=headers)).status_code != 401:
            await asyncio.sleep(0.05)


def test_the_key_file_may_be_json(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(f'{{"{digest_of("k")}": {{"tenant": "acme", "ceiling": "batch"}}}}')
    authenticator = Authenticator(path, time.monotonic)
    assert authenticator.authenticate({"authorization": "bearer k"}) == Principal("acme", Band.BATCH, digest_of("k"))


def test_without_a_file_everybody_is_anonymous() -> None:
    assert Authenticator(None, time.monotonic).authenticate({"authorization": "Bearer whatever"}) == ANONYMOUS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping"),
        ("- a", "expected a mapping"),
        ("a: [", "is not YAML"),
        ("secret: {tenant: a}", "not a SHA-256 digest"),
        (f"{'a' * 64}: {{}}", "no `tenant`"),
        (f"{'a' * 64}: acme", "no `tenant`"),
        (f"{'a' * 64}: {{tenant: a, ceiling: king}}", "must be a band"),
        (f"{'a' * 64}: {{tenant: a, celing: batch}}", "celing"),
        (f"{'a' * 64}: {{tenant: a, operator: 1}}", "must be true or false"),
    ],
)
def test_bad_key_file_is_refused_at_start(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Authenticator(path, time.monotonic)


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


async def test_tenants_share_no_prefix_cache_unless_the_scope_is_shared(make_api: MakeApi, tmp_path: Path) -> None:
    keys = tmp_path / "two.yaml"
    keys.write_text("".join(f"{digest_of(name)}:\n  tenant: {name}\n" for name in ("one", "two")))

    async def salts(**settings: Any) -> list[str | None]:
        api = make_api(settings={"api_key_file": str(keys), **settings})
        for key, own in (("one", None), ("two", None), ("two", "s"), ("two", "s")):
            client = api.openai.with_options(api_key=key)
            await client.completions.create(model=MODEL, prompt="hi", extra_body={"cache_salt": own})
        return [request.cache_salt for request in api.replica.started]

    one, two, own, again = await salts()
    assert len({one, two, own}) == 3 and own == again and None not in (one, two, own)
    one, two, own, again = await salts(limits=RequestLimits(prefix_cache_scope="shared"))
    assert one is two is None and own == again is not None
