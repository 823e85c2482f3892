"""Calls that are made again when the jobs process died before it answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serve_app.jobs.errors import BatchNotCancellable, UnknownFile
from serve_app.jobs.rpc import RpcAddress, RpcServer
from serve_app.jobs.serve_client import ServeJobs
from tests.unit.jobs.runtimes import until


class Handle:
    """What Serve gives: here it tells one address after the other."""

    def __init__(self, *addresses: RpcAddress) -> None:
        self._addresses = list(addresses)
        self.address = self

    async def remote(self) -> RpcAddress:
        return self._addresses.pop(0)


class Jobs:
    """The methods of a jobs process, which dies, if it is to, once it has done what it was asked for."""

    def __init__(self, done: dict[str, list[tuple[Any, ...]]], dies: bool) -> None:
        self._done = done
        self._dies = dies
        self._server: RpcServer | None = None

    async def start(self) -> RpcAddress:
        methods = {name: getattr(self, name) for name in ("cancel", "delete_file", "batch", "wait")}
        self._server = RpcServer(methods)
        return await self._server.start("127.0.0.1")

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop()

    async def cancel(self, *arguments: Any) -> str:
        return await self._do("cancel", arguments, BatchNotCancellable("it has ended"))

    async def delete_file(self, *arguments: Any) -> str:
        return await self._do("delete_file", arguments, UnknownFile("there is none"))

    async def batch(self, *arguments: Any) -> str:
        return "as it is"

    async def wait(self, *arguments: Any) -> str:
        return await self._do("wait", arguments, None)

    async def _do(self, name: str, arguments: tuple[Any, ...], again: Exception | None) -> str:
        calls = self._done.setdefault(name, [])
        calls.append(arguments)
        if self._dies:
            await asyncio.Event().wait()
        if len(calls) > 1 and again is not None:
            raise again
        return "done"


@asynccontextmanager
async def client_of(done: dict[str, list[tuple[Any, ...]]], *dies: bool) -> AsyncIterator[tuple[ServeJobs, list[Jobs]]]:
    """A client of processes that follow each other."""
    processes = [Jobs(done, each) for each in dies]
    client = ServeJobs(Handle(*[await process.start() for process in processes]))
    try:
        yield client, processes
    finally:
        await client.close()
        for process in processes:
            await process.stop()


@pytest.mark.parametrize(("method", "answer"), [("cancel", "as it is"), ("delete_file", None)])
async def test_what_was_done_before_the_answer_was_lost_is_done(method: str, answer: str | None) -> None:
    done: dict[str, list[tuple[Any, ...]]] = {}
    async with client_of(done, True, False) as (client, [first, _]):
        call = asyncio.create_task(getattr(client, method)("acme", "id"))
        await until(lambda: bool(done))
        await first.stop()
        assert await call == answer
    assert done[method] == [("acme", "id")] * 2


@pytest.mark.parametrize(("method", "error"), [("cancel", BatchNotCancellable), ("delete_file", UnknownFile)])
async def test_what_others_have_done_is_told(method: str, error: type[Exception]) -> None:
    async with client_of({method: [()]}, False) as (client, _):
        with pytest.raises(error):
            await getattr(client, method)("acme", "id")


async def test_who_waits_waits_no_longer_for_a_second_process() -> None:
    done: dict[str, list[tuple[Any, ...]]] = {}
    async with client_of(done, True, False) as (client, [first, _]):
        call = asyncio.create_task(client.wait("acme", "id", 60.0))
        await until(lambda: bool(done))
        await first.stop()
        assert str(await call) == "done"
    [(*_, before_s), (*_, after_s)] = done["wait"]
    assert after_s < before_s <= 60.0
