"""A private cluster answers its owner and nobody else."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from serve_app.cli.serve import is_loopback
from testkit.limits import LIMIT_S
from testkit.serving.served import ROOT, Served, clean_environment, wait_for

pytestmark = pytest.mark.rotated

_UNARY_CALL = "/ray.serve.ASGIService/HandleRequest"
BIN = Path(sys.executable).parent


def listening_addresses(root: psutil.Process) -> list[tuple[psutil.Process, str, int]]:
    """Every TCP address that a process or one of its descendants listens on."""
    return [
        (process, connection.laddr.ip, connection.laddr.port)
        for process in (root, *root.children(recursive=True))
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def refused_status(port: int) -> grpc.StatusCode:
    """Return the status with which a gRPC server answers a call of Serve's without a token."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(_UNARY_CALL)(b"", timeout=LIMIT_S)
    return raised.value.code()


def check_ports(instance: Served) -> set[str]:
    """Check that every port is on loopback and gRPC demands the token, and return the listening processes."""
    listening = listening_addresses(psutil.Process(instance.process.pid))
    for process, address, port in listening:
        assert is_loopback(address), f"{process.cmdline()} listens on {address}:{port}"
    # gRPC listens on loopback in the form of IPv6, HTTP in that of IPv4. A port of Ray's own does not know the call.
    replicas = {process for process, _, _ in listening if process.cmdline()[0].startswith("ray::ServeReplica")}
    statuses = [refused_status(port) for process, address, port in listening if process in replicas and ":" in address]
    assert set(statuses) <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
    assert statuses.count(grpc.StatusCode.UNAUTHENTICATED) == len(replicas)
    return {process.name() for process, _, _ in listening}


def test_no_port_of_the_default_profile_is_open_to_others(app):
    assert {"gcs_server", "raylet", "ray::ProxyActor"} <= check_ports(app)


def check_edge(url: str) -> None:
    """Headers beyond a limit, WebSockets and Serve's own routes are answered like everything else."""
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    upgrade["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    with httpx.Client(base_url=url, timeout=LIMIT_S, trust_env=False) as http:
        assert http.get("/health/live", headers={f"x-{number}": "1" for number in range(80)}).is_success
        for headers in ({f"x-{number}": "1" for number in range(150)}, {"x-large": "x" * 20_000}):
            refused = http.get("/health/live", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (431, "headers_too_large")
        closed = http.get("/-/routes")
        assert (closed.status_code, closed.json()["error"]["code"]) == (404, "not_found")
        assert http.get("/-/healthz").is_success
        for path in ("/v1/responses", "/v1/realtime?model=x", "/"):
            no_websocket = http.get(path, headers=upgrade)
            assert (no_websocket.status_code, no_websocket.json()["error"]["code"]) == (426, "no_websockets"), path
        for headers, status in ((upgrade, 426), ({f"x-{number}": "1" for number in range(150)}, 431)):
            of_messages = http.get("/v1/messages", headers=headers)
            assert (of_messages.status_code, of_messages.json()["type"]) == (status, "error")


def test_the_edge_of_the_default_profile_answers_in_one_shape(app):
    check_edge(app.url)


def agent_answers(app: Served, name: str, path: str) -> set[int]:
    """Return the statuses with which the ports of one agent answer a call without a token."""
    answers = set()
    for process, _, port in listening_addresses(psutil.Process(app.process.pid)):
        if process.name().startswith(name):
            with contextlib.suppress(httpx.TransportError):  # some speak gRPC
                answers.add(httpx.post(f"http://127.0.0.1:{port}{path}", json={}, timeout=5.0).status_code)
    return answers


def test_http_without_the_token_is_refused(app):
    job = {"entrypoint": "id"}
    assert httpx.post(f"{app.dashboard_url}/api/jobs/", json=job, timeout=LIMIT_S).status_code == 401
    for path in ("/api/jobs/", "/api/serve/applications/", "/nodes?view=summary", "/api/v0/actors"):
        assert httpx.get(f"{app.dashboard_url}{path}", timeout=LIMIT_S).status_code == 401
    # The dashboard's agent answers over HTTP for the metrics exporter alone, which takes no POST.
    assert agent_answers(app, "ray::DashboardAgent", "/api/job_agent/jobs/") <= {401, 404, 405}
    assert agent_answers(app, "ray::RuntimeEnvAgent", "/get_or_create_runtime_env") == {401}


@pytest.mark.deep
def test_a_driver_without_the_token_is_refused(app, tmp_path):
    reach = {name: value for name, value in app.ray_environment.items() if "AUTH" not in name}
    limits = {"RAY_gcs_server_request_timeout_seconds": "3", "RAY_gcs_rpc_server_connect_timeout_s": "3"}
    driver = subprocess.run(
        [sys.executable, "-c", "import os, ray; ray.init(address=os.environ['RAY_ADDRESS'])"],
        env={**clean_environment(tmp_path), **reach, **limits, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert driver.returncode != 0
    assert "nauthenticated" in driver.stderr or "uthentication" in driver.stderr


def test_rays_commands_work_with_the_environment_that_is_printed(app, tmp_path):
    environment = {**clean_environment(tmp_path), **app.ray_environment, "PATH": f"{BIN}:{os.environ['PATH']}"}
    for command, expected in (("ray status", "Resources"), ("ray job list", "RUNNING"), ("serve status", "RUNNING")):
        done = subprocess.run(
            command.split(), env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout + done.stderr


def test_secrets_are_closed_to_other_users(app, http):
    token = Path(app.ray_environment["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700
    data = app.home / ".headway"
    assert data.stat().st_mode & 0o777 == 0o700
    upload = {"file": ("lines.jsonl", b"{}")}
    file = http.post("/v1/files", data={"purpose": "batch"}, files=upload).json()
    uploaded = wait_for(lambda: list(data.rglob(file["id"])), "the upload is stored")
    for path in (*data.glob("jobs.sqlite3*"), *uploaded):
        assert path.stat().st_mode & 0o777 == 0o600, path
    http.delete(f"/v1/files/{file['id']}")


def test_a_foreign_host_header_is_refused_on_loopback(app, http):
    refused = http.get("/v1/models", headers={"host": "rebound.example:8000"})
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "host_not_allowed"
    port = httpx.URL(app.url).port
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert http.get("/v1/models", headers={"host": host}).is_success
