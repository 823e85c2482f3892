"""Ports for servers in tests and experiments."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(30_000, 32_768)
"""Ports below the ephemeral ones, of which Ray's processes take many, and above the blocks of `headway serve`."""


def free_port(host: str) -> int:
    """Return a TCP port on which no process listens."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                return port
    raise OSError(f"no free port on {host} from {_PORTS[0]} to {_PORTS[-1]}")
