"""Calls between processes, here between two ends in one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest

from replicas.errors import Overloaded, ServingError
from serve_app.jobs.rpc import RpcAddress, RpcClient, RpcLost, RpcServer
from tests.limits import LIMIT_S

HOST = "127.0.0.1"


class Methods:
    """What is called."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.was_cancelled = asyncio.Event()

    async def echo(self, *arguments: object) -> object:
        return arguments

    async def refuse(self) -> None:
        raise Overloaded("too many", 7.0, "max_batches_per_tenant", "rate_limit_exceeded")

    async def fail(self) -> None:
        raise ValueError("a secret")

    async def wait(self) -> None:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.was_cancelled.set()

    def by_name(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("echo", "refuse", "fail", "wait")}


@asynccontextmanager
async def serving(methods: Methods) -> AsyncIterator[tuple[RpcServer, RpcAddress]]:
    server = RpcServer(methods.by_name())  # type: ignore[arg-type]
    try:
        yield server, await server.start(HOST)
    finally:
        await server.stop()


@asynccontextmanager
async def calling(*addresses: RpcAddress) -> AsyncIterator[RpcClient]:
    """A client that is told these addresses in turn."""
    left = iter(addresses)

    async def find() -> RpcAddress:
        return next(left)

    client = RpcClient(find)
    try:
        yield client
    finally:
        await client.close()


async def test_calls_return_and_raise_what_the_method_does() -> None:
    async with serving(Methods()) as (_, address), calling(address) as client:
        large = b"x" * 5_000_000
        assert await client.call("echo", 1, large) == (1, large)
        many = await asyncio.gather(*(client.call("echo", number) for number in range(200)))
        assert many == [(number,) for number in range(200)]
        with pytest.raises(Overloaded) as refused:
            await client.call("refuse")
        assert (refused.value.retry_after_s, refused.value.code) == (7.0, "rate_limit_exceeded")


async def test_a_fault_is_told_without_its_words() -> None:
    async with serving(Methods()) as (_, address), calling(address) as client:
        for method in ("fail", "no such method"):
            with pytest.raises(ServingError) as error:
                await client.call(method)
            assert type(error.value) is ServingError and "secret" not in str(error.value)


async def test_a_server_that_is_gone_is_looked_for_again() -> None:
    async with (
        serving(Methods()) as (first, gone),
        serving(Methods()) as (_, present),
        calling(gone, present) as client,
    ):
        await client.call("echo")
        await first.stop()
        with contextlib.suppress(RpcLost):  # if it has not noticed yet
            await client.call("echo")
        assert await client.call("echo", 2) == (2,)


async def test_calls_under_way_are_lost_with_their_connection() -> None:
    methods = Methods()
    async with serving(methods) as (_, address), calling(address) as client:
        call = asyncio.create_task(client.call("wait"))
        await methods.has_begun.wait()
        await client.close()
        with pytest.raises(RpcLost):
            await call
        async with asyncio.timeout(LIMIT_S):
            await methods.was_cancelled.wait()


async def test_a_stranger_is_refused_and_nothing_it_sends_is_read() -> None:
    async with serving(Methods()) as (_, address):
        stranger = replace(address, token="guessed")
        async with calling(stranger, address) as client:
            with pytest.raises(RpcLost):
                await client.call("echo")
            assert await client.call("echo") == ()
        async with aiohttp.ClientSession() as session, session.get(address.url, data=b"no pickle") as response:
            assert response.status == 401


async def test_a_caller_that_leaves_cancels_its_call() -> None:
    methods = Methods()
    async with serving(methods) as (_, address), calling(address) as client:
        call = asyncio.create_task(client.call("wait"))
        await methods.has_begun.wait()
        call.cancel()
        async with asyncio.timeout(LIMIT_S):
            await methods.was_cancelled.wait()
            assert await client.call("echo", 1) == (1,)  # the others go on


async def test_calls_that_wait_end_when_the_server_stops() -> None:
    methods = Methods()
    async with serving(methods) as (server, address), calling(address) as client:
        call = asyncio.create_task(client.call("wait"))
        await methods.has_begun.wait()
        async with asyncio.timeout(LIMIT_S):
            await server.stop()
            with pytest.raises(RpcLost):
                await call
        assert methods.was_cancelled.is_set()
