"""Servers of one user on one machine: each answers its own clients, and none harms another."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from serve_app.cli.serve import is_loopback
from testkit.free_port import free_port
from testkit.limits import LIMIT_S
from testkit.serving.served import LOG, OUTPUT, Served, serving, start

NAMES = ("throughput-a", "default-a", "throughput-b", "default-b")
FORMER_FALLBACK_PORT = 8500
NUM_REQUESTS = 100

pytestmark = pytest.mark.deep


@contextlib.contextmanager
def named(folder: Path, name: str, port: int) -> Iterator[Served]:
    """Serve the demo model by this name, for the user whose home is `folder`."""
    home = folder / name
    home.mkdir(exist_ok=True)
    arguments = f"ARGS=--served-model-name {name} --kv-cache-bytes 64MiB"
    profile = f"PROFILE={name.partition('-')[0]}"
    with serving(home, "MODEL=headway-demo", profile, arguments, port=port, user_home=folder) as served:
        yield served


def models_that_answer(server: Served) -> set[str]:
    """Return the names in the answers to requests on connections of their own, which a shared port would spread."""
    body = {"model": server.home.name, "prompt": "The", "max_tokens": 1}
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(limits=limits, timeout=LIMIT_S, trust_env=False) as http, ThreadPoolExecutor(4) as clients:

        def ask(_: int) -> str:
            return str(http.post(f"{server.url}/v1/completions", json=body).raise_for_status().json()["model"])

        return set(clients.map(ask, range(NUM_REQUESTS)))


def listening_ports(server: Served) -> dict[int, str]:
    """Return the ports at which a server listens, with their addresses."""
    return {
        connection.laddr.port: connection.laddr.ip
        for process in server.descendants()
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def data_dir(server: Served) -> Path:
    """Return the directory in which a server has its log."""
    [line] = [line for line in (server.home / OUTPUT).read_text().splitlines() if line.startswith("  log ")]
    return Path(line.split()[1]).parents[1]


def test_four_servers_answer_for_themselves_and_stop_without_harm(tmp_path: Path) -> None:
    ports = [FORMER_FALLBACK_PORT, *(free_port("127.0.0.1") for _ in NAMES[1:])]
    with contextlib.ExitStack() as everything:
        stacks = {name: everything.enter_context(contextlib.ExitStack()) for name in NAMES}
        servers = {
            name: stacks[name].enter_context(named(tmp_path, name, port))
            for name, port in zip(NAMES, ports, strict=True)
        }
        listening = {name: listening_ports(server) for name, server in servers.items()}
        assert all(map(is_loopback, (address for each in listening.values() for address in each.values())))
        assert len(set().union(*listening.values())) == sum(map(len, listening.values()))
        expected = [tmp_path / ".headway", *(tmp_path / f".headway/servers/127.0.0.1-{port}" for port in ports[1:])]
        assert [data_dir(server) for server in servers.values()] == expected
        for name in NAMES:
            answering = {each: models_that_answer(server) for each, server in servers.items()}
            assert answering == {each: {each} for each in servers}
            stacks[name].close()
            del servers[name]


def test_two_starts_at_one_port_leave_one_server(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    with named(tmp_path, NAMES[0], port) as server:
        second = tmp_path / "second"
        second.mkdir()
        ended = start(second, f"PORT={port}", "MODEL=headway-demo", user_home=tmp_path)
        assert ended.wait(LIMIT_S) != 0
        assert f"error: cannot listen on 127.0.0.1:{port}: " in (second / LOG).read_text()
        assert models_that_answer(server) == {NAMES[0]}
