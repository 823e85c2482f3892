"""A killed part of Serve or Ray: what clients see, and how the server comes back or ends."""

import time
from collections.abc import Iterator

import httpx
import pytest

from testkit.limits import LIMIT_S
from testkit.serving.served import LOG, Served, serving, wait_for

pytestmark = pytest.mark.deep


@pytest.fixture
def own_app(checkpoint, tmp_path) -> Iterator[Served]:
    with serving(tmp_path, f"MODEL={checkpoint}", "ARGS=kv_cache_bytes=64MiB") as instance:
        yield instance


def kill(app: Served, command: str) -> None:
    process = app.find(command)
    assert process is not None, command
    process.kill()
    process.wait(LIMIT_S)


def answers_until_well(app: Served) -> list[httpx.Response]:
    """Ask until a request is served; return the errors before, without refused connections."""
    errors: list[httpx.Response] = []
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            answer = httpx.get(f"{app.url}/v1/models", timeout=LIMIT_S, trust_env=False)
        except httpx.TransportError:
            time.sleep(0.02)
            continue
        if answer.is_success:
            return errors
        errors.append(answer)
    raise TimeoutError("the server does not come back")


def test_a_killed_proxy_or_ingress_is_replaced(own_app):
    for command in ("ray::ProxyActor", "ray::ServeReplica:headway:Ingress"):
        kill(own_app, command)
        for error in answers_until_well(own_app):
            assert error.status_code in (502, 503) and error.json()["error"]["code"], error.text


@pytest.mark.parametrize("daemon", ["raylet", "gcs_server"])
def test_an_ended_daemon_of_ray_ends_the_server_with_its_name(own_app, daemon):
    [process] = [child for child in own_app.descendants() if child.name() == daemon]
    process.kill()
    assert own_app.process.wait(LIMIT_S) != 0
    said = wait_for(lambda: (own_app.home / LOG).read_text(), "the error is told")
    assert f"Ray's {daemon} (process {process.pid}) has ended" in said
