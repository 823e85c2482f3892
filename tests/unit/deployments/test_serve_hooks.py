"""The gRPC server of a replica listens on the node's own address, where that is loopback."""

import grpc
import psutil
import pytest
from ray.serve._private import replica as serve_replica

from serve_app.deployments.serve_hooks import on_address


@pytest.mark.parametrize(("address", "expected"), [("127.0.0.1", "::ffff:127.0.0.1"), ("::1", "::1")])
async def test_the_server_listens_on_the_address_alone(address: str, expected: str) -> None:
    server = grpc.aio.server()
    port = on_address(address, serve_replica.add_port_to_grpc_server)(server, "[::]:0")
    await server.start()
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    await server.stop(None)
    assert listening == {expected}


def test_serve_opens_the_server_through_the_replaced_function() -> None:
    assert "add_port_to_grpc_server" in serve_replica.Replica._on_initialized.__code__.co_names
