"""Ports of a server: the address that clients use, and a block of ports for everything else."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
_BLOCK_SIZE = 200
_BLOCKS = range(20_000, 30_000, _BLOCK_SIZE)
"""First ports of the blocks. They are below the ephemeral ports of Linux, macOS and Windows, and above those of Ray's
workers, 10,002 to 19,999."""
_NUM_GRPC_PORTS = 20


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port at which a server listens for clients."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PortBlock:
    """Consecutive ports that one server uses and no other server of this machine.

    1. A block begins at a multiple of its size, so two blocks are the same or have no port in common.
    2. The first port is the guard. The process that drew the block has bound it, and nothing listens on it. Nobody else
       can bind it, so nobody else draws the block.
    3. Every other port was free when the block was drawn, and has one use.
    """

    guard: int

    @property
    def dashboard(self) -> int:
        """Port of Ray's dashboard."""
        return self.guard + 1

    @property
    def fallback_http(self) -> int:
        """Port of the HTTP proxy to which HAProxy falls back."""
        return self.guard + 2

    @property
    def fallback_grpc(self) -> int:
        """Port of the same proxy for gRPC, which Headway does not enable."""
        return self.guard + 3

    @property
    def haproxy_stats(self) -> int:
        """Port of HAProxy's statistics."""
        return self.guard + 4

    @property
    def haproxy_metrics(self) -> int:
        """Port of HAProxy's metrics."""
        return self.guard + 5

    @property
    def agents(self) -> range:
        """Ports of the agents of Ray's node."""
        return range(self.guard + 6, self.guard + 10)

    @property
    def ingress_grpc(self) -> range:
        """Ports of the ingresses for gRPC, which Headway does not enable."""
        return range(self.agents.stop, self.agents.stop + _NUM_GRPC_PORTS)

    @property
    def ingress_http(self) -> range:
        """Ports of the ingresses behind HAProxy. Serve uses the port of an ended ingress again only after minutes."""
        return range(self.ingress_grpc.stop, self.guard + _BLOCK_SIZE)


@contextlib.contextmanager
def port_block(rng: random.Random) -> Iterator[PortBlock]:
    """Draw a block of ports, and guard it within the context.

    Raises:
        OSError: there is no free block.
    """
    for first in rng.sample(_BLOCKS, len(_BLOCKS)):
        with socket.socket() as guard:
            if _can_bind(guard, first) and all(map(_is_free, range(first + 1, first + _BLOCK_SIZE))):
                yield PortBlock(first)
                return
    raise OSError(f"there are no {_BLOCK_SIZE} free ports in a row from {_BLOCKS.start} to {_BLOCKS.stop - 1}")


@contextlib.contextmanager
def reserved(address: Address) -> Iterator[None]:
    """Keep other servers from an address within the context, and in processes that are forked in it.

    On Linux a socket is bound to it alone, so that a second server cannot bind. It does not listen. Then SO_REUSEPORT
    lets the proxies of the same user bind and listen beside it. On other systems the address is only checked.

    Raises:
        OSError: another process has the address, or it is not of this machine.
    """
    with _bound_alone(address) as reservation:
        if sys.platform == "linux":
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        else:
            reservation.close()
        yield


def _bound_alone(address: Address) -> socket.socket:
    """Return a socket that is bound to an address at which nobody listens.

    The last connections of an ended server keep its port for a minute, save from sockets with SO_REUSEADDR. The first
    attempt is without: kernels may remember that all sockets of a port were bound with it, and then let others in.
    """
    probe = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    try:
        with contextlib.suppress(OSError):
            probe.bind((address.host, address.port))
            return probe
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address.host, address.port))
    except BaseException:
        probe.close()
        raise
    return probe


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _can_bind(probe, port)


def _can_bind(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("", port))
    except OSError:
        return False
    return True
