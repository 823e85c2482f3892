"""Address of the gRPC server that Serve starts in each replica, for calls from other deployments.

Ray Serve 2.60 opens it on all addresses and has no setting for it. On a private cluster, where every node is on
loopback, nobody else has to reach it.
"""

from __future__ import annotations

import ipaddress
from typing import Any

import ray
from ray.serve._private import replica as serve_replica


def listen_on_loopback() -> None:
    """Have Serve open the gRPC server of this process on the node's address, if that is a loopback address.

    Call it in the constructor of a deployment: Serve opens the server after it.

    Raises:
        AttributeError: Serve no longer opens its server through the function that is replaced here.
    """
    address = ray.util.get_node_ip_address()
    if ipaddress.ip_address(address).is_loopback:
        serve_replica.add_port_to_grpc_server = on_address(address, serve_replica.add_port_to_grpc_server)


def on_address(address: str, add_port: Any) -> Any:
    """Return Serve's function that gives a server a port, for this address in place of all."""
    host = f"[{address}]" if ":" in address else address

    def add_port_on_address(server: Any, everywhere: str) -> int:
        port: int = add_port(server, f"{host}:{everywhere.rpartition(':')[2]}")
        return port

    return add_port_on_address
