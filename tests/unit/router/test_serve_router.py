"""Calls of replicas over Serve's handle: each has a result or a `ServingError`."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from replicas.errors import ReplicaLost
from replicas.transport.wire import ChannelId
from router.scaling.ingress_reports import IngressGossip, PollReply
from router.serve_router import ServeReplicaClient, ServeTransport
from testkit.router.simulated_replicas import stats


class Handle:
    """Deployment handle whose broadcasts get no answer; replica `a` gives calls up, `b` answers, others hang."""

    def options(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(remote=self._call)

    def broadcast(self, *_: object) -> SimpleNamespace:
        async def results(**_: object) -> list[Any]:
            raise TimeoutError

        return SimpleNamespace(results_async=results)

    def _call(self, *_: object, ranking: list[str]) -> asyncio.Future[Any]:
        result = asyncio.get_running_loop().create_future()
        if ranking == ["a"]:
            result.cancel()
        if ranking == ["b"]:
            result.set_result(PollReply(stats("b"), ()))
        return result


def client_of(*replica_ids: str) -> ServeReplicaClient:
    gossip = IngressGossip("ingress")
    gossip.polled = [stats(replica_id) for replica_id in replica_ids]
    handle: Any = Handle()
    return ServeReplicaClient(handle, gossip)


async def test_a_call_that_a_replica_gives_up_is_an_error() -> None:
    """Not a cancellation, which would end the caller's loop without a word."""
    with pytest.raises(ReplicaLost):
        await client_of("a", "b").drain("a")


async def test_a_poll_that_a_replica_gives_up_has_the_replies_of_the_others() -> None:
    assert [polled.replica_id for polled in await client_of("a", "b").poll_stats()] == ["b"]


async def test_a_caller_that_is_cancelled_gets_no_error_in_its_place() -> None:
    call = asyncio.create_task(client_of().drain("c"))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


class Response:
    """Streamed answer without results; gRPC frees what it has allocated for a wait if the call is cancelled first."""

    def __init__(self) -> None:
        self._is_cancelled = asyncio.Event()
        self.ends: list[str] = []

    def cancel(self) -> None:
        self._is_cancelled.set()

    async def __anext__(self) -> Any:
        try:
            await self._is_cancelled.wait()
        except asyncio.CancelledError:
            self.ends.append("the wait was cancelled")
            raise
        self.ends.append("the call was cancelled")
        raise RuntimeError("nobody waits for this any more")


async def test_a_reader_that_is_cancelled_cancels_the_call_and_no_wait_for_its_results() -> None:
    response = Response()
    handle: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_, **__: response))
    results = ServeTransport(handle).submit([], [], ChannelId("ingress", 1))
    reading = asyncio.create_task(anext(results))
    await asyncio.sleep(0.01)
    assert not response.ends
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.sleep(0.01)
    assert response.ends == ["the call was cancelled"]
