"""HAProxy's ports: each is the server's own, and only the clients' one leaves loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import Template
from ray.serve._private.haproxy import HAProxyConfig
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE
from ray.serve.config import HTTPOptions

from serve_app.cli.server.haproxy import config_edits, haproxy_environment
from serve_app.cli.server.ports import LOOPBACK, Address, PortBlock
from testkit.limits import LIMIT_S

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
    environment = haproxy_environment(tmp_path, Address("127.0.0.1", 8500), BLOCK, 1024)
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
