"""A server's ports are its own: the address that it was given, and a block that no other server uses."""

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from serve_app.cli.server.ports import LOOPBACK, Address, PortBlock, port_block, reserved
from testkit.free_port import free_port
from testkit.limits import LIMIT_S

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems only check the address")


@contextlib.contextmanager
def listening(port: int, *options: int) -> Iterator[socket.socket]:
    """Listen like a server with these socket options."""
    with socket.socket() as server:
        for option in options:
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind((LOOPBACK, port))
        server.listen()
        yield server


def can_reserve(address: Address) -> bool:
    with contextlib.suppress(OSError), reserved(address):
        return True
    return False


def ports_of(block: PortBlock) -> list[int]:
    single = (block.guard, block.dashboard, block.fallback_http, block.fallback_grpc)
    return [
        *single,
        block.haproxy_stats,
        block.haproxy_metrics,
        *block.agents,
        *block.ingress_grpc,
        *block.ingress_http,
    ]


def test_each_port_of_a_block_has_one_use() -> None:
    with port_block(random.Random(0)) as block:
        ports = ports_of(block)
        assert ports == list(range(block.guard, block.guard + len(ports)))
        assert len(block.ingress_http) >= 100


def test_servers_with_the_same_luck_have_blocks_without_a_common_port() -> None:
    with contextlib.ExitStack() as stack:
        blocks = [stack.enter_context(port_block(random.Random(0))) for _ in range(4)]
    ports = [port for block in blocks for port in ports_of(block)]
    assert len(set(ports)) == len(ports)


def test_a_block_is_guarded_until_its_server_ends() -> None:
    with port_block(random.Random(0)) as block, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError):
            other.bind((LOOPBACK, block.guard))
    with port_block(random.Random(0)) as again:
        assert again == block


def test_a_block_with_a_taken_port_is_not_drawn() -> None:
    with port_block(random.Random(0)) as first:
        taken = first.ingress_http[-1]
    with listening(taken, socket.SO_REUSEPORT), port_block(random.Random(0)) as second:
        assert taken not in ports_of(second)


@linux_only
def test_an_address_is_one_servers_before_anybody_listens() -> None:
    address = Address(LOOPBACK, free_port(LOOPBACK))
    with reserved(address):
        assert not can_reserve(address)
        assert not can_reserve(Address("0.0.0.0", address.port))
    assert can_reserve(address)


@linux_only
@pytest.mark.parametrize("options", [(socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)])
def test_the_proxies_of_the_server_listen_at_its_address(options: tuple[int, ...]) -> None:
    address = Address(LOOPBACK, free_port(LOOPBACK))
    with reserved(address), listening(address.port, *options) as proxy, listening(address.port, *options):
        assert not can_reserve(address)
        proxy.close()  # a second one answers, as while a proxy is replaced
        socket.create_connection((address.host, address.port), LIMIT_S).close()


@linux_only
def test_connections_of_an_ended_server_do_not_keep_its_address() -> None:
    address = Address(LOOPBACK, free_port(LOOPBACK))
    with reserved(address), listening(address.port, socket.SO_REUSEADDR, socket.SO_REUSEPORT) as proxy:
        client = socket.create_connection((address.host, address.port))
        proxy.accept()[0].close()  # the server closes first, so its side waits
        assert client.recv(1) == b""
        client.close()
    with reserved(address):
        assert not can_reserve(address)


def test_a_foreign_address_cannot_be_reserved() -> None:
    assert not can_reserve(Address("192.0.2.1", 8000))


@linux_only
def test_a_forked_process_keeps_the_address_and_a_program_does_not() -> None:
    address = Address(LOOPBACK, free_port(LOOPBACK))
    with reserved(address):
        program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        reading, writing = os.pipe()
        child_id = os.fork()
        if child_id == 0:
            os.close(writing)
            os.read(reading, 1)  # returns when the parent closes its end
            os._exit(0)
    assert not can_reserve(address)
    os.close(writing)
    os.waitpid(child_id, 0)
    assert can_reserve(address)
    program.communicate(timeout=LIMIT_S)
    os.close(reading)


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80")])
def test_an_address_reads_as_in_a_url(host: str, expected: str) -> None:
    assert str(Address(host, 80)) == expected
