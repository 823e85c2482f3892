"""The gRPC server of a replica listens on the node's own address, where that is loopback, and leaks nothing."""

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
from ray.serve._private import replica as serve_replica

from serve_app.deployments.serve_hooks import on_address, until_cancelled

NUM_CALLS = 300
LIMIT_S = 60
MAX_BYTES_A_CALL = 100


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


class HeapUse(ctypes.Structure):
    """Answer of glibc's mallinfo2."""

    _fields_ = [(f"other{number}", ctypes.c_size_t) for number in range(7)]
    _fields_ += [("used", ctypes.c_size_t), ("free", ctypes.c_size_t), ("top", ctypes.c_size_t)]


def used_bytes() -> int:
    """Return the bytes of the C heap that are in use."""
    gc.collect()
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("the C library does not tell what its heap holds")
    mallinfo2.restype = HeapUse
    return int(mallinfo2().used)


async def serve_like_ray(_request: bytes, _context: object) -> AsyncGenerator[Any]:
    """Stream that sends its cancellation as an error, as Serve's do."""
    yield SimpleNamespace(text=b"first", is_error=False)
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        yield SimpleNamespace(text=b"cancelled" * 6, is_error=True)


async def test_cancelled_streams_leave_nothing_on_the_heap() -> None:
    handler = grpc.unary_stream_rpc_method_handler(until_cancelled(serve_like_ray), None, lambda message: message.text)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("service", {"stream": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def cancel_calls() -> int:
            for _ in range(NUM_CALLS):
                call = channel.unary_stream("/service/stream")(b"")
                assert await call.read() == b"first"
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await call.code()
            await asyncio.sleep(0.1)
            return used_bytes()

        async with asyncio.timeout(LIMIT_S):
            left = await cancel_calls()
            left = await cancel_calls() - left
    await server.stop(0)
    assert left < NUM_CALLS * MAX_BYTES_A_CALL


async def test_errors_of_calls_that_go_on_are_sent() -> None:
    async def fail() -> AsyncGenerator[Any]:
        yield SimpleNamespace(is_error=True)

    assert [message.is_error async for message in until_cancelled(fail)()] == [True]


@pytest.mark.parametrize("name", ["HandleRequestStreaming", "HandleRequestWithRejectionStreaming"])
def test_serve_sends_the_errors_of_streams_as_messages(name: str) -> None:
    assert "is_error" in str(getattr(serve_replica.Replica, name).__code__.co_consts)
